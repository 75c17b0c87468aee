"""Do ranks in processes of their own die, hang and restart without taking the test along?"""

import importlib
import os
import signal
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvreshard.plan.copies import CopyList
from kvreshard.testing import rank_worker
from kvreshard.testing.ranks import LocalRanks, ProcessRanks, RankDiedError
from kvreshard.transport.base import Direction, TransportError
from kvreshard.transport.memory import Fabric, MemoryTransport

KIB = 1024


def one_piece(ranks: LocalRanks | ProcessRanks, rank: int, peer: int) -> CopyList:
    return CopyList.of([ranks.address(peer)], [ranks.address(rank)], KIB)


def test_ranks_in_one_process() -> None:
    fabric = Fabric()
    with LocalRanks(2, 4 * KIB, lambda rank: MemoryTransport(fabric, f"rank{rank}")) as ranks:
        ranks.connect_all()
        ranks.memory(1)[:] = 9
        report = ranks.run(0, 1, Direction.READ, one_piece(ranks, 0, 1), b"done")
        assert (report.state, report.num_bytes) == ("done", KIB)
        assert int(np.count_nonzero(ranks.memory(0))) == KIB
        ranks.reset(fill_byte=5)
        assert ranks.notifications(1, 1, timeout_s=0.0) == []
        assert (ranks.memory(0) == 5).all()


@pytest.mark.parametrize(("version", "is_left_out"), [("2.13.0+cpu", True), ("2.13.0", False), ("2.13.0+cu126", False)])
def test_a_cpu_build_of_torch_is_left_out(monkeypatch: pytest.MonkeyPatch, version: str, is_left_out: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # put back as it was afterwards
    del sys.modules["torch"]
    monkeypatch.setattr(rank_worker, "version", lambda name: {"torch": version}[name])
    rank_worker.leave_cpu_torch_out()
    assert ("torch" in sys.modules) is is_left_out
    if is_left_out:
        with pytest.raises(ImportError):
            importlib.import_module("torch")


def test_torch_that_is_there_or_not_installed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", there)
    monkeypatch.setattr(rank_worker, "version", lambda name: "2.13.0+cpu")
    rank_worker.leave_cpu_torch_out()
    assert sys.modules["torch"] is there
    del sys.modules["torch"]

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(rank_worker, "version", missing)
    rank_worker.leave_cpu_torch_out()
    assert "torch" not in sys.modules


def test_a_worker_leaves_it_out_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def called() -> None:
        raise InterruptedError

    monkeypatch.setattr(rank_worker, "leave_cpu_torch_out", called)
    with pytest.raises(InterruptedError):
        rank_worker.main(["0", "0", "0", "rank0", "cpu"])


def test_a_rank_of_a_device_keeps_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_worker, "leave_cpu_torch_out", lambda: pytest.fail("left out"))
    with pytest.raises(ValueError, match="invalid handle"):  # the next thing that it does
        rank_worker.main(["-1", "-1", "0", "rank0", "cuda:0"])


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(TransportError, match=r"cuda:7.*(torch, which cannot be imported|cannot be had)"):
        ProcessRanks(1, KIB, devices=["cuda:7"])


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessRanks]:
    with ProcessRanks(2, 64 * KIB) as ranks:
        yield ranks


@pytest.mark.nixl
class TestProcessRanks:
    """Two workers, shared by all tests."""

    @pytest.fixture
    def ranks(self, pool: ProcessRanks) -> ProcessRanks:
        """Fresh processes after a test that ended some."""
        for rank in range(2):
            try:
                pool.shut(rank)
                pool.open(rank)
            except RankDiedError:
                pool.restart(rank)
        pool.connect_all()
        pool.reset()
        return pool

    def test_the_controller_sees_the_workers_memory(self, ranks: ProcessRanks) -> None:
        ranks.memory(1)[:] = 9
        ranks.run(0, 1, Direction.READ, one_piece(ranks, 0, 1))
        assert ranks.memory(0)[:KIB].tolist() == [9] * KIB
        assert not ranks.memory(0)[KIB:].any()

    @pytest.mark.parametrize("when", ["before", "while pending"])
    def test_a_dead_worker_is_reported_and_replaced(self, ranks: ProcessRanks, when: str) -> None:
        job = 0
        if when == "while pending":
            job = ranks.post(0, 1, Direction.READ, one_piece(ranks, 0, 1))
        os.kill(ranks.process_id(1), signal.SIGKILL)
        with pytest.raises(RankDiedError, match=r"rank 1 .* exit code -9 during metadata"):
            ranks.connect(0, 1)
        if when == "before":
            job = ranks.post(0, 1, Direction.READ, one_piece(ranks, 0, 1))
            assert ranks.wait(0, job).state == "failed"
        assert ranks.wait(0, job).state != "pending"
        ranks.disconnect(0, 1)
        ranks.restart(1)
        ranks.connect_all()
        ranks.run(0, 1, Direction.READ, one_piece(ranks, 0, 1))

    def test_a_worker_that_does_not_answer_is_ended(self, ranks: ProcessRanks) -> None:
        os.kill(ranks.process_id(1), signal.SIGSTOP)
        with pytest.raises(RankDiedError, match=r"did not answer within 0\.2 s"):
            ranks.call(1, "metadata", timeout_s=0.2)
        assert not Path(f"/proc/{ranks.process_id(1)}").exists()


def shared_files() -> set[str]:
    """Files of ours or UCX's; other programs on this machine have theirs."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("ucx_", "kvreshard"))}


@pytest.mark.nixl
def test_nothing_is_left_behind() -> None:
    shared_before, open_before = shared_files(), len(os.listdir("/proc/self/fd"))
    with ProcessRanks(2, KIB) as ranks:
        ranks.connect_all()
        pids = [ranks.process_id(rank) for rank in range(2)]
        os.kill(pids[0], signal.SIGKILL)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert shared_files() <= shared_before
    assert len(os.listdir("/proc/self/fd")) == open_before
