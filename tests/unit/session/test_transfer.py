"""Does a mover settle everything before it says anything, report to the right ranks, and refuse before it moves?"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.faulty_memory import Fault, FaultPlan, FaultyFabric, FaultyTransport, no_fault

from kvreshard.kinds import Attention, Latent
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble, relocate
from kvreshard.model import BindError, EngineLayout
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import compile_route
from kvreshard.plan.cost import Way
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.pull import STAGING_PATIENCE_S, LeaseProof, StaleLease, pull_steps
from kvreshard.session.transfer import pull, push
from kvreshard.testing.oracle import apply_request, differing_bytes, write_values
from kvreshard.transport.base import MemoryRegion, Transfer, TransferState, TransportError
from kvreshard.transport.local import HostMemory

NUM_PAGES, NUM_TOKENS = 24, 50
STAGING_BYTES = 4096


@dataclass
class Engine:
    """One engine of a test, all ranks in this process."""

    layout: EngineLayout
    memory: dict[tuple[int, str], np.ndarray]
    transports: dict[int, FaultyTransport]
    staging: dict[int, np.ndarray]


def make_engine(
    fabric: FaultyFabric, name: str, tp: int, order: str, page: int, faults: FaultPlan = no_fault
) -> Engine:
    layers = [Layer("a", Attention(4, 16, "bfloat16")), Layer("b", Attention(4, 16, "bfloat16"))]
    layers.append(Layer("c", Latent(40, "bfloat16")))
    groups = [PagedGroup("full", ("a", "b"), page), PagedGroup("latent", ("c",), page)]
    layout = assemble(name, layers, groups, Grid(tp), order=order, num_pages=NUM_PAGES, null_page=0)
    memory = {(r.rank, g.name): np.full(g.size_bytes, 9, np.uint8) for r in layout.ranks for g in r.regions}
    addresses = {r.rank: {g.name: memory[r.rank, g.name].ctypes.data for g in r.regions} for r in layout.ranks}
    staging = {r.rank: np.zeros(STAGING_BYTES, np.uint8) for r in layout.ranks}
    transports = {}
    for rank in layout.ranks:
        transport = FaultyTransport(fabric, f"{name}{rank.rank}", faults=faults)
        areas = [*(memory[rank.rank, region.name] for region in rank.regions), staging[rank.rank]]
        transport.register(MemoryRegion(area.ctypes.data, area.size) for area in areas)
        transports[rank.rank] = transport
    return Engine(relocate(layout, addresses), memory, transports, staging)


def make_request() -> Request:
    rng = np.random.default_rng(3)

    def tables(page: int) -> dict[str, PageTable]:
        free = rng.permutation(np.arange(1, NUM_PAGES))
        used = -(-NUM_TOKENS // page)
        return {
            "full": PageTable(free[:used], NUM_TOKENS),
            "latent": PageTable(free[used : 2 * used], NUM_TOKENS),
        }

    src, dst = tables(8), tables(16)
    everything = [(0, NUM_TOKENS)]
    new = {name: table.pages for name, table in dst.items()}
    return Request(src, dst, {"full": everything, "latent": everything}, new)


def connect(a: Engine, b: Engine) -> None:
    for mine, theirs in ((a, b), (b, a)):
        for transport in mine.transports.values():
            for rank, other in theirs.transports.items():
                transport.add_peer(f"{theirs.layout.engine}{rank}", other.metadata())


def mover(engine: Engine, rank: int, peer: Engine, staged: bool, timeout_s: float = 5.0) -> Mover:
    buffer = engine.staging[rank]
    return Mover(
        engine.transports[rank],
        HostMemory(),
        {r.rank: f"{peer.layout.engine}{r.rank}" for r in peer.layout.ranks},
        Staging(buffer.ctypes.data, buffer.size) if staged else None,
        timeout_s,
    )


def expected_memory(src: Engine, dst: Engine, request: Request) -> dict[tuple[int, str], np.ndarray]:
    write_values(src.layout, dst.layout, src.memory, request, 5)
    after = {place: content.copy() for place, content in dst.memory.items()}
    apply_request(src.layout, dst.layout, src.memory, after, request)
    return after


@pytest.mark.parametrize("way", ["direct", "staged", None])
@pytest.mark.parametrize(("src_tp", "dst_tp", "order"), [(1, 2, "NHD"), (4, 2, "HND"), (3, 2, "NHD")])
def test_a_pull_leaves_what_the_oracle_leaves(src_tp: int, dst_tp: int, order: str, way: Way | None) -> None:
    fabric = FaultyFabric()
    src, dst = make_engine(fabric, "p", src_tp, order, 8), make_engine(fabric, "d", dst_tp, order, 16)
    connect(src, dst)
    request = make_request()
    expected = expected_memory(src, dst, request)
    for rank in dst.layout.rank_by_number:
        route = compile_route(src.layout, dst.layout, rank, way=way)
        moved = pull(mover(dst, rank, src, staged=way is not None), route, request, dst.layout, b"done")
        assert moved.num_bytes <= moved.num_read_bytes
        assert moved.num_staged_bytes == (moved.num_bytes if way == "staged" else 0)
    assert differing_bytes(expected, dst.memory) == {}
    reporters = compile_route(src.layout, dst.layout, 0).reporters
    for rank, transport in src.transports.items():
        got = sorted(message.peer for message in transport.notifications())
        assert got == [f"d{reporter}" for reporter in reporters[rank]]


def test_a_load_reads_directly_when_another_keeps_the_staging_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its source may be stopped, and never settle."""
    monkeypatch.setattr("kvreshard.session.pull.STAGING_PATIENCE_S", 0.01)
    fabric = FaultyFabric()
    src, dst = make_engine(fabric, "p", 2, "HND", 8), make_engine(fabric, "d", 1, "NHD", 16)
    connect(src, dst)
    request = make_request()
    expected = expected_memory(src, dst, request)
    reader = mover(dst, 0, src, staged=True)
    assert reader.staging is not None
    assert reader.staging.take(reader.clock())
    moved = pull(reader, compile_route(src.layout, dst.layout, 0, way="staged"), request, dst.layout, b"done")
    assert moved.num_staged_bytes == 0
    assert moved.num_bytes > 0
    assert differing_bytes(expected, dst.memory) == {}
    assert reader.staging.is_taken  # it is still the other's
    reader.staging.give()
    moved = pull(reader, compile_route(src.layout, dst.layout, 0, way="staged"), request, dst.layout, b"done")
    assert moved.num_staged_bytes == moved.num_bytes
    assert not reader.staging.is_taken


