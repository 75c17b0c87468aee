"""Can a well-formed layout of a stranger take our memory or time? Each is made by hand to be as bad as its bound allows.

They would take minutes or all memory without the bounds; what is tested is that they are refused, by name of the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.pairs.small import engine

from kvreshard.model import EngineLayout, LayoutError, LayoutMismatch, WireError, wire
from kvreshard.model import layout_check as checks
from kvreshard.model.address import AxisMap, Digit
from kvreshard.model.changed import replace
from kvreshard.model.field import Axis, Field
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.model.rank import Geometry, Group, Rank, Region, Shard, Slab
from kvreshard.model.wire import MAX_RANKS
from kvreshard.plan import election, pattern
from kvreshard.plan.compile import compile_route

HUGE = 1 << 60


def flat(name: str, axes: list[tuple[Axis, Ownership, tuple[Digit, ...]]], num_pages: int = 4) -> EngineLayout:
    """One rank, one field of one-byte elements, one huge page stride."""
    tokens = None
    for axis, owned, digits in axes:
        if axis.extent is None and digits[0].extent is not None:
            tokens = digits[0].extent * owned.period // owned.run
    maps = tuple(AxisMap(axis.name, owned, digits) for axis, owned, digits in axes)
    stride = 1 << 50
    return EngineLayout(
        name,
        (Field("f", tuple(axis for axis, _, _ in axes), 1, "bytes"),),
        (Group("g", "p", num_pages, tokens),),
        (
            Rank.of(
                0,
                (),
                (Region("r", 0, HUGE),),
                (Slab("p", "r", 0, stride, stride),),
                (Shard("f", "r", 0, Geometry("g", stride, maps)),),
            ),
        ),
    )


def test_pages_of_too_many_pieces_over_all_geometries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_RUNS_PER_LAYOUT", 10)
    engine("prefill", tp=1)
    with pytest.raises(LayoutError, match=r"have more than 10 separate pieces over all its kinds of shards"):
        flat("x", [(Axis("a", 16), Interval(0, 16), (Digit(16, 0, 2),))])


def test_too_many_shards_in_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_PAIR_WORK", 1000)
    with pytest.raises(LayoutError, match="too many shards lie in one another to compare them all"):
        engine("prefill", stages=(0,) * 8, tp=2, order="HND")


def planes(num_fields: int) -> EngineLayout:
    """Fields of four heads, each head's pages in a slab of its own: every page is pieces of four slabs."""
    fields = tuple(Field(f"f{number}", (Axis("a", 4),), 1, "bytes") for number in range(num_fields))
    shape = Geometry("g", num_fields, (AxisMap("a", Interval(0, 4), (Digit(4, 0, 100),)),))
    slabs = tuple(Slab("p", "r", 100 * head, num_fields, num_fields) for head in range(4))
    shards = tuple(Shard(field.name, "r", number, shape) for number, field in enumerate(fields))
    return EngineLayout(
        "x", tuple(fields), (Group("g", "p", 3, None),), (Rank.of(0, (), (Region("r", 0, 400),), slabs, shards),)
    )


def test_too_many_pieces_to_find_in_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    planes(10)
    monkeypatch.setattr(checks, "MAX_PAIR_WORK", 10 * (checks.SORT_COST + 4 * checks.PLACE_COST) - 1)
    with pytest.raises(LayoutError, match="engine 'x': too many shards lie in pieces in several slabs to find"):
        planes(10)


def test_a_page_in_one_slab_is_not_looked_at_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """16,384 shards of a million pieces each were a table of 137 GB."""
    monkeypatch.setattr(checks, "PLACE_COST", 1 << 60)
    axes = [(Axis("a", 16), Interval(0, 16), (Digit(16, 0, 2),))]
    assert flat("x", axes).ranks


def test_every_one_of_many_shards_is_looked_at() -> None:
    """The last one ends behind its slab."""
    layout = planes(5)
    rank = layout.ranks[0]
    moved = (*rank.shards[:-1], replace(rank.shards[-1], offset_bytes=5))
    with pytest.raises(LayoutError, match=r"field 'f4': bytes \[5, 306\) of page 0 .* lie outside the slabs"):
        replace(layout, ranks=(rank.with_shards(moved),))


def test_a_cyclic_page_of_any_size_is_looked_at_for_a_moment_only() -> None:
    """Its typical overlap with an ordinary page would have had a list of 2^37 cuts."""
    token, run = Axis("token", None), 1 << 30
    big = (Digit(1 << 40, 0, 1), Digit(None, 1, 0))
    halves = [flat("src", [(token, Cyclic(start, run, 2 * run), big)]) for start in (0, run)]
    src = replace(halves[0], ranks=(halves[0].ranks[0], replace(halves[1].ranks[0], rank=1)))
    dst = flat("dst", [(token, Interval(0, None), (Digit(16, 0, 1), Digit(None, 1, 0)))])
    assert compile_route(src, dst, 0).src_ranks == (0, 1)


def test_a_page_in_too_many_nests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern, "MAX_NESTS", 1)
    axes = [(Axis("a", 15), Interval(0, 15), (Digit(15, 0, 1),))]
    other = [(Axis("a", 15), Interval(0, 15), (Digit(4, 0, 1), Digit(4, 0, 5)))]
    with pytest.raises(LayoutMismatch, match=r"overlap in 2 nests of loops; more than 1 are refused"):
        compile_route(flat("src", other), flat("dst", axes), 0)


