"""Who gives what to whom: atoms, boxes, and an election that every rank decides alike."""

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
from kvreshard.plan.cells import CutAxis, looked_up, swept
from kvreshard.plan.cover import atoms, common_period, count_common, edges_of, join, meets


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
def test_atoms_cut_at_every_edge(extent: int | None, owners: list[Ownership], expected: list[Ownership]) -> None:
    assert atoms(extent, owners) == expected


def test_atoms_are_held_whole_or_not_at_all() -> None:
    owners = [Cyclic(0, 3, 8), Cyclic(2, 4, 6), Interval(0, None)]
    period = common_period(None, owners)
    assert period == 24
    found = atoms(None, owners)
    assert sum(count_common(None, atom) for atom in found) == period
    for atom in found:
        for owned in owners:
            assert count_common(None, atom, owned) * 24 // common_period(None, [atom, owned]) in (
                0,
                count_common(None, atom),
            )


def test_intervals_are_swept_as_any_ownerships_are_looked_up(run_seed: int) -> None:
    """Who holds an atom, and which atoms an ownership meets: coordinate by coordinate, with gaps and replicas."""
    rng = np.random.default_rng(run_seed)
    for _ in range(300):
        extent = int(rng.integers(1, 12))
        ends = np.sort(rng.integers(0, extent + 1, size=(int(rng.integers(1, 6)), 2)), axis=1).tolist()
        held: dict[Ownership, list[int]] = {}
        for rank, (start, stop) in enumerate(ends):
            if start < stop:
                held.setdefault(Interval(start, stop), []).append(rank)
        edges = edges_of(extent, tuple(held))
        owners = list(swept(held, edges))
        assert owners == list(looked_up(held, edges))
        axis = CutAxis(edges.tolist(), tuple(owners))
        for atom, (low, high) in enumerate(pairwise(axis.edges)):
            for coordinate in range(low, high):
                having = {rank for rank, (start, stop) in enumerate(ends) if start <= coordinate < stop}
                assert having == owners[atom]
        start, stop = sorted(rng.choice(extent + 1, size=2, replace=False).tolist())
        mine = Interval(start, stop)
        wanted = [atom for atom, (low, high) in enumerate(pairwise(axis.edges)) if low < stop and high > start]
        assert list(axis.met_by(extent, mine)) == wanted
        assert np.flatnonzero(meets(extent, *axis.turns, extent, mine)).tolist() == wanted


def test_join_takes_neighbours_only() -> None:
    assert join(8, Interval(0, 3), Interval(3, 5)) == Interval(0, 5)
    assert join(8, Interval(0, 3), Interval(4, 5)) is None
    assert join(None, Cyclic(0, 2, 6), Cyclic(2, 1, 6)) == Cyclic(0, 3, 6)
    assert join(None, Cyclic(0, 2, 6), Cyclic(2, 4, 6)) == Interval(0, None)
    assert join(None, Cyclic(0, 2, 6), Cyclic(3, 1, 6)) is None
    assert join(None, Cyclic(0, 1, 2), Cyclic(1, 1, 3)) is None


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
    """4 heads on one destination rank from 2 source ranks of 2 heads: two lanes, not four."""
    kind = Attention(4, 2, "bfloat16")
    src, dst = engine("prefill", tp=2, kind=kind), engine("decode", tp=1, kind=kind)
    route = compile_route(src, dst, 0)
    heads = [(lane.src_rank, lane.axes[1].chosen) for lane in route.lanes]
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