def test_no_load_waits_for_one_that_has_had_the_staging_buffer_for_long() -> None:
    """Say its reads never settle: then it has the buffer for good."""
    fabric = FaultyFabric()
    src, dst = make_engine(fabric, "p", 2, "HND", 8), make_engine(fabric, "d", 1, "NHD", 16)
    connect(src, dst)
    request = make_request()
    expected = expected_memory(src, dst, request)
    reader = mover(dst, 0, src, staged=True)
    assert reader.staging is not None
    assert reader.staging.take(reader.clock() - STAGING_PATIENCE_S)
    steps = pull_steps(reader, compile_route(src.layout, dst.layout, 0, way="staged"), request, dst.layout)
    assert all(step is not None for step in steps)  # None: to be resumed in the next turn
    assert not any(differing_bytes(expected, dst.memory).values())


@pytest.mark.parametrize(("way", "is_taken"), [("direct", False), ("staged", False), ("staged", True)])
def test_holes_are_zeroed_while_the_first_reads_run(way: Way, is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; of a staged load while both halves are read into. Nothing begins while another load has the buffer. The bytes are those of any order."""
    fabric = FaultyFabric()
    src = make_engine(fabric, "p", 2, "HND", 8)
    dst = make_engine(fabric, "d", 1, "NHD", 16, faults=lambda index, transfer: Fault(delay_steps=1))
    connect(src, dst)
    request = make_request()
    expected = expected_memory(src, dst, request)
    reader = mover(dst, 0, src, staged=True)
    assert reader.staging is not None
    if is_taken:
        assert reader.staging.take(reader.clock())
    posted: list[Transfer] = []
    zeroed: list[tuple[int, int]] = []
    zeroing = reader.memory.zero

    def zero(start: np.ndarray, stop: np.ndarray) -> None:
        zeroed.append((len(posted), sum(one.state is TransferState.PENDING for one in posted)))
        zeroing(start, stop)

    monkeypatch.setattr(HostMemory, "zero", lambda memory, start, stop: zero(start, stop))
    route = compile_route(src.layout, dst.layout, 0, way=way)
    steps = pull_steps(reader, route, request, dst.layout, note=posted.append)
    moved = None
    while moved is None:
        try:
            if next(steps) is None:
                assert zeroed == posted == []
                reader.staging.give()
            fabric.step()
        except StopIteration as done:
            moved = done.value
    assert zeroed == [(2, 2)]
    assert len(posted) > 2 or way == "direct"
    assert moved.num_zeroed_bytes > 0
    assert differing_bytes(expected, dst.memory) == {}
    assert not reader.staging.is_taken


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 1), (2, 4), (3, 2)])
def test_a_push_leaves_what_the_oracle_leaves(src_tp: int, dst_tp: int) -> None:
    fabric = FaultyFabric()
    src, dst = make_engine(fabric, "p", src_tp, "NHD", 8), make_engine(fabric, "d", dst_tp, "HND", 16)
    connect(src, dst)
    request = make_request()
    expected = expected_memory(src, dst, request)
    routes = [compile_route(src.layout, dst.layout, rank) for rank in dst.layout.rank_by_number]
    copies = [push(mover(src, rank, dst, staged=False), routes, request, rank) for rank in src.layout.rank_by_number]
    assert sum(moved.num_bytes for moved in copies) > 0
    for route in routes:
        mover(dst, route.dst_rank, src, staged=False).fill(dst.layout, route, request)
    assert differing_bytes(expected, dst.memory) == {}


@contextlib.contextmanager
def stepping(fabric: FaultyFabric) -> Iterator[None]:
    """What was posted goes on by itself."""
    has_ended = threading.Event()

    def step() -> None:
        while not has_ended.wait(0.1):
            fabric.step()

    threading.Thread(target=step).start()
    try:
        yield
    finally:
        has_ended.set()


def test_a_push_that_cannot_post_all_waits_for_what_it_has_posted() -> None:
    """The caller takes its pages back after the error."""
    fabric = FaultyFabric()
    src = make_engine(fabric, "p", 1, "NHD", 8, faults=lambda index, transfer: Fault(delay_steps=1))
    dst = make_engine(fabric, "d", 2, "HND", 16)
    connect(src, dst)
    routes = [compile_route(src.layout, dst.layout, rank) for rank in dst.layout.rank_by_number]
    pusher = mover(src, 0, dst, staged=False)
    pusher = replace(pusher, peers={0: pusher.peers[0]})
    with stepping(fabric):
        with pytest.raises(TransportError, match="rank 1 is not among the peers"):
            push(pusher, routes, make_request(), 0)
        assert fabric.num_pending == 0


def test_a_pull_whose_memory_cannot_be_zeroed_waits_for_what_it_has_posted() -> None:
    """The caller takes its pages back after the error."""
    fabric = FaultyFabric()
    src = make_engine(fabric, "p", 2, "HND", 8)
    dst = make_engine(fabric, "d", 1, "HND", 16, faults=lambda index, transfer: Fault(delay_steps=1))
    connect(src, dst)

    class Broken(HostMemory):
        def zero(self, start: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
            raise RuntimeError("the device is gone")

    reader = replace(mover(dst, 0, src, staged=False), memory=Broken())
    with stepping(fabric):
        with pytest.raises(RuntimeError, match="the device is gone"):
            pull(reader, compile_route(src.layout, dst.layout, 0), make_request(), dst.layout, b"done")
        assert fabric.num_pending == 0


def test_a_failed_transfer_is_raised_after_its_siblings_settled() -> None:
    fabric = FaultyFabric()
    src = make_engine(fabric, "p", 2, "HND", 8)
    dst = make_engine(
        fabric, "d", 1, "HND", 16, faults=lambda index, _: Fault(fail_after_copies=0) if index == 0 else Fault()
    )
    connect(src, dst)
    route = compile_route(src.layout, dst.layout, 0, way="direct")
    with pytest.raises(TransportError):
        pull(mover(dst, 0, src, staged=False), route, make_request(), dst.layout, b"done")
    assert fabric.num_pending == 0
    assert all(not transport.notifications() for transport in src.transports.values())


@pytest.mark.parametrize("late", [0, 1])
def test_a_transfer_that_never_settles_is_a_timeout_and_no_report(late: int) -> None:
    """One of two, the first or the last."""
    fabric = FaultyFabric()
    src = make_engine(fabric, "p", 2, "HND", 8)
    dst = make_engine(fabric, "d", 1, "HND", 16, faults=lambda index, _: Fault(drop=index == late))
    connect(src, dst)
    route = compile_route(src.layout, dst.layout, 0, way="direct")
    with pytest.raises(TimeoutError, match="must not be reused"):
        pull(mover(dst, 0, src, staged=False, timeout_s=0.01), route, make_request(), dst.layout, b"done")
    assert not src.transports[0].notifications()


def test_a_refused_request_moves_nothing() -> None:
    fabric = FaultyFabric()
    src, dst = make_engine(fabric, "p", 1, "HND", 8), make_engine(fabric, "d", 1, "HND", 16)
    connect(src, dst)
    good = make_request()
    bad = Request(good.src_tables, good.dst_tables, {**good.intervals, "latent": [(0, NUM_TOKENS + 1)]}, {})
    before = {place: content.copy() for place, content in dst.memory.items()}
    for way in ("direct", "staged"):
        route = compile_route(src.layout, dst.layout, 0, way=way)
        with pytest.raises(BindError, match="tokens up to 51"):
            pull(mover(dst, 0, src, staged=True), route, bad, dst.layout, b"done")
    assert differing_bytes(before, dst.memory) == {}


def test_a_request_whose_lease_word_changed_is_not_served() -> None:
    """The word is read after the data, on every rank that is read: all right, one changed, one never set."""
    fabric = FaultyFabric()
    src, dst = make_engine(fabric, "p", 4, "NHD", 8), make_engine(fabric, "d", 2, "NHD", 16)
    words = {rank: np.array([77], dtype=np.uint64) for rank in src.transports}
    scratch = np.zeros(8 * 4, np.uint8)
    for rank, word in words.items():
        src.transports[rank].register([MemoryRegion(word.ctypes.data, 8)])
    for transport in dst.transports.values():
        transport.register([MemoryRegion(scratch.ctypes.data, scratch.size)])
    connect(src, dst)
    route = compile_route(src.layout, dst.layout, 0)
    proof = LeaseProof(77, {rank: word.ctypes.data for rank, word in words.items()}, scratch.ctypes.data)
    reader = mover(dst, 0, src, staged=False)
    assert pull(reader, route, make_request(), dst.layout, lease=proof).num_bytes > 0
    words[route.src_ranks[-1]][0] = 78
    with pytest.raises(StaleLease, match=rf"source rank {route.src_ranks[-1]} .*0x4e, expected 0x4d"):
        pull(reader, route, make_request(), dst.layout, lease=proof)
