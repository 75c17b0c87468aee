"""Is every batch read into the half whose turn it is, and is the buffer given back only when nothing is read into it?"""

from __future__ import annotations

import pytest
from tests.faulty_memory import Fault, FaultyFabric
from tests.unit.session.test_transfer import connect, make_engine, make_request, mover

from kvreshard.plan import compile_route
from kvreshard.plan.copies import CopyList
from kvreshard.plan.stage import Batch
from kvreshard.session import pull
from kvreshard.session.mover import Staging, reads_into
from kvreshard.session.pull import pull_steps
from kvreshard.session.transfer import pull as pull_all
from kvreshard.transport.base import Transfer, TransferState, TransportError

ADDRESS, HALF_BYTES = 1 << 20, 1 << 16


def test_batches_take_turns_in_both_halves() -> None:
    staging = Staging(ADDRESS, 2 * HALF_BYTES)
    assert [staging.half(number) for number in range(4)] == [ADDRESS, ADDRESS + HALF_BYTES] * 2
    assert staging.half_bytes == HALF_BYTES
    reads = CopyList.of([10, 30], [0, 4], [4, 6], src_rank=3, dst_rank=1)
    placed = reads_into(ADDRESS, Batch(reads, (), 10))
    assert (placed.src_rank, placed.dst_rank) == (3, 1)
    assert placed.dst_address.tolist() == [ADDRESS, ADDRESS + 4]
    assert (placed.src_address.tolist(), placed.length.tolist()) == ([10, 30], [4, 6])


@pytest.mark.parametrize("num_good", [0, 1, 2])
def test_a_read_that_is_refused_waits_for_those_before_it(monkeypatch: pytest.MonkeyPatch, num_good: int) -> None:
    """The buffer is given back only when nothing is read into it any more."""
    fabric = FaultyFabric()
    src = make_engine(fabric, "p", 2, "HND", 8)
    dst = make_engine(fabric, "d", 1, "NHD", 16, lambda index, transfer: Fault(delay_steps=1))
    connect(src, dst)
    reader = mover(dst, 0, src, staged=True)
    assert reader.staging is not None
    good, calls = pull.reads_into, list[Batch]()

    def reads_into(address: int, batch: Batch) -> CopyList:
        calls.append(batch)
        if len(calls) > num_good:
            raise TransportError("no list")
        return good(address, batch)

    monkeypatch.setattr(pull, "reads_into", reads_into)
    posted: list[Transfer] = []
    route = compile_route(src.layout, dst.layout, 0, way="staged")
    steps = pull_steps(reader, route, make_request(), dst.layout, note=posted.append)

    def drive() -> None:
        for waiting in steps:
            assert reader.staging is not None
            assert reader.staging.is_taken
            assert waiting in posted
            fabric.step()

    with pytest.raises(TransportError, match="no list"):
        drive()
    assert [transfer.state for transfer in posted] == [TransferState.DONE] * num_good
    assert not reader.staging.is_taken


def test_a_driver_that_gives_up_waiting_leaves_the_buffer_until_all_reads_have_settled() -> None:
    """Another load would permute into its pages what arrives late."""
    fabric = FaultyFabric()
    src = make_engine(fabric, "p", 2, "HND", 8)
    dst = make_engine(fabric, "d", 1, "NHD", 16, lambda index, transfer: Fault(delay_steps=1 + index % 2))
    connect(src, dst)
    reader = mover(dst, 0, src, staged=True, timeout_s=0.01)
    assert reader.staging is not None
    route = compile_route(src.layout, dst.layout, 0, way="staged")
    with pytest.raises(TimeoutError):
        pull_all(reader, route, make_request(), dst.layout, b"done")
    for _ in range(2):
        assert reader.staging.is_taken
        fabric.step()
    assert not reader.staging.is_taken
