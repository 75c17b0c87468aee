"""Engines that share the sequence in turns whose sizes have no common divisor: counted by their remainders, never laid out.

What is counted is held against sets of coordinates, what is moved against the oracle, and what it takes against a number of
edges or steps, since a test of seconds says what machine it ran on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.pairs.apply import check_transfer, compile_all
from tests.pairs.small import GROUP, engine, request

from kvreshard.kinds import Attention, Latent
from kvreshard.model import Cyclic, EngineLayout, Interval, LayoutMismatch, Ownership
from kvreshard.model.changed import replace
from kvreshard.model.ownership import MAX_SIZE
from kvreshard.plan import budget, compile_route, elect, election, match_fields, plan_reads, transfer
from kvreshard.plan.check import overlap_table
from kvreshard.plan.cover import count_common, count_in_windows, exact_period
from kvreshard.plan.election import CutAxis, count_edges, find_edges
from kvreshard.plan.pattern import Pattern, build_pattern

LATENT = Latent(2, "bfloat16")
STEPS = (1, 2, 3, 4, 5, 6, 7, 9, 10, 12)


@st.composite
def turns(draw: st.DrawFn) -> Ownership:
    step = draw(st.sampled_from(STEPS))
    start = draw(st.integers(0, step - 1))
    return Cyclic(start, draw(st.integers(1, step - start)), step) if step > 1 else Interval(0, None)


@st.composite
def intervals(draw: st.DrawFn, extent: int) -> Ownership:
    start = draw(st.integers(0, extent - 1))
    return Interval(start, draw(st.integers(start + 1, extent)))


owners_of_an_axis = st.one_of(
    st.tuples(st.none(), st.lists(turns(), min_size=1, max_size=4)),
    st.integers(1, 12).flatmap(lambda e: st.tuples(st.just(e), st.lists(intervals(e), min_size=1, max_size=4))),
)


def held(owned: Ownership, low: int, high: int) -> set[int]:
    coordinates = np.arange(low, high)
    return set(coordinates[owned.contains(coordinates)].tolist())


@given(owners_of_an_axis)
def test_what_is_counted_is_what_sets_of_coordinates_have(drawn: tuple[int | None, list[Ownership]]) -> None:
    extent, owners = drawn
    for pair in product(owners, repeat=2):
        period = exact_period(extent, pair)
        assert count_common(extent, *pair) == len(set.intersection(*(held(owned, 0, period) for owned in pair)))
    assert len(find_edges(extent, owners)) <= count_edges(extent, owners)


@given(owners_of_an_axis)
def test_who_meets_whom(drawn: tuple[int | None, list[Ownership]]) -> None:
    extent, owners = drawn
    period = exact_period(extent, owners)
    sets = [held(owned, 0, period) for owned in owners]
    assert overlap_table(extent, owners).tolist() == [[bool(one & other) for other in sets] for one in sets]
    # Cut by all but the last: that one may repeat after any number of laps more.
    axis = CutAxis(extent, {owned: [0] for owned in owners[:-1] or owners})
    cut = [axis.ownership(number, number + 1) for number in range(len(axis.owners))]
    assert axis.met_by(owners[-1]) == [number for number, one in enumerate(cut) if held(one, 0, period) & sets[-1]]


@given(turns(), turns(), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 90)), min_size=1, max_size=5))
def test_what_windows_have_in_common(first: Ownership, second: Ownership, windows: list[tuple[int, int]]) -> None:
    low, size = (np.array(column) for column in zip(*windows, strict=True))
    wanted = [len(held(first, at, at + length) & held(second, at, at + length)) for at, length in windows]
    assert count_in_windows(first, second, low, low + size).tolist() == wanted


def test_turns_whose_common_period_is_beyond_any_number_are_counted() -> None:
    first, second = Cyclic(3, 4099, 4099 * 256), Cyclic(5, 4093, 4093 * 251)
    assert math.gcd(first.step, second.step) == 1
    assert count_common(None, first, second) == 4099 * 4093


PAIRS = [(2, 3), (3, 2), (4, 3), (8, 6), (7, 5), (12, 8), (1, 5), (6, 1)]


@pytest.mark.parametrize(("src_ranks", "dst_ranks"), PAIRS)
@pytest.mark.parametrize(
    ("src_turn", "dst_turn", "src_page", "dst_page"),
    [(1, 1, 4, 4), (3, 5, 4, 6), (4, 1, 4, 3), (16, 5, 8, 5), (64, 3, 2, 7)],
)
def test_odd_pairs_move_what_the_oracle_moves(
    src_ranks: int, dst_ranks: int, src_turn: int, dst_turn: int, src_page: int, dst_page: int
) -> None:
    rng = np.random.default_rng([src_ranks, dst_ranks, src_turn, dst_turn])
    src = engine("prefill", tp=src_ranks, dcp=src_ranks, interleave=src_turn, page=src_page, kind=LATENT, num_pages=300)
    dst = engine("decode", tp=dst_ranks, dcp=dst_ranks, interleave=dst_turn, page=dst_page, kind=LATENT, num_pages=300)
    num_tokens = int(rng.integers(100, 230))
    start, middle = sorted(rng.integers(0, num_tokens // 2, 2).tolist())
    wanted = request(
        src,
        dst,
        num_tokens,
        [(start, middle + 1), (num_tokens // 2 + 3, num_tokens)],
        src_pages=rng.permutation(290)[:260].tolist(),
        dst_pages=rng.permutation(290)[:260].tolist(),
    )
    assert check_transfer(src, dst, compile_all(src, dst), wanted, rng) > 0


def odd(name: str, ranks: int, turn: int, **more: Any) -> EngineLayout:
    return engine(name, tp=ranks, dcp=ranks, interleave=turn, page=16, num_pages=9000, kind=LATENT, **more)


@pytest.mark.parametrize(("src_turn", "dst_turn"), [(1, 1), (61, 67), (4099, 4093)])
def test_large_odd_pairs_are_planned_without_laying_turns_out(
    src_turn: int, dst_turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 -> 61 ranks: 3,904 pairs of turns, whose periods of 262,336 and 249,673 meet again after 65 billion tokens."""
    laid_out: list[int] = []

    def counted(extent: int | None, owners: Mapping[Ownership, object]) -> np.ndarray:
        edges = find_edges(extent, owners)
        laid_out.append(len(edges))
        return edges

    monkeypatch.setattr(election, "find_edges", counted)
    src, dst = odd("prefill", 64, src_turn), odd("decode", 61, dst_turn)
    route = compile_route(src, dst, 60)
    assert route.src_ranks == tuple(range(64))
    assert sum(laid_out) <= 4 * (64 + 61) * 2
    wanted = request(src, dst, 30_000, src_pages=range(1, 9000), dst_pages=range(1, 9000))
    plan = plan_reads(route, wanted)
    assert sum(copies.num_bytes for copies in plan.direct) == 4 * len(
        held(Cyclic(60 * dst_turn, dst_turn, 61 * dst_turn), 0, 30_000)
    )


