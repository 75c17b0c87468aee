"""Is a pair that cannot be routed refused in words, and does the proof see through a wrong route, whoever made it?"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.pairs.small import GROUP, engine

from kvreshard.kinds import Attention, Latent, Mamba1, Opaque, Ring
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import (
    Axis,
    AxisMap,
    Cyclic,
    Digit,
    EngineLayout,
    Field,
    Geometry,
    Group,
    Interval,
    LayoutMismatch,
    Rank,
    Region,
    Shard,
    Slab,
)
from kvreshard.model.changed import replace
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import RankTransfer, Route, bind, compile_route, match_fields
from kvreshard.plan.check import prove
from kvreshard.plan.match import differences
from kvreshard.plan.pattern import Bases
from kvreshard.plan.transfer import Span

SRC, DST = engine("prefill", tp=2), engine("decode", tp=1)


def mismatch(facts: str, call: Callable[[], object]) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        call()
    for fact in facts.split("|"):
        assert fact in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("src", "dst", "facts"),
    [
        (
            Attention(2, 2, "bfloat16"),
            Attention(2, 2, "float16"),
            "fields 'layers.0.k', 'layers.0.v': encoding|'bfloat16' in engine 'prefill'|'float16' in engine 'decode'|same cache dtype",
        ),
        (
            Attention(2, 2, "bfloat16", quantisation="scales-1"),
            Attention(2, 2, "bfloat16", quantisation="scales-2"),
            "encoding|'bfloat16/scales-1'|'bfloat16/scales-2'|quantisation",
        ),
        (Attention(2, 2, "bfloat16"), Attention(2, 2, "float32"), "encoding|'bfloat16' in|'float32' in|dtype"),
        (
            Attention(2, 2, "bfloat16"),
            Attention(4, 2, "bfloat16"),
            "fields 'layers.0.k', 'layers.0.v': the extent of axis 'head'|2 in engine 'prefill'|4 in engine 'decode'|same model|sharded size",
        ),
        (Attention(2, 2, "bfloat16"), Attention(2, 2, "bfloat16", 3), "field 'layers.0.v'|axis 'channel'|2 in|3 in"),
        (
            Latent(4, "bfloat16"),
            Latent(4, "bfloat16", tokens_per_state=2),
            "tokens per index of axis 'token'|1 in|2 in|same compression",
        ),
        (Opaque(8, 4, "amx"), Opaque(9, 4, "vec"), "encoding is|axis 'byte'|8 in|9 in|: the encodings may be why"),
        (Opaque(8, 4, "amx"), Opaque(8, 4, "vec"), "encoding|'opaque/amx'|'opaque/vec'"),
        (Opaque(8, 4, "amx"), Opaque(9, 4, "amx"), "axis 'byte'|8 in|9 in"),
        (
            Attention(2, 2, "bfloat16"),
            Latent(4, "bfloat16"),
            "'layers.0.k'|'layers.0.latent'|same model|declared optional",
        ),
    ],
)
def test_fields_must_mean_the_same(src: Any, dst: Any, facts: str) -> None:
    mismatch(facts, lambda: compile_route(engine("prefill", kind=src), engine("decode", kind=dst), 0))


def test_opaque_pages_need_equal_sizes_of_engine_and_page() -> None:
    one, two = engine("prefill", kind=Opaque(8, 4, "x"), tp=2), engine("decode", kind=Opaque(8, 4, "x"), tp=1)
    mismatch("'layers.0.page'|axis 'part'|2 in|1 in", lambda: compile_route(one, two, 0))
    one, two = engine("prefill", kind=Opaque(8, 4, "x")), engine("decode", kind=Opaque(8, 2, "x"), page=2)
    mismatch("'layers.0.page'|tokens per index|4 in|2 in|same page size", lambda: compile_route(one, two, 0))


def test_whether_partial_indices_move_must_agree() -> None:
    field = DST.fields[0]
    other = replace(field, axes=(Axis("token", None, 1, keep_partial=True), *field.axes[1:]))
    dst = replace(DST, fields=(other, *DST.fields[1:]))
    mismatch("'layers.0.k'|axis 'token'", lambda: match_fields(SRC, dst))


def with_draft(name: str, optional: bool) -> EngineLayout:
    kind = Attention(2, 2, "bfloat16")
    layers = [Layer("layers.0", kind), Layer("draft.0", kind, optional=optional)]
    return assemble(name, layers, [PagedGroup(GROUP, ("layers.0", "draft.0"), 4)], Grid(), order="NHD", num_pages=10)


@pytest.mark.parametrize("missing_at", ["prefill", "decode"])
def test_a_field_on_one_side_is_refused_or_a_warning(missing_at: str) -> None:
    def pair(optional: bool) -> tuple[EngineLayout, EngineLayout]:
        src = engine("prefill") if missing_at == "prefill" else with_draft("prefill", optional)
        dst = engine("decode") if missing_at == "decode" else with_draft("decode", optional)
        return src, dst

    having = "decode" if missing_at == "prefill" else "prefill"
    facts = f"fields 'draft.0.k', 'draft.0.v': in engine '{having}' but not in engine '{missing_at}'|declared optional"
    mismatch(facts, lambda: compile_route(*pair(False), 0))
    route = compile_route(*pair(True), 0)
    assert len(route.warnings) == 1
    assert "'draft.0.k', 'draft.0.v'" in route.warnings[0]
    assert "not moved" in route.warnings[0]
    assert {name for transfer in route.transfers for name in transfer.fields} == {"layers.0.k", "layers.0.v"}


def test_each_finding_is_told_once_with_its_fields() -> None:
    def six_layers(name: str, kind: Any) -> EngineLayout:
        return engine(name, stages=(0,) * 6, kind=kind)

    src = six_layers("prefill", Attention(2, 2, "bfloat16"))
    with pytest.raises(LayoutMismatch) as caught:
        match_fields(src, six_layers("decode", Attention(2, 2, "float16")))
    assert str(caught.value) == (
        "fields 'layers.0.k', 'layers.0.v', 'layers.1.k' and 9 more: encoding is 'bfloat16' in engine 'prefill' and 'float16' "
        "in engine 'decode': use the same cache dtype and quantisation: the same --kv-cache-dtype (and --dtype, where that is auto) on both engines"
    )
    dst = six_layers("decode", Attention(4, 2, "bfloat16", 3))
    told = "fields 'layers.0.k', 'layers.0.v', 'layers.1.k' and 9 more: the extent of axis 'head'"
    also = "; fields 'layers.0.v', 'layers.1.v', 'layers.2.v' and 3 more: the extent of axis 'channel'"
    mismatch(f"{told}|{also}", lambda: match_fields(src, dst))


@pytest.mark.parametrize(
    ("name", "axes", "option"),
    [
        ("layers.0.attn.k", (Axis("token", None), Axis("head", 2)), "use the same cache dtype and quantisation: the same --kv-cache-dtype"),
        ("layers.0.mixer.ssm", (Axis("head", 2), Axis("channel", 4)), "the same --mamba-ssm-cache-dtype"),
        ("layers.0.mixer.conv.x", (Axis("channel", 4), Axis("tap", 3)), "the same --mamba-cache-dtype on both"),
    ],
)  # fmt: skip
def test_a_refusal_of_encodings_names_the_option_that_sets_it(name: str, axes: tuple[Axis, ...], option: str) -> None:
    (told,) = differences("p", Field(name, axes, 4, "float32"), "d", Field(name, axes, 2, "bfloat16"))
    assert option in told


def test_a_draft_that_begins_without_a_cache_is_told() -> None:
    lost = "fewer of its tokens are accepted; run the same draft on both sides"
    (told,) = match_fields(engine("p"), with_draft("d", optional=True)).warnings
    assert lost in told
    (told,) = match_fields(with_draft("p", optional=True), engine("d")).warnings
    assert lost not in told


def test_of_many_different_findings_the_first_are_told() -> None:
    src = engine("prefill", stages=(0,) * 10, kind=Opaque(8, 4, "x"))
    dst = replace(src, fields=tuple(replace(field, encoding=f"other {i}") for i, field in enumerate(src.fields)))
    mismatch("field 'layers.0.page': encoding|'other 7'| (and 2 more)", lambda: match_fields(src, dst))


ROUTE = compile_route(SRC, DST, 0)


def routed(*transfers: RankTransfer) -> Route:
    return replace(ROUTE, transfers=transfers)


def with_axis(transfer: RankTransfer, number: int, **parts: Any) -> RankTransfer:
    axes = list(transfer.axes)
    axes[number] = replace(axes[number], **parts)
    return replace(transfer, axes=tuple(axes))


def transfer_of(src_rank: int) -> RankTransfer:
    return next(transfer for transfer in ROUTE.transfers if transfer.src_rank == src_rank)


def based(transfer: RankTransfer, side: str, delta: int) -> RankTransfer:
    bases = replace(transfer.bases, **{side: getattr(transfer.bases, side) + delta})
    return replace(transfer, bases=bases)


def of_fields(transfer: RankTransfer, *numbers: int) -> RankTransfer:
    """The transfer with some of its fields only, as often as they are asked for."""
    rows = list(numbers)
    bases = Bases(transfer.bases.src[rows], transfer.bases.dst[rows], transfer.bases.region[rows])
    return replace(transfer, fields=tuple(transfer.fields[row] for row in rows), bases=bases)


ZERO, ONE = transfer_of(0), transfer_of(1)
HEAD = ONE.axes[1]


@pytest.mark.parametrize(
    ("transfers", "facts"),
    [
        ((ZERO,), "field 'layers.0.k'|a hole|rank 0|head [0, 2)|rank 0 gives|head [0, 1)"),
        ((), "field 'layers.0.k'|a hole|nobody gives anything"),
        ((ZERO, ONE, ONE), "ranks 1 and 1 both write the same cells|head [1, 2)"),
        ((ZERO, ONE, of_fields(ONE, 1)), "field 'layers.0.v': ranks 1 and 1 both write the same cells"),
        ((ZERO, of_fields(ONE, 0)), "field 'layers.0.v'|a hole|rank 0 gives|head [0, 1)"),
        ((of_fields(ZERO, 0, 1, 0), ONE), "field 'layers.0.k': ranks 0 and 0 both write the same cells"),
        (
            (with_axis(ZERO, 1, chosen=Interval(0, 2)), ONE),
            "field 'layers.0.k', axis 'head': [0, 2) is read from rank 0, which holds only [0, 1)",
        ),
        (
            (with_axis(ZERO, 0, chosen=Cyclic(0, 1, 2)), ONE),
            "field 'layers.0.k'|a hole|token 1 of every 2 from 0",
        ),
        # Where an axis ends is known to the axis, not to a box.
        ((with_axis(ZERO, 0, chosen=Interval(0, 5)), ONE), "axis 'token': [0, 5) is no part of an axis without end"),
        ((with_axis(ZERO, 1, chosen=Interval(1, 3)), ONE), "axis 'head': [1, 3) is no part of an axis of 2"),
        ((with_axis(ZERO, 1, chosen=Interval(0, None)), ONE), "axis 'head': [0, ...) is no part of an axis of 2"),
        (
            (with_axis(ZERO, 1, chosen=Cyclic(0, 1, 3)), ONE),
            "axis 'head': 1 of every 3 from 0 is no part of an axis of 2",
        ),
        ((with_axis(ZERO, 1, src=HEAD.src), ONE), "source rank 0, axis 'head'|the transfer maps|its layout says"),
        ((with_axis(ZERO, 0, dst=ZERO.axes[0].src), ONE), "destination rank 0, axis 'token'|its layout says"),
        ((replace(ZERO, axes=ZERO.axes[:2]), ONE), "2 axes, its layout has 3"),
        ((with_axis(ZERO, 1, axis=Axis("channel", 2)), ONE), "channel of 2|its layout has|head of 2"),
        ((with_axis(ZERO, 1, axis=Axis("head", 3)), ONE), "head of 3|its layout has|head of 2"),
        ((replace(ZERO, dst_rank=4), ONE), "a transfer to rank 4 in the route of rank 0"),
        ((with_axis(ZERO, 0, axis=Axis("token", None, 2)), ONE), "axes token (2 to an index)|its layout has token"),
        (
            (with_axis(ZERO, 0, axis=Axis("token", None, keep_partial=True)), ONE),
            "axes token (partial ones too)|its layout has token, head",
        ),
        ((replace(ZERO, src_span=replace(ZERO.src_span, indices=3)), ONE), "source rank 0, axis 'token': a span of 3"),
        (
            (replace(ZERO, dst_span=replace(ZERO.dst_span, pages=2)), ONE),
            "destination rank 0|a span of 4 indices in 2 pages",
        ),
        ((replace(ZERO, dst_span=replace(ZERO.dst_span, ring_pages=1)), ONE), "ring of 1|ring of None"),
        ((replace(ZERO, src_rank=1), ONE), "source rank 1|axis 'head'"),
        ((replace(ZERO, element_bytes=1), ONE), "elements of 1 bytes, its layout says 2"),
        ((replace(ZERO, src_page_stride_bytes=7), ONE), "source rank 0|pages every 7 bytes|says 32"),
        ((replace(ZERO, dst_page_stride_bytes=65), ONE), "destination rank 0|pages every 65 bytes|says 64"),
        ((based(ZERO, "src", 2), ONE), "source rank 0|first cell at address 1000002|says 1000000"),
        # Of fields of unequal room the last one alone is too long.
        (
            (replace(ZERO, element_bytes=4), ONE),
            "field 'layers.0.v', destination rank 0: addresses [2000004, 2000642) are out of bounds",
        ),
        ((based(ZERO, "dst", 1000), ONE), "out of bounds of region 'kv' [2000000, 2000640)"),
        ((based(ZERO, "src", -1), ONE), "out of bounds of region 'kv'"),
        ((replace(ZERO, src_group=replace(ZERO.src_group, name="other")), ONE), "block table of group 'other'|'full'"),
        ((replace(ZERO, dst_group=replace(ZERO.dst_group, num_pages=99)), ONE), "out of bounds|block table"),
        ((replace(ZERO, fields=("layers.0.k", "layers.0.k")), ONE), "field 'layers.0.v'|a hole"),
    ],
)
def test_the_proof_refuses_a_wrong_route(transfers: tuple[RankTransfer, ...], facts: str) -> None:
    mismatch(
        "route from engine 'prefill' to rank 0 of engine 'decode' is not provable|" + facts,
        lambda: prove(routed(*transfers), SRC, DST),
    )


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("span", [Span(2, 2, 1, None), Span(1, 1, None, None), Span(1, 1, 2, None), Span(1, 1, 1, 4)])
def test_the_proof_refuses_a_state_that_is_not_one_page(span: Span, side: str) -> None:
    kind = Mamba1(4, 2, 2, "bfloat16", "bfloat16")
    src, dst = engine("prefill", kind=kind), engine("decode", kind=kind)
    route = compile_route(src, dst, 0)
    prove(route, src, dst)
    moved = tuple(replace(transfer, **{f"{side}_span": span}) for transfer in route.transfers)
    mismatch("a state is one page", lambda: prove(replace(route, transfers=moved), src, dst))


@pytest.mark.parametrize("capacity", [None, 7, 9])
def test_the_proof_refuses_a_ring_that_holds_another_number_of_tokens(capacity: int | None) -> None:
    """Of a ring that is said to hold more, tokens would be moved that were overwritten."""
    src, dst = engine("prefill", kind=Ring(8, 2, "bfloat16")), engine("decode", kind=Ring(8, 2, "bfloat16"))
    route = compile_route(src, dst, 0)
    prove(route, src, dst)
    moved = tuple(replace(one, src_span=replace(one.src_span, capacity=capacity)) for one in route.transfers)
    mismatch(f"for {capacity} indices|for 8", lambda: prove(replace(route, transfers=moved), src, dst))


def test_the_proof_accepts_the_right_route_and_its_transfers_in_any_order() -> None:
    prove(ROUTE, SRC, DST)
    prove(routed(*reversed(ROUTE.transfers)), SRC, DST)
    prove(routed(of_fields(ONE, 1), ZERO, of_fields(ONE, 0)), SRC, DST)


def test_the_proof_refuses_fields_of_another_rank() -> None:
    """A pipeline stage that does not hold the field."""
    src, dst = engine("prefill", stages=(0, 1)), engine("decode", stages=(0, 0))
    route = compile_route(src, dst, 0)
    moved = tuple(replace(transfer, src_rank=1 - transfer.src_rank) for transfer in route.transfers)
    mismatch("does not hold the field", lambda: prove(replace(route, transfers=moved), src, dst))


def test_the_proof_refuses_unequal_encodings() -> None:
    """A route made for equal fields, shown layouts that are not equal."""
    fp16 = engine("prefill", tp=2, kind=Attention(2, 2, "float16"))
    mismatch("'layers.0.k'|encoding|'float16'|'bfloat16'", lambda: prove(ROUTE, fp16, DST))


def test_a_transfer_of_fewer_axes_is_told_and_not_compared_with_others() -> None:
    fewer = replace(ZERO, axes=(ZERO.axes[0], ZERO.axes[2]))
    for transfers in ((fewer, ONE), (ONE, fewer)):
        mismatch("2 axes, its layout has 3", lambda transfers=transfers: prove(routed(*transfers), SRC, DST))


def test_the_proof_compares_every_field_of_a_transfer() -> None:
    """One field of several in a transfer is not what it was, whichever it is."""
    assert len(ZERO.fields) == 2
    for name in ZERO.fields:
        fields = [replace(field, encoding="float16") if field.name == name else field for field in SRC.fields]
        other = replace(SRC, fields=tuple(fields))
        mismatch(f"'{name}'|encoding|'float16'|'bfloat16'", lambda other=other: prove(ROUTE, other, DST))


def test_a_sharded_length_for_a_replicated_field_is_refused() -> None:
    """A source that splits the channels of a latent, for a destination that has them whole on every rank."""
    src, dst = engine("prefill", tp=2, kind=Latent(4, "bfloat16")), engine("decode", kind=Latent(4, "bfloat16"))
    halves = []
    for rank in src.ranks:
        shard = rank.shards[0]
        channel = replace(shard.geometry.axes[1], owned=Interval(0, 2))
        geometry = replace(shard.geometry, axes=(shard.geometry.axes[0], channel))
        halves.append(rank.with_shards((replace(shard, geometry=geometry),)))
    mismatch(
        "'layers.0.latent', axis 'channel'|rank 0 of engine 'decode' holds [0, 4)|[2, 4) has no source|[0, 2)",
        lambda: compile_route(replace(src, ranks=tuple(halves)), dst, 0),
    )


def test_bases_are_proved_field_by_field() -> None:
    """Two fields of one transfer with their addresses swapped: right bytes in number, wrong bytes in place."""
    swapped = replace(ZERO, bases=replace(ZERO.bases, src=np.flip(ZERO.bases.src)))
    mismatch(
        "'layers.0.k', source rank 0: first cell at address 1000004", lambda: prove(routed(swapped, ONE), SRC, DST)
    )


def two_fields(name: str, regions: tuple[tuple[str, int], ...]) -> EngineLayout:
    """One rank, one page of one state: fields `a` and `b` of 8 bytes each, back to back from address 4096 on."""
    geometry = Geometry("g", 16, (AxisMap("channel", Interval(0, 8), (Digit(8, 0, 1),)),))
    places = {"a": 0, "b": 8}
    held = tuple(
        Region(region, 4096 + sum(s for _, s in regions[:n]), size) for n, (region, size) in enumerate(regions)
    )
    shards, slabs = [], []
    for number, (field, place) in enumerate(places.items()):
        region = held[min(number, len(held) - 1)]
        offset = place - (region.address - 4096)
        shards.append(Shard(field, region.name, offset, geometry))
        slabs.append(Slab("p", region.name, offset, 16, 8))
    return EngineLayout(
        name,
        tuple(Field(field, (Axis("channel", 8),), 1, "bytes") for field in places),
        (Group("g", "p", 1, None),),
        (Rank.of(0, (), held, tuple(slabs), tuple(shards)),),
    )


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_copy_never_goes_on_into_another_region(side: str) -> None:
    """Two fields lie back to back on both sides, on one of them in regions of their own, which are registered apart."""
    whole, apart = (("kv", 16),), (("k", 8), ("v", 8))
    src = two_fields("prefill", apart if side == "source" else whole)
    dst = two_fields("decode", apart if side == "destination" else whole)
    request = Request({"g": PageTable([0], 4)}, {"g": PageTable([0], 4)}, {"g": [(0, 4)]}, {})
    copies = [copy for part in bind(compile_route(src, dst, 0), request) for copy in part.length.tolist()]
    assert copies == [8, 8]
    one = two_fields("prefill", whole), two_fields("decode", whole)
    assert [part.length.tolist() for part in bind(compile_route(*one, 0), request)] == [[16]]
