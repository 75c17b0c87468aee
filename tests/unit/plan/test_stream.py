"""Are lanes put together exactly where one frame can say what each of them reads?"""

import numpy as np
from tests.pairs.small import engine

from kvreshard.kinds import Attention, Latent
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model.changed import replace
from kvreshard.plan import Lane, compile_route
from kvreshard.plan.stream import make_streams


def lanes_of(tp: int) -> tuple[Lane, ...]:
    return compile_route(engine("prefill", tp=tp, order="HND"), engine("decode", order="HND"), 0).lanes


def test_lanes_of_one_rank_and_one_group_are_one_sheaf() -> None:
    layers = [Layer(f"layers.{i}", Attention(2, 2 + i, "bfloat16")) for i in range(2)]
    groups = [PagedGroup("full", ("layers.0", "layers.1"), 4)]
    src, dst = (assemble(name, layers, groups, Grid(), order="HND", num_pages=9) for name in ("prefill", "decode"))
    route = compile_route(src, dst, 0)
    (stream,) = route.streams
    assert len(stream.lanes) > 1
    assert sum(len(sheaf.lanes) for sheaf in stream.sheaves) == len(stream.lanes)
    assert sum(sheaf.page_bytes for sheaf in stream.sheaves) == sum(
        lane.pattern((0, 0, 4)).num_bytes for lane in stream.lanes
    )


def test_a_page_of_a_sheaf_has_the_bytes_of_all_of_its_lanes() -> None:
    lane, _ = lanes_of(tp=2)
    (stream,) = make_streams([lane, lane])
    (sheaf,) = stream.sheaves
    assert sheaf.lanes == (lane, lane)
    assert (
        sheaf.page_bytes == int(sheaf.frame.length.sum()) == 2 * lane.pattern((0, 0, lane.src_span.indices)).num_bytes
    )


def test_every_source_rank_has_its_own_sheaf() -> None:
    (stream,) = make_streams(lanes_of(tp=2))
    assert [sheaf.lanes[0].src_rank for sheaf in stream.sheaves] == [0, 1]


def test_other_strides_are_another_sheaf() -> None:
    """Of a lane whose pages never join: part of the heads."""
    lane, _ = lanes_of(tp=2)
    for name in ("src_page_stride_bytes", "dst_page_stride_bytes"):
        wider = replace(lane, **{name: 2 * getattr(lane, name)})
        (stream,) = make_streams([lane, wider])
        first, second = stream.sheaves
        assert (first.frame.src_stride, first.frame.dst_stride) != (second.frame.src_stride, second.frame.dst_stride)


def test_groups_that_overlay_one_another_share_a_frame() -> None:
    layers = [Layer(name, Latent(4, "bfloat16")) for name in ("a", "b")]
    groups = [PagedGroup("one", ("a",), 4), PagedGroup("two", ("b",), 4)]
    src, dst = (assemble(name, layers, groups, Grid(), order="NHD", num_pages=9) for name in ("prefill", "decode"))
    frames = [sheaf.frame for stream in compile_route(src, dst, 0).streams for sheaf in stream.sheaves]
    assert len(frames) == 2
    assert frames[0] is frames[1]
    assert np.array_equal(frames[0].length, [4 * 4 * 2])
