"""Is every cell where the engines put it? Against plain NumPy views of the shapes that vLLM 0.32 gives its caches.

The planner and the oracle both believe what a kind says, so nothing but a second description can show that a kind is wrong.
Here it is: an array of byte numbers, reshaped and transposed as the engine does it, one formula per interior.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.pairs.small import engine

from kvreshard.kinds import Attention, GatedDelta, Latent, Mamba1, Mamba2, Opaque, Ring, ScaledRows, ShortConv, Style
from kvreshard.kinds.assemble import ORDERS, Grid, Layer, PagedGroup, assemble
from kvreshard.model import EngineLayout, LayoutError

PAGES, LAYERS = 3, 2
Numbers = NDArray[np.int64]


def cells(
    layout: EngineLayout, rank: int, field: str, page: int, tokens: int | None
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Every cell of one page of a field on a rank: its coordinates and the number of its first byte in the region."""
    holder = layout.rank_by_number[rank]
    shard = holder.shard_by_field[field]
    axes = []
    for axis, mapped in zip(layout.field_by_name[field].axes, shard.geometry.axes, strict=True):
        count = mapped.indices_per_page if axis.extent is None else mapped.num_held
        assert count is not None
        local = np.arange(count, dtype=np.int64) + (page * count if axis.extent is None else 0)
        pages, offsets = mapped.locate(local)
        if axis.extent is None and mapped.ring_pages is None:
            assert set(pages.tolist()) == {page}
        axes.append(list(zip(mapped.owned.to_global(local).tolist(), offsets.tolist(), strict=True)))
    for cell in product(*axes):
        start = shard.offset_bytes + page * shard.geometry.page_stride_bytes + sum(offset for _, offset in cell)
        yield tuple(coordinate for coordinate, _ in cell), start


def buffer(order: str, slots: int, states: int, cell: int) -> Numbers:
    """Byte numbers of a cache of logical shape (layers, pages, slots, states, cell bytes) in one of the six orders."""
    extents = {"L": LAYERS, "B": PAGES, "H": slots, "N": states, "C": cell}
    numbers = np.arange(LAYERS * PAGES * slots * states * cell).reshape([extents[d] for d in order])
    return numbers.transpose([order.index(d) for d in "LBHNC"])


def attention(
    order: str, heads: int, k: int, v: int, states: int, interior: str, tp: int = 1, **options: Any
) -> EngineLayout:
    kind = Attention(heads, k, "bfloat16", v)
    style = Style(interior=interior, **options)
    return engine(
        "prefill", tp=tp, kind=kind, page=states, num_pages=PAGES, order=order, style=style, stages=(0,) * LAYERS
    )


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("heads", "k", "v"), [(3, 2, 2), (2, 4, 3), (1, 2, 5)])
def test_k_then_v_in_a_cell(order: str, heads: int, k: int, v: int) -> None:
    layout = attention(order, heads, k, v, 4, "cell")
    numbers = buffer(order, heads, 4, 2 * (k + v))
    for layer, page in product(range(LAYERS), range(PAGES)):
        for (token, head, channel), byte in cells(layout, 0, f"layers.{layer}.k", page, 4):
            assert byte == numbers[layer, page, head, token % 4, 2 * channel]
        for (token, head, channel), byte in cells(layout, 0, f"layers.{layer}.v", page, 4):
            assert byte == numbers[layer, page, head, token % 4, 2 * (k + channel)]


@pytest.mark.parametrize("order", ORDERS)
def test_a_slot_for_k_and_one_for_v(order: str) -> None:
    layout = attention(order, 3, 2, 2, 4, "slots")
    numbers = buffer(order, 2, 4, 3 * 2 * 2)
    for layer, page, (slot, part) in product(range(LAYERS), range(PAGES), enumerate("kv")):
        for (token, head, channel), byte in cells(layout, 0, f"layers.{layer}.{part}", page, 4):
            assert byte == numbers[layer, page, slot, token % 4, 2 * (head * 2 + channel)]


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_k_of_all_pages_then_v_of_all_pages(order: str) -> None:
    layout = attention(order, 3, 2, 5, 4, "separate")
    k, v = buffer(order, 3, 4, 4), buffer(order, 3, 4, 10)
    for layer, page in product(range(LAYERS), range(PAGES)):
        for (token, head, channel), byte in cells(layout, 0, f"layers.{layer}.k", page, 4):
            assert byte == k[layer, page, head, token % 4, 2 * channel]
        for (token, head, channel), byte in cells(layout, 0, f"layers.{layer}.v", page, 4):
            assert byte == k.size + v[layer, page, head, token % 4, 2 * channel]