def test_no_pattern_is_made_of_pages_that_have_nothing_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 ranks that hold a token of every 32, read by 31: a page meets a page in 62 ways, of which a transfer has a few."""
    made: list[Pattern] = []

    def make(*columns: Any) -> Pattern:
        made.append(build_pattern(*columns))
        return made[-1]

    monkeypatch.setattr(transfer, "build_pattern", make)
    src, dst = odd("prefill", 32, 1), odd("decode", 31, 1)
    route = compile_route(src, dst, 0)
    plan_reads(route, request(src, dst, 16 * 31 * 32))
    assert all(len(pattern.lengths) for pattern in made)
    assert len(made) <= 32 * 20


WORK = (
    "an axis 'token' that is cut into too many intervals",
    "an axis 'channel' that is cut into too many intervals",
    "too many boxes, or boxes with too many replicas",
    "too many boxes that one rank reads",
    "pages of too many turns",
    "pages that cut one another into too many intervals",
    "pages that overlap in too many runs",
)


def test_every_kind_of_work_is_refused_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Election and route each begin with all steps; one step too few for a kind of work is refused by its name."""
    src, dst = odd("prefill", 7, 1), odd("decode", 5, 1)
    names = match_fields(src, dst).names
    spent: list[tuple[str, int]] = []
    monkeypatch.setattr(budget.Budget, "spend", lambda _, field, steps, why: spent.append((why, steps)))
    table = elect(src, dst, names)
    of_election = len(spent)
    compile_route(src, dst, 0, election=table)
    monkeypatch.undo()
    refused = []
    for is_election, steps in ((True, spent[:of_election]), (False, spent[of_election:])):
        for number, (why, _) in enumerate(steps):
            if why in refused:
                continue
            refused.append(why)
            few = sum(step for _, step in steps[: number + 1]) - 1
            monkeypatch.setattr(budget, "MAX_STEPS", few)
            told = rf"field 'layers.0.latent': engines 'prefill' \(7 ranks\) and 'decode' \(5 ranks\) have {why}.* more than {few} steps; use"
            with pytest.raises(LayoutMismatch, match=told):
                _ = elect(src, dst, names) if is_election else compile_route(src, dst, 0, election=table)
            monkeypatch.undo()
    assert refused == list(WORK)


