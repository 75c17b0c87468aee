"""Who gives what to whom: intervals, boxes, and an election that every rank decides alike."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from tests.pairs.apply import check_transfer, compile_all
from tests.pairs.small import engine, request

from kvreshard.kinds import Attention, Latent
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import Cyclic, EngineLayout, Interval, LayoutMismatch, Ownership
from kvreshard.model.changed import replace
from kvreshard.plan import Election, compile_route, elect, match_fields
from kvreshard.plan.cover import count_common
from kvreshard.plan.election import CutAxis, common_period, join_boxes


def cut(extent: int | None, owners: Sequence[Ownership]) -> list[Ownership]:
    """The intervals of an axis that source ranks hold so."""
    axis = CutAxis(extent, {owned: [0] for owned in owners})
    return [axis.ownership(number, number + 1) for number in range(len(axis.owners))]


def election(src: EngineLayout, dst: EngineLayout) -> Election:
    return elect(src, dst, match_fields(src, dst).names)


@pytest.mark.parametrize(
    ("extent", "owners", "expected"),
    [
        (8, [Interval(0, 8)], [Interval(0, 8)]),
        (8, [Interval(0, 4), Interval(4, 8)], [Interval(0, 4), Interval(4, 8)]),
        (8, [Interval(0, 5), Interval(3, 8)], [Interval(0, 3), Interval(3, 5), Interval(5, 8)]),
        (None, [Interval(0, None)], [Interval(0, None)]),
        (None, [Cyclic(0, 2, 4), Cyclic(2, 2, 4)], [Cyclic(0, 2, 4), Cyclic(2, 2, 4)]),
        (None, [Cyclic(0, 1, 2), Cyclic(1, 2, 3)], [Cyclic(i, 1, 6) for i in range(6)]),
        (None, [Cyclic(0, 4, 4)], [Interval(0, None)]),
    ],
)
def test_an_axis_is_cut_at_every_edge(extent: int | None, owners: list[Ownership], expected: list[Ownership]) -> None:
    assert cut(extent, owners) == expected


def test_intervals_are_held_whole_or_not_at_all() -> None:
    owners = [Cyclic(0, 3, 8), Cyclic(2, 4, 6), Interval(0, None)]
    period = common_period(None, owners)
    assert period == 24
    found = cut(None, owners)
    assert sum(count_common(None, one, one) for one in found) == period
    for one in found:
        for owned in owners:
            assert count_common(None, one, owned) * 24 // common_period(None, [one, owned]) in (
                0,
                count_common(None, one, one),
            )


def test_who_holds_an_interval_and_who_meets_it_coordinate_by_coordinate(run_seed: int) -> None:
    """With gaps and replicas; axes with an end, and turns of a sequence."""
    rng = np.random.default_rng(run_seed)
    for _ in range(300):
        extent = int(rng.integers(1, 12)) if rng.integers(2) else None

        def draw(extent: int | None = extent) -> Ownership:
            if extent is None:
                step = int(rng.choice([1, 2, 3, 4, 6]))
                start = int(rng.integers(0, step))
                return Cyclic(start, int(rng.integers(1, step - start + 1)), step) if step > 1 else Interval(0, None)
            start, stop = sorted(rng.choice(extent + 1, size=2, replace=False).tolist())
            return Interval(start, stop)

        ranks = [draw() for _ in range(int(rng.integers(0, 6)))]
        held: dict[Ownership, list[int]] = {}
        for rank, owned in enumerate(ranks):
            held.setdefault(owned, []).append(rank)
        axis, mine = CutAxis(extent, held), draw()
        coordinates = np.arange(12 if extent is None else extent)
        period, met = axis.edges[-1], axis.met_by(mine)
        for number, (low, high) in enumerate(pairwise(axis.edges)):
            inside = coordinates[(coordinates % period >= low) & (coordinates % period < high)]
            assert (number in met) == bool(mine.contains(inside).any())
            for rank, owned in enumerate(ranks):
                assert set(owned.contains(inside).tolist()) == {rank in axis.owners[number]}


def test_neighbouring_boxes_are_joined_axis_by_axis() -> None:
    assert join_boxes([(3,)]) == [((3, 4),)]
    assert join_boxes([(3,), (1,), (0,)]) == [((0, 2),), ((3, 4),)]
    assert join_boxes([(a, b) for a in range(3) for b in range(1, 5)]) == [((0, 3), (1, 5))]
    # Boxes that touch in a corner only, and such as have one coordinate each along the other axis.
    assert join_boxes([(0, 0), (1, 1)]) == [((0, 1), (0, 1)), ((1, 2), (1, 2))]
    assert join_boxes([(0, 0), (0, 1), (1, 1)]) == [((0, 1), (0, 1)), ((0, 2), (1, 2))]


def test_neighbouring_turns_are_one_ownership() -> None:
    axis = CutAxis(None, {Cyclic(0, 2, 6): [0], Cyclic(2, 1, 6): [1], Cyclic(3, 3, 6): [2]})
    assert axis.ownership(0, 2) == Cyclic(0, 3, 6)
    assert axis.ownership(0, 3) == Interval(0, None)
    assert CutAxis(8, {Interval(2, 8): [0]}).ownership(0, 2) == Interval(0, 8)


def test_periods_that_share_nothing_are_refused() -> None:
    steps = (101, 103, 107, 109)
    with pytest.raises(LayoutMismatch, match=r"101, 103, 107, 109 .* only every 121330189"):
        common_period(None, [Cyclic(0, 1, step) for step in steps])


def test_replicas_are_spread_over_destination_ranks() -> None:
    """8 ranks hold the same latent; 4 destination ranks read from 4 different ones, whole."""
    table = election(
        engine("prefill", tp=8, kind=Latent(8, "bfloat16")), engine("decode", tp=4, kind=Latent(8, "bfloat16"))
    )
    assert {rank: readers for rank, readers in table.readers.items() if readers} == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    assert table.reporters == {0: (0,), 1: (1,), 2: (2,), 3: (3,), 4: (0,), 5: (1,), 6: (2,), 7: (3,)}


def test_a_destination_stays_with_a_source_that_it_reads_anyway() -> None:
    """With GQA 2 heads on 4 ranks, heads 0 and 1 twice: each destination rank reads one source rank for all layers."""
    kind = Attention(2, 4, "bfloat16")
    src, dst = engine("prefill", tp=4, kind=kind, stages=(0, 0, 0)), engine("decode", tp=2, kind=kind, stages=(0, 0, 0))
    table = election(src, dst)
    assert [compile_route(src, dst, rank, election=table).src_ranks for rank in (0, 1)] == [(0,), (2,)]


def test_a_destination_stays_with_it_for_families_of_another_shape_too() -> None:
    """Whole latents and halved heads: the rank that alone has the head gives the latent as well."""
    layers = [Layer("layers.0", Attention(4, 2, "bfloat16")), Layer("layers.1", Latent(8, "bfloat16"))]
    groups = [PagedGroup("a", ("layers.0",), 4), PagedGroup("b", ("layers.1",), 4)]
    src, dst = [
        assemble(name, layers, groups, Grid(4), order="BLNHC", num_pages=4, first_address=address)
        for name, address in (("prefill", 1_000_000), ("decode", 2_000_000))
    ]
    assert election(src, dst).readers == {0: (0,), 1: (1,), 2: (2,), 3: (3,)}
    narrow = replace(dst, ranks=dst.ranks[2:])
    assert election(src, narrow).readers == {0: (), 1: (), 2: (2,), 3: (3,)}


def test_a_rank_with_the_whole_sequence_gives_only_the_turns_that_are_asked_of_it() -> None:
    """Rank 0 has all tokens in pages of 6, rank 1 two of every four: turns that do not end where pages do."""
    kind = Latent(2, "bfloat16")
    whole = engine("prefill", kind=kind, page=6, num_pages=20)
    turns = engine("prefill", tp=2, dcp=2, interleave=2, kind=kind, page=3, num_pages=20)
    src = replace(turns, ranks=(whole.ranks[0], replace(turns.ranks[0], rank=1)))
    dst = engine("decode", tp=2, dcp=2, interleave=2, kind=kind, page=4, num_pages=20)
    wanted = request(src, dst, 41)
    assert check_transfer(src, dst, compile_all(src, dst), wanted, np.random.default_rng(2)) > 0


def test_the_less_loaded_replica_gives() -> None:
    """Rank 1 reads first from rank 0 or 1, rank 2 then from the other."""
    kind = Latent(8, "bfloat16")
    table = election(engine("prefill", tp=2, kind=kind), engine("decode", tp=4, kind=kind))
    assert table.readers == {0: (0, 2), 1: (1, 3)}


def test_every_rank_computes_the_same_table() -> None:
    src, dst = engine("prefill", tp=6, dcp=2), engine("decode", tp=4, dcp=2, interleave=3)
    first, second = election(src, dst), election(src, dst)
    assert (first.boxes, first.reporters) == (second.boxes, second.reporters)
    for rank in dst.ranks:
        assert compile_route(src, dst, rank.rank).reporters == first.reporters


def test_unread_ranks_get_one_reporter_and_read_ranks_their_readers() -> None:
    src, dst = engine("prefill", tp=4, kind=Attention(1, 4, "bfloat16")), engine("decode", tp=2)
    dst = engine("decode", tp=1, kind=Attention(1, 4, "bfloat16"))
    table = election(src, dst)
    assert table.readers == {0: (0,), 1: (), 2: (), 3: ()}
    assert table.reporters == {0: (0,), 1: (0,), 2: (0,), 3: (0,)}


def test_boxes_of_one_source_are_joined() -> None:
    """4 heads on one destination rank from 2 source ranks of 2 heads: two transfers, not four."""
    kind = Attention(4, 2, "bfloat16")
    src, dst = engine("prefill", tp=2, kind=kind), engine("decode", tp=1, kind=kind)
    route = compile_route(src, dst, 0)
    heads = [(transfer.src_rank, transfer.axes[1].chosen) for transfer in route.transfers]
    assert sorted(set(heads), key=str) == [(0, Interval(0, 2)), (1, Interval(2, 4))]


def test_a_hole_in_the_source_names_field_axis_and_both_sides() -> None:
    src, dst = engine("prefill", tp=2), engine("decode", tp=1)
    with pytest.raises(LayoutMismatch) as caught:
        compile_route(replace(src, ranks=src.ranks[:1]), dst, 0)
    for fact in (
        "'layers.0.k'",
        "'head'",
        "rank 0 of engine 'decode'",
        "[0, 2)",
        "[1, 2)",
        "'prefill'",
        "[0, 1)",
        "sizes",
    ):
        assert fact in str(caught.value)


def test_a_rank_that_does_not_exist_is_named() -> None:
    with pytest.raises(LayoutMismatch, match=r"engine 'decode' has no rank 7; its ranks are \[0\]"):
        compile_route(engine("prefill"), engine("decode"), 7)