def test_a_page_in_too_many_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern, "MAX_RUNS", 10)
    axes = [(Axis("a", 16), Interval(0, 16), (Digit(16, 0, 2),))]
    with pytest.raises(LayoutMismatch, match=r"overlap in 16 runs; more than 10 are refused"):
        compile_route(flat("src", axes), flat("dst", axes), 0)


def ranks_of(name: str, axes: tuple[Axis, ...], boxes: Sequence[tuple[Ownership, ...]]) -> EngineLayout:
    """One field of one-byte elements, of which each rank holds one box, in pages of equally many tokens."""
    ranks, size, tokens = [], 1 << 40, max(owned.period for box in boxes for owned in box)
    for number, box in enumerate(boxes):
        maps, step = [], 1
        for axis, owned in zip(axes, box, strict=True):
            held = owned.stop - owned.start if isinstance(owned, Interval) and owned.stop else tokens // owned.period
            paged = (Digit(None, 1, 0),) if axis.extent is None else ()
            maps.append(AxisMap(axis.name, owned, (Digit(held, 0, step), *paged)))
            step *= held
        shard = Shard("f", "r", 0, Geometry("g", size, tuple(maps)))
        ranks.append(Rank.of(number, (), (Region("r", 0, size),), (Slab("p", "r", 0, size, size),), (shard,)))
    group = Group("g", "p", 1, tokens if None in [axis.extent for axis in axes] else None)
    return EngineLayout(name, (Field("f", axes, 1, "bytes"),), (group,), tuple(ranks))


TOKEN, HEAD = Axis("token", None), Axis("head", 1535)
CUBE = tuple(Axis(f"a{number}", 2) for number in range(16))
HALVES = [
    tuple(Interval(half, half + 1) if axis == number else Interval(0, 2) for axis in range(16))
    for number in range(16)
    for half in range(2)
]


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        # A thousand ranks in turns, and one less on the other side: a million pairs of turns.
        (
            ((TOKEN,), [(Cyclic(rank, 1, 1024),) for rank in range(1024)]),
            ((TOKEN,), [(Cyclic(rank, 1, 1023),) for rank in range(1023)]),
        ),
        # Each head is held by 512 ranks.
        (((HEAD,), [(Interval(rank, rank + 512),) for rank in range(1024)]), ((HEAD,), [(Interval(0, 1535),)] * 64)),
        # Each of sixteen axes is cut in two: 65,536 boxes with sixteen axes each.
        ((CUBE, HALVES), (CUBE, [(Interval(0, 2),) * 16])),
    ],
    ids=["turns", "replicas", "axes"],
)
def test_boxes_are_counted_before_one_is_made(
    src: tuple[Any, Any], dst: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> frozenset[int]:
        raise AssertionError("a box was looked at")

    prefill, decode = ranks_of("prefill", *src), ranks_of("decode", *dst)
    monkeypatch.setattr(election, "owners_of", never)
    with pytest.raises(
        LayoutMismatch, match=r"have too many boxes, or boxes with too many replicas, and planning them takes"
    ):
        compile_route(prefill, decode, 0)


def test_an_axis_is_not_cut_into_more_intervals_than_the_budget_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """510 ranks with turns of up to 256 coordinates, one with turns of 131,072: a table of 511 times 131,072."""

    def never(*_: object) -> frozenset[int]:
        raise AssertionError("edges were laid out")

    monkeypatch.setattr(election, "find_edges", never)
    often = [Cyclic(start, 1, 2 << bit) for bit in range(8) for start in range(2 << bit)]
    src = ranks_of("prefill", (TOKEN,), [(owned,) for owned in (*often, Cyclic(0, 1, 1 << 17))])
    with pytest.raises(LayoutMismatch, match=r"have an axis 'token' that is cut into too many intervals"):
        compile_route(src, ranks_of("decode", (TOKEN,), [(Interval(0, None),)]), 0)


@pytest.mark.parametrize(
    ("bound", "told"), [("MAX_SHARDS", r"engine 'prefill': 4 shards on 2 ranks; more than 3 are not accepted")]
)
def test_lists_of_a_message_are_bounded_together(monkeypatch: pytest.MonkeyPatch, bound: str, told: str) -> None:
    layout = engine("prefill", tp=2)
    message = wire.encode(layout)
    monkeypatch.setattr(wire, bound, 3)
    with pytest.raises(WireError, match=told):
        wire.decode(message)


def test_lists_of_a_message_are_bounded_one_by_one() -> None:
    layout = engine("prefill")
    many = tuple(replace(layout.ranks[0], rank=number) for number in range(MAX_RANKS + 1))
    with pytest.raises(WireError, match=r"length <= 1024 - at `\$\.ranks`"):
        wire.decode(wire.encode(replace(layout, ranks=many)))


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 257, "\u202e"])
def test_names_that_would_write_into_a_log_are_refused(name: str) -> None:
    with pytest.raises(WireError, match=r"at `\$\.engine`") as caught:
        wire.decode(wire.encode(replace(engine("prefill"), engine=name)))
    assert str(caught.value).isprintable()
