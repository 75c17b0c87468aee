"""Is every batch read into the half whose turn it is, as a part of a list that is checked once?"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tests.unit.session.test_transfer import connect, make_engine, make_request, mover

from kvreshard.plan import compile_route
from kvreshard.plan.copies import CopyList
from kvreshard.plan.stage import Batch
from kvreshard.session import staging
from kvreshard.session.pull import pull_steps
from kvreshard.session.staging import PlacedBatch, Staging
from kvreshard.transport.base import Copies, Transfer, TransferState, TransportError
from kvreshard.transport.memory import Fabric, Fault

ADDRESS, HALF_BYTES = 1 << 20, 1 << 16


def batch(src_rank: int, *reads: tuple[int, int, int]) -> Batch:
    src, dst, length = (np.array(column, dtype=np.int64) for column in zip(*reads, strict=True))
    return Batch(CopyList(src_rank, 0, src, dst, length), 0, len(length), (), 0, 0)


BATCHES = (
    batch(0, (10, 0, 4), (30, 4, 6)),
    batch(1, (1000, 0, 8)),
    batch(1, (2000, 0, 1), (2010, 1, 2), (2020, 3, 3)),
    batch(0, (50, 0, 5)),
)


@pytest.mark.parametrize("max_reads", [1, 3, 1000])
def test_batches_take_turns_in_both_halves(monkeypatch: pytest.MonkeyPatch, max_reads: int) -> None:
    monkeypatch.setattr(staging, "MAX_READS", max_reads)
    placed = list(Staging(ADDRESS, 2 * HALF_BYTES).place(BATCHES))
    assert [one.batch for one in placed] == list(BATCHES)
    assert [one.address for one in placed] == [ADDRESS, ADDRESS + HALF_BYTES] * 2
    for one in placed:
        reads, placed_reads = one.batch.reads, one.reads.flat()
        assert placed_reads.local_address.tolist() == (reads.dst_address + one.address).tolist()
        assert placed_reads.remote_address.tolist() == reads.src_address.tolist()
        assert placed_reads.length_bytes.tolist() == reads.length.tolist()


def whole_of(one: PlacedBatch) -> Copies:
    return one.reads.whole


def test_batches_share_the_lists_they_are_parts_of() -> None:
    """In and out of order, with gaps, and beside a list of another."""
    rows = np.arange(1, 11, dtype=np.int64)
    shared = CopyList(0, 0, rows * 100, rows * 1000, rows)
    cuts = ((0, 2), (2, 3), (3, 3), (5, 9), (3, 5), (9, 10))
    parts = [Batch(shared, first, stop, (), 0, 0) for first, stop in cuts]
    batches = [*parts[:4], batch(0, (7, 8, 9)), *parts[4:]]
    placed = list(Staging(ADDRESS, 2 * HALF_BYTES).place(batches))
    assert len({id(whole_of(one)) for one in placed}) == 1
    for one in placed:
        reads, flat = one.batch.reads, one.reads.flat()
        assert flat.local_address.tolist() == (reads.dst_address + one.address).tolist()
        assert flat.remote_address.tolist() == reads.src_address.tolist()
        assert flat.length_bytes.tolist() == reads.length.tolist()
    assert len(whole_of(placed[0])) == len(shared.length) + 1


def test_batches_of_one_source_rank_are_parts_of_one_list() -> None:
    first, second, third, fourth = Staging(ADDRESS, 2 * HALF_BYTES).place(BATCHES)
    assert whole_of(first) is whole_of(fourth)
    assert whole_of(second) is whole_of(third)
    assert whole_of(first) is not whole_of(second)
    assert [one.reads.first for one in (first, second, third, fourth)] == [0, 0, 1, 2]


def test_a_list_has_no_more_reads_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless one batch alone has more."""
    monkeypatch.setattr(staging, "MAX_READS", 2)
    placed = list(Staging(ADDRESS, 2 * HALF_BYTES).place(BATCHES))
    assert [len(whole_of(one)) for one in placed] == [2, 1, 3, 1]
    assert all(whole_of(one) is not whole_of(other) for one, other in pairwise(placed))


def test_nothing_to_place() -> None:
    assert list(Staging(ADDRESS, 2 * HALF_BYTES).place(())) == []


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_list_that_is_none_waits_for_the_reads_before_it(monkeypatch: pytest.MonkeyPatch, num_good: int) -> None:
    """The buffer is given back only when nothing is read into it any more."""
    fabric = Fabric()
    src = make_engine(fabric, "p", 2, "HND", 8)
    dst = make_engine(fabric, "d", 1, "NHD", 16, lambda index, transfer: Fault(delay_steps=1))
    connect(src, dst)
    reader = mover(dst, 0, src, staged=True)
    assert reader.staging is not None
    good, calls = staging._place, []

    def place(batches: list[tuple[int, Batch]]) -> list[PlacedBatch]:
        calls.append(batches)
        if len(calls) > num_good:
            raise TransportError("no list")
        return good(batches)

    monkeypatch.setattr(staging, "MAX_READS", 1)
    monkeypatch.setattr(staging, "_place", place)
    posted: list[Transfer] = []
    route = compile_route(src.layout, dst.layout, 0, way="staged")
    steps = pull_steps(reader, route, make_request(), dst.layout, note=posted.append)

    def drive() -> None:
        for waiting in steps:
            assert reader.staging is not None
            assert reader.staging.taken.locked()
            assert waiting in posted
            fabric.step()

    with pytest.raises(TransportError, match="no list"):
        drive()
    assert [transfer.state for transfer in posted] == [TransferState.DONE] * num_good
    assert not reader.staging.taken.locked()