def test_many_replicas_cost_work(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Attention(1, 2, "bfloat16")
    monkeypatch.setattr(election, "OWNER_STEPS", 1 << 40)
    with pytest.raises(
        LayoutMismatch,
        match=r"\(4 ranks\) and 'decode' \(1 ranks\) have too many boxes, or boxes with too many replicas",
    ):
        compile_route(engine("prefill", tp=4, kind=kind), engine("decode", kind=kind), 0)


@pytest.mark.parametrize("ranks", [(16, 12), (7, 5), (64, 63), (256, 251)])
def test_engines_that_exist_take_a_part_of_the_budget(ranks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_STEPS", budget.MAX_STEPS // 4)
    src, dst = odd("prefill", ranks[0], 1), odd("decode", ranks[1], 1)
    table = elect(src, dst, match_fields(src, dst).names)
    assert compile_route(src, dst, 0, election=table).src_ranks == tuple(range(0, ranks[0], math.gcd(*ranks)))


def test_a_span_beyond_any_sequence_is_refused() -> None:
    """Turns of 2^40 - 1 tokens in pages of 16 are whole together after 2^45, which is still a number of tokens; of 2^45 - 1 not."""
    dst = odd("decode", 1, 1)
    route = compile_route(odd("prefill", 2, (1 << 40) - 1), dst, 0)
    assert route.transfers[0].src_span.indices == 32 * ((1 << 40) - 1) < MAX_SIZE
    with pytest.raises(
        LayoutMismatch, match=r"axis 'token', engine 'prefill': .* whole together only every .* interleave that divides"
    ):
        compile_route(odd("prefill", 2, (1 << 45) - 1), dst, 0)


def test_a_field_that_no_source_rank_holds_has_no_source() -> None:
    src, dst = odd("prefill", 2, 1), odd("decode", 3, 1)
    empty = replace(src, ranks=tuple(rank.with_shards(()) for rank in src.ranks))
    with pytest.raises(
        LayoutMismatch, match=r"field 'layers.0.latent', axis 'token': rank 0 of engine 'decode' holds .* has no source"
    ):
        compile_route(empty, dst, 0)


def test_ranks_of_one_engine_that_never_meet_are_refused_with_their_field() -> None:
    src, dst = odd("prefill", 2, 1), odd("decode", 1, 1)
    other = odd("prefill", 2, (1 << 20) - 1)
    mixed = replace(src, ranks=(src.ranks[0], other.ranks[1]), groups=src.groups)
    assert GROUP in {group.name for group in mixed.groups}
    with pytest.raises(
        LayoutMismatch, match=r"field 'layers.0.latent', axis 'token', engine 'prefill': context parallelism repeats"
    ):
        compile_route(mixed, dst, 0)