@pytest.mark.parametrize("order", ["LBHNC", "BLHNC", "LHBNC", "BHLNC"])
@pytest.mark.parametrize("interior", ["planes", "planes-kt", "tiles"])
def test_planes_and_tiles(order: str, interior: str) -> None:
    heads, k, v, states = 2, 6, 32, 32
    layout = attention(order, heads, k, v, states, interior)
    numbers = buffer(order, heads, states, 2 * (k + v))
    for layer, page in product(range(LAYERS), range(PAGES)):
        for head in range(heads):
            flat = numbers[layer, page, head].reshape(-1)[::2]  # the number of each value's first byte
            k_plane, v_plane = flat[: states * k], flat[states * k :]
            if interior == "planes":
                k_at, v_at = k_plane.reshape(states, k), v_plane.reshape(states, v)
            elif interior == "planes-kt":
                k_at, v_at = k_plane.reshape(k, states).T, v_plane.reshape(states, v)
            else:
                k_at = k_plane.reshape(states // 16, k // 2, 16, 2).transpose(0, 2, 1, 3).reshape(states, k)
                v_at = v_plane.reshape(v // 16, states // 2, 16, 2).transpose(1, 3, 0, 2).reshape(states, v)
            for part, at in (("k", k_at), ("v", v_at)):
                for (token, here, channel), byte in cells(layout, 0, f"layers.{layer}.{part}", page, states):
                    if here == head:
                        assert byte == at[token % states, channel]


@pytest.mark.parametrize(
    ("order", "interior"), [("LBHNC", "cell"), ("LBHNC", "planes"), ("LBNHC", "cell"), ("LBHNC", "slots")]
)
def test_kernel_blocks_are_small_pages(order: str, interior: str) -> None:
    """A page of 6 tokens in kernel blocks of 2: three pages of 2 tokens, one behind the other."""
    layout = attention(order, 2, 2, 2, 6, interior, kernel_tokens=2)
    small = engine(
        "prefill",
        kind=Attention(2, 2, "bfloat16"),
        page=2,
        num_pages=PAGES * 3,
        order=order,
        style=Style(interior=interior),
        stages=(0,) * LAYERS,
    )
    for layer, part, page in product(range(LAYERS), "kv", range(PAGES)):
        expected = {
            cell: byte
            for block in range(3)
            for cell, byte in cells(small, 0, f"layers.{layer}.{part}", page * 3 + block, 2)
        }
        assert dict(cells(layout, 0, f"layers.{layer}.{part}", page, 6)) == expected


def test_context_parallel_ranks_hold_the_same_heads_and_every_other_run_of_tokens() -> None:
    layout = engine("prefill", tp=6, dcp=3, interleave=2, page=4, kind=Attention(2, 1, "bfloat16"))
    for rank in range(6):
        held = [cell for page in range(2) for cell, _ in cells(layout, rank, "layers.0.k", page, 4)]
        assert {head for _, head, _ in held} == {rank // 3}
        assert sorted(token for token, _, _ in held) == [t for t in range(24) if t // 2 % 3 == rank % 3]
    assert layout.groups[0].tokens_per_page == 12


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [
        (8, 2, [range(4), range(4, 8)]),
        (5, 3, [range(1), range(1, 3), range(3, 5)]),
        (2, 4, [range(1), range(1), range(1, 2), range(1, 2)]),
        (2, 3, [range(1), range(1), range(1, 2)]),
    ],
)
def test_heads_of_each_rank(heads: int, tp: int, expected: list[range]) -> None:
    layout = engine("prefill", tp=tp, kind=Attention(heads, 1, "bfloat16"))
    for rank, held in enumerate(expected):
        assert sorted({head for (_, head, _), _ in cells(layout, rank, "layers.0.k", 0, 4)}) == list(held)


def test_a_latent_counts_states_of_several_tokens() -> None:
    layout = engine("prefill", kind=Latent(3, "bfloat16", tokens_per_state=4), page=8)
    assert layout.groups[0].tokens_per_page == 8
    assert layout.fields[0].axes[0].tokens_per_index == 4
    assert dict(cells(layout, 0, "layers.0.latent", 1, 2)) == {
        (s, c): 12 + (s - 2) * 6 + c * 2 for s in (2, 3) for c in range(3)
    }


def test_scaled_rows_put_the_scales_of_a_kernel_block_behind_its_rows() -> None:
    layout = engine("prefill", kind=ScaledRows(3, 2, "q", kernel_tokens=2), page=4)
    rows, scales = (dict(cells(layout, 0, f"layers.0.index_{name}", 1, 4)) for name in ("k", "scale"))
    assert rows == {(4 + t, c): 20 + t // 2 * 10 + t % 2 * 3 + c for t in range(4) for c in range(3)}
    assert scales == {(4 + t, c): 20 + t // 2 * 10 + 6 + t % 2 * 2 + c for t in range(4) for c in range(2)}


def test_a_ring_is_as_long_as_what_lives_and_what_speculation_adds() -> None:
    layout = engine("prefill", kind=Ring(6, 1, "bfloat16", tokens_per_state=2), style=Style(speculative_tokens=2))
    assert layout.groups[0].tokens_per_page == 10
    mapped = layout.ranks[0].shards[0].geometry.axis("token")
    assert mapped.locate(np.arange(7, dtype=np.int64))[1].tolist() == [0, 2, 4, 6, 8, 0, 2]


def test_parts_of_a_ring_lie_behind_one_another() -> None:
    layout = engine("prefill", kind=Ring(3, 2, "bfloat16", ("k", "gate")), order="HND")
    for part, first in (("k", 0), ("gate", 12)):
        mine = next(shard for shard in layout.ranks[0].shards if shard.field == f"layers.0.{part}")
        assert mine.offset_bytes == first
        assert mine.geometry.axis("token").locate(np.arange(4, dtype=np.int64))[1].tolist() == [0, 4, 8, 0]


@pytest.mark.parametrize("order", ["NHD", "HND", "BLHNC"])
@pytest.mark.parametrize("kernel", [None, 2, 4])
def test_kernel_blocks_of_a_ring_are_laid_out_like_small_pages(order: str, kernel: int | None) -> None:
    kind, size = Ring(8, 2, "bfloat16", ("k", "gate")), kernel or 8
    layout = engine("prefill", kind=kind, order=order, style=Style(kernel_tokens=kernel))
    # One byte number per block, part, entry and byte of a cell, in the order of the memory.
    shape = (8 // size, size, 2, 4) if order == "NHD" else (8 // size, 2, size, 4)
    numbers = np.arange(64).reshape(shape)
    at = numbers.transpose(0, 2, 1, 3) if order == "NHD" else numbers
    for number, part in enumerate(("k", "gate")):
        expected = {(t, c): 64 + at[t // size, number, t % size, 2 * c] for t in range(8) for c in range(2)}
        found = {(t % 8, c): byte for (t, c), byte in cells(layout, 0, f"layers.0.{part}", 1, None)}
        assert found == expected


def test_heads_without_v_have_one_field() -> None:
    layout = engine("prefill", tp=2, kind=Attention(4, 3, "bfloat16", 0), page=2, order="HND")
    assert [field.name for field in layout.fields] == ["layers.0.k"]
    assert dict(cells(layout, 1, "layers.0.k", 1, 2)) == {
        (2 + t, 2 + h, c): 24 + h * 12 + t * 6 + c * 2 for t in range(2) for h in range(2) for c in range(3)
    }


@pytest.mark.parametrize("dim_first", [True, False])
def test_a_convolution_may_be_whole_on_every_rank(dim_first: bool) -> None:
    kind = ShortConv(3, 5, "bfloat16", is_replicated=True)
    layout = engine("prefill", tp=2, kind=kind, style=Style(conv_dim_first=dim_first, speculative_tokens=1))
    for rank in range(2):
        assert dict(cells(layout, rank, "layers.0.conv.x", 0, None)) == {
            (c, tap): 2 * (c * 5 + tap if dim_first else tap * 3 + c) for c in range(3) for tap in range(4)
        }


@pytest.mark.parametrize("dim_first", [True, False])
@pytest.mark.parametrize("scratch", [0, 2])
@pytest.mark.parametrize(("tp", "groups"), [(1, 2), (2, 2), (4, 2), (2, 1)])
def test_mamba2_rows_are_x_then_b_then_c(dim_first: bool, scratch: int, tp: int, groups: int) -> None:
    kind = Mamba2(4, 3, groups, 2, 4, "bfloat16", "float32")
    layout = engine("prefill", tp=tp, kind=kind, style=Style(conv_dim_first=dim_first, speculative_tokens=scratch))
    heads, mine = 4 // tp, max(1, groups // tp)
    num_rows, columns = heads * 3 + 2 * mine * 2, 3 + scratch
    conv = np.arange(num_rows * columns) * 2
    at = conv.reshape(num_rows, columns) if dim_first else conv.reshape(columns, num_rows).T
    page = num_rows * columns * 2 + heads * 3 * 2 * 4
    for rank in range(tp):
        group0 = rank * groups // tp
        for (head, channel, tap), byte in cells(layout, rank, "layers.0.conv.x", 1, None):
            assert byte == page + at[(head - rank * heads) * 3 + channel, tap]
        for first, name in ((heads * 3, "B"), (heads * 3 + mine * 2, "C")):
            found = dict(cells(layout, rank, f"layers.0.conv.{name}", 1, None))
            assert {group for group, _, _ in found} == set(range(group0, group0 + mine))
            for (group, state, tap), byte in found.items():
                assert byte == page + at[first + (group - group0) * 2 + state, tap]
        for (head, channel, state), byte in cells(layout, rank, "layers.0.ssm", 1, None):
            assert byte == page + conv.size * 2 + (((head - rank * heads) * 3 + channel) * 2 + state) * 4


@pytest.mark.parametrize("dim_first", [True, False])
def test_mamba1_has_no_speculative_columns(dim_first: bool) -> None:
    kind = Mamba1(6, 2, 3, "bfloat16", "bfloat16")
    layout = engine("prefill", tp=2, kind=kind, style=Style(conv_dim_first=dim_first, speculative_tokens=5))
    for rank in range(2):
        for (channel, tap), byte in cells(layout, rank, "layers.0.conv.x", 0, None):
            assert byte == 2 * ((channel - 3 * rank) * 2 + tap if dim_first else tap * 3 + channel - 3 * rank)
        for (channel, state), byte in cells(layout, rank, "layers.0.ssm", 0, None):
            assert byte == 12 + 2 * ((channel - 3 * rank) * 2 + state)


@pytest.mark.parametrize("dim_first", [True, False])
def test_gated_delta_rows_are_q_then_k_then_v(dim_first: bool) -> None:
    kind = GatedDelta(2, 4, 3, 2, 4, "bfloat16", "float32")
    layout = engine("prefill", tp=2, kind=kind, style=Style(conv_dim_first=dim_first, speculative_tokens=1))
    conv = np.arange(10 * 4) * 2
    at = conv.reshape(10, 4) if dim_first else conv.reshape(4, 10).T
    for rank in range(2):
        for first, name, width, heads in ((0, "q", 3, 1), (3, "k", 3, 1), (6, "v", 2, 2)):
            for (head, channel, tap), byte in cells(layout, rank, f"layers.0.conv.{name}", 0, None):
                assert byte == at[first + (head - rank * heads) * width + channel, tap]
        for (head, value, key), byte in cells(layout, rank, "layers.0.ssm", 0, None):
            assert byte == 80 + (((head - rank * 2) * 2 + value) * 3 + key) * 4


def test_overlaid_groups_share_the_stride_of_the_largest_page() -> None:
    layers = [Layer("a", Latent(8, "bfloat16")), Layer("b", Latent(3, "bfloat16")), Layer("c", Latent(3, "bfloat16"))]
    groups = [PagedGroup("one", ("a",), 4), PagedGroup("two", ("b", "c"), 4)]
    compact = assemble("prefill", layers, groups, Grid(), order="NHD", num_pages=5)
    assert [(s.offset_bytes, s.geometry.page_stride_bytes) for s in compact.ranks[0].shards] == [
        (0, 64),
        (0, 64),
        (320, 64),
    ]
    blocks = assemble("prefill", layers, groups, Grid(), order="BLNHC", num_pages=5)
    assert [(s.offset_bytes, s.geometry.page_stride_bytes) for s in blocks.ranks[0].shards] == [
        (0, 64),
        (0, 64),
        (24, 64),
    ]
    assert {(s.page_stride_bytes, s.page_bytes) for s in blocks.ranks[0].slabs} == {(64, 64)}


def test_an_opaque_page_is_a_part_per_rank() -> None:
    layout = engine("prefill", tp=3, kind=Opaque(5, 4, "x"))
    for rank in range(3):
        assert dict(cells(layout, rank, "layers.0.page", 2, 4)) == {(2, rank, i): 10 + i for i in range(5)}


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: attention("LBNHC", 2, 2, 2, 4, "planes"), "side by side"),
        (lambda: attention("LBHNC", 2, 2, 3, 4, "slots"), "K has 2 channels and V 3"),
        (lambda: attention("LBHNC", 2, 2, 16, 8, "tiles"), "pages of 8 tokens"),
        (lambda: attention("LBHNC", 2, 2, 2, 4, "boxes"), "'boxes' is not known"),
        (lambda: attention("HBNLC", 2, 2, 2, 4, "cell"), "order 'HBNLC' is not known"),
        (lambda: attention("LHBNC", 2, 2, 2, 4, "cell", kernel_tokens=2), "kernel blocks of 2 tokens"),
        (lambda: engine("p", order="LHBNC", padded_page_bytes=1000), "padded to 1000"),
        (lambda: attention("LBHNC", 2, 2, 0, 4, "planes"), "there is no V"),
        (lambda: engine("p", kind=Attention(2, 2, "bfloat16", -1)), "-1 channels of V"),
        (lambda: engine("p", kind=Attention(0, 2, "bfloat16")), "0 KV heads"),
        (lambda: engine("p", kind=Attention(2, 2, "int3")), "dtype 'int3' is not known"),
        (lambda: engine("p", kind=Latent(2, "uint8", row_bytes=4)), "quantisation"),
        (lambda: engine("p", kind=Latent(2, "bfloat16", tokens_per_state=3)), "page of 4 tokens|3 tokens per state"),
        (lambda: engine("p", kind=Opaque(8, 16, "x")), "spans 16 tokens|pages 4"),
        (lambda: engine("p", tp=4, dcp=3), "context parallel size 3|tensor-parallel size 4"),
        (lambda: engine("p", tp=2, dcp=2, interleave=0), "interleave 0"),
        (lambda: engine("p", tp=0), "no ranks"),
        (lambda: engine("p", page=0), "page of 0 tokens"),
        (lambda: engine("p", num_pages=0), "0 pages"),
        (lambda: Mamba2(4, 1, 0, 1, 2, "bfloat16", "bfloat16"), "num_groups is 0; it must be at least 1"),
        (lambda: Ring(0, 1, "bfloat16"), "0 tokens"),
        (lambda: Ring(2, 1, "bfloat16", ()), "0 parts"),
    ],
)
def test_what_a_kind_refuses(make: Any, facts: str) -> None:
    with pytest.raises(LayoutError) as caught:
        make()
    for fact in facts.split("|"):
        assert fact in str(caught.value)
