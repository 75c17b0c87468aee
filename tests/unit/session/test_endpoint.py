"""Does an endpoint load, report, renew and free as it should, with peers that are slow, wrong, stopped or gone?

Two engines of several ranks in one process: memory transports, a clock that the test turns, no threads of the endpoint's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvreshard.kinds import Attention
from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout, LayoutMismatch
from kvreshard.model.tables import Request
from kvreshard.plan import compile_route
from kvreshard.session.card import EngineCard, RankCard, make_card
from kvreshard.session.endpoint import Endpoint
from kvreshard.session.handshake import Address, HandshakeError
from kvreshard.session.lease import FREE, LeaseTable
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.orders import (
    Cancel,
    EndpointOptions,
    Failure,
    Grant,
    Load,
    Offer,
    Release,
    RemoteEngine,
    RemoteLease,
    Revoke,
    Unwatch,
    Watch,
)
from kvreshard.session.peers import Peer, Peers, Self
from kvreshard.testing.oracle import apply_request, differing_bytes, write_values
from kvreshard.testing.small import engine, request
from kvreshard.transport.base import MemoryRegion, Transfer
from kvreshard.transport.local import HostMemory
from kvreshard.transport.memory import Fabric, Fault, MemoryTransport

WORD, SLOT = 0xABC, 5
KIND = Attention(2, 8, "bfloat16")
OPTIONS = EndpointOptions(load_timeout_s=100.0, settle_timeout_s=10.0, heartbeat_s=5.0, retry_s=5.0)


class Clock:
    """Turned by hand."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Side:
    """One engine: its layout at real addresses, its memory, and an endpoint per rank."""

    layout: EngineLayout
    memory: dict[tuple[int, str], np.ndarray]
    tables: dict[int, LeaseTable]
    transports: dict[int, MemoryTransport]
    endpoints: dict[int, Endpoint]
    staging: list[np.ndarray] = field(default_factory=list)

    def card(self) -> EngineCard:
        ranks = [
            RankCard(rank, self.transports[rank].metadata(), self.tables[rank].region.address, len(self.tables[rank]))
            for rank in self.transports
        ]
        return make_card(self.layout, "life", {}, ranks)

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            for endpoint in self.endpoints.values():
                endpoint.turn()


@dataclass
class World:
    """A source, a destination, the network and the clock between them."""

    clock: Clock
    fabric: Fabric
    src: Side
    dst: Side
    met: list[Callable[[], None]]
    faults: dict[int, Fault]
    meeting_error: list[Exception]

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            self.src.turn(1)
            self.dst.turn(1)

    def grant_and_offer(self, name: str = "r", ttl_s: float = 30.0) -> None:
        for endpoint in self.src.endpoints.values():
            endpoint.submit(Grant(name, SLOT, WORD))
            endpoint.submit(Offer(name, ttl_s))

    def words(self) -> set[int]:
        return {table[SLOT] for table in self.src.tables.values()}


REMOTE = RemoteEngine("prefill", "life", Address("127.0.0.1", 1))
LEASE = RemoteLease("r", SLOT, WORD)


def make_side(
    world_clock: Clock, fabric: Fabric, layout: EngineLayout, peers: Callable[[int], Peers | None], faults
) -> Side:  # type: ignore[no-untyped-def]
    memory = {(r.rank, g.name): np.full(g.size_bytes, 9, np.uint8) for r in layout.ranks for g in r.regions}
    addresses = {r.rank: {g.name: memory[r.rank, g.name].ctypes.data for g in r.regions} for r in layout.ranks}
    side = Side(relocate(layout, addresses), memory, {}, {}, {})
    for rank in side.layout.ranks:
        transport = MemoryTransport(fabric, f"{layout.engine}{rank.rank}", faults=faults)
        table, buffer = LeaseTable(64), np.zeros(1 << 16, np.uint8)
        endpoint = Endpoint(
            rank.rank,
            transport,
            HostMemory(),
            OPTIONS,
            table=table,
            staging=Staging(buffer.ctypes.data, buffer.size),
            clock=world_clock,
            peers=peers(rank.rank),
        )
        areas = [MemoryRegion(g.address, g.size_bytes) for g in rank.regions]
        transport.register([*areas, table.region, *endpoint.regions, MemoryRegion(buffer.ctypes.data, buffer.size)])
        side.tables[rank.rank], side.transports[rank.rank] = table, transport
        side.endpoints[rank.rank] = endpoint
        side.staging.append(buffer)
    return side


class FakePeers(Peers):
    """Meetings happen when the test says so, on the test's thread."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.known: dict[RemoteEngine, Future[Peer]] = {}
        self.forgotten = 0

    def get(self, me: Self, remote: RemoteEngine) -> Future[Peer]:
        if remote not in self.known:
            self.known[remote] = future = Future()
            self.world.met.append(lambda: self._meet(me, remote, future))
        return self.known[remote]

    def met(self, remote: RemoteEngine) -> Peer | None:
        future = self.known.get(remote)
        return future.result() if future is not None and future.done() and not future.exception() else None

    def forget(self, remote: RemoteEngine) -> None:
        self.forgotten += 1

    def close(self) -> None:
        """Nothing runs."""

    def _meet(self, me: Self, remote: RemoteEngine, future: Future[Peer]) -> None:
        if self.world.meeting_error:
            future.set_exception(self.world.meeting_error[0])
            return
        card = self.world.src.card()
        route = compile_route(self.world.src.layout, me.layout, self.rank)
        names = {rank: f"p{rank}" for rank in self.world.src.transports}
        for rank, name in names.items():
            me.transport.add_peer(name, card.rank_by_number[rank].metadata)
        future.set_result(
            Peer(remote, card, self.world.src.layout, route, Mover(me.transport, me.memory, names, me.staging))
        )


@pytest.fixture(params=[(1, 2), (4, 2), (2, 3)], ids=lambda sizes: f"{sizes[0]}->{sizes[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    clock, fabric = Clock(), Fabric()
    faults: dict[int, Fault] = {}
    made = World(clock, fabric, None, None, [], faults, [])  # type: ignore[arg-type]

    def fault(index: int, transfer: Transfer) -> Fault:
        return faults.get(index, faults.get(-1, Fault()))

    src_tp, dst_tp = request.param
    src, dst = (
        engine(name, tp=tp, page=page, num_pages=24, kind=KIND, stages=(0, 0))
        for name, tp, page in (("prefill", src_tp, 4), ("decode", dst_tp, 6))
    )
    made.src = make_side(clock, fabric, src, lambda rank: None, lambda i, t: Fault())
    made.dst = make_side(clock, fabric, dst, lambda rank: FakePeers(made, rank), fault)
    for endpoint in made.dst.endpoints.values():
        endpoint.introduce(made.dst.card(), made.dst.layout)
    yield made
    for side in (made.src, made.dst):
        for endpoint in side.endpoints.values():
            endpoint.close()


def meet(world: World) -> None:
    meetings, world.met[:] = list(world.met), []
    for meeting in meetings:
        meeting()


def order_load(world: World, name: str = "d", **changes: object) -> Request:
    wanted = request(world.src.layout, world.dst.layout, 21, new_pages=[2, 3, 4, 5])
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load(name, REMOTE, LEASE, wanted))
    return wanted


def collect(side: Side) -> tuple[set[str], dict[str, Failure], set[str]]:
    """(received on every rank, failures of any rank, freed on every rank), since the last call."""
    results = [endpoint.collect() for endpoint in side.endpoints.values()]
    received = set.intersection(*(set(r.received) for r in results))
    failed = {name: failure for r in results for name, failure in r.failed.items()}
    return received, failed, set.intersection(*(set(r.freed) for r in results))


def test_a_load_leaves_what_the_oracle_leaves_and_frees_the_source(world: World) -> None:
    world.grant_and_offer()
    wanted = order_load(world)
    world.turn()
    assert collect(world.dst) == (set(), {}, set())
    write_values(world.src.layout, world.dst.layout, world.src.memory, wanted, 3)
    expected = {place: content.copy() for place, content in world.dst.memory.items()}
    apply_request(world.src.layout, world.dst.layout, world.src.memory, expected, wanted)
    meet(world)
    world.turn()
    assert collect(world.dst) == ({"d"}, {}, set())
    assert differing_bytes(expected, world.dst.memory) == {}
    assert collect(world.src) == (set(), {}, {"r"})
    assert world.words() == {FREE}


def test_nothing_is_reported_while_a_byte_may_still_move(world: World) -> None:
    world.grant_and_offer()
    world.faults[-1] = Fault(delay_steps=3)
    order_load(world)
    world.turn()
    meet(world)
    for _ in range(3):
        world.turn()
        assert collect(world.dst) == (set(), {}, set())
        world.fabric.step()
    for _ in range(20):  # lease words and staging batches take their own steps
        world.turn()
        world.fabric.step()
    assert collect(world.dst)[0] == {"d"}


def test_a_cancelled_load_waits_for_its_reads_and_then_fails(world: World) -> None:
    world.grant_and_offer()
    world.faults[-1] = Fault(delay_steps=2)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Cancel("d"))
    world.turn()
    assert collect(world.dst) == (set(), {}, set())
    for _ in range(4):
        world.fabric.step()
        world.turn()
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind, failed["d"].is_quarantined) == (set(), "cancelled", False)
    assert collect(world.src)[2] == {"r"}


def test_a_load_that_never_settles_is_quarantined_after_both_bounds(world: World) -> None:
    world.grant_and_offer(ttl_s=1e6)
    world.faults[-1] = Fault(drop=True)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    world.clock.now_s += OPTIONS.load_timeout_s
    world.turn()
    assert collect(world.dst) == (set(), {}, set())
    world.clock.now_s += OPTIONS.settle_timeout_s
    world.turn()
    _, failed, _ = collect(world.dst)
    assert (failed["d"].kind, failed["d"].is_quarantined) == ("timeout", True)
    assert "pages are quarantined" in failed["d"].text
    assert all(endpoint.num_quarantined == 1 for endpoint in world.dst.endpoints.values())


def test_a_failed_read_fails_the_request_and_the_source_hears_of_it(world: World) -> None:
    world.grant_and_offer()
    world.faults[0] = Fault(fail_after_pieces=1)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind) == (set(), "transfer")
    assert collect(world.src)[2] == {"r"}


def test_a_lease_that_ended_fails_the_load(world: World) -> None:
    world.grant_and_offer()
    world.turn()
    for table in world.src.tables.values():
        table[SLOT] = WORD + 1
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == "stale lease"
    assert "its word is 0xabd, expected 0xabc" in failed["d"].text


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (HandshakeError("nobody there"), "handshake"),
        (LayoutMismatch("fields differ"), "mismatch"),
        (RuntimeError("surprise"), "fault"),
    ],
)
def test_a_meeting_that_fails_fails_the_load_with_its_reason(world: World, error: Exception, kind: str) -> None:
    world.meeting_error.append(error)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == kind
    assert str(error) in failed["d"].text


def test_a_meeting_that_takes_too_long_fails_the_load(world: World) -> None:
    order_load(world)
    world.turn()
    world.clock.now_s += OPTIONS.load_timeout_s
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == "timeout"
    assert "meeting its source" in failed["d"].text


def test_a_request_that_cannot_be_bound_fails_before_anything_moves(world: World) -> None:
    world.grant_and_offer()
    wanted = request(world.src.layout, world.dst.layout, 21, src_pages=[1, 2, 3, 4, 5, 99])
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load("d", REMOTE, LEASE, wanted))
    before = {place: content.copy() for place, content in world.dst.memory.items()}
    world.turn()
    meet(world)
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == "request"
    assert "99" in failed["d"].text
    assert differing_bytes(before, world.dst.memory) == {}


def test_a_slot_that_the_source_does_not_have_is_refused(world: World) -> None:
    wanted = request(world.src.layout, world.dst.layout, 21)
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load("d", REMOTE, RemoteLease("r", 64, WORD), wanted))
    world.turn()
    meet(world)
    world.turn()
    assert "lease slot 64, but rank" in collect(world.dst)[1]["d"].text


def test_a_release_frees_the_source_without_a_load(world: World) -> None:
    world.grant_and_offer()
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Release(REMOTE, LEASE))
    world.turn()
    assert collect(world.src)[2] == set()
    meet(world)
    world.turn()
    assert (collect(world.src)[2], collect(world.dst)) == ({"r"}, (set(), {}, set()))


def test_watched_requests_keep_their_lease_and_unwatched_ones_lose_it(world: World) -> None:
    world.grant_and_offer(ttl_s=10.0)
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Watch("d", REMOTE, LEASE))
    world.turn()
    meet(world)
    for _ in range(10):
        world.clock.now_s += 5.0
        world.turn()
    assert (collect(world.src)[2], world.words()) == (set(), {WORD})
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Unwatch("d"))
    world.turn()
    for _ in range(3):
        world.clock.now_s += 5.0
        world.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_a_revoked_request_is_forgotten_in_silence(world: World) -> None:
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Grant("r", SLOT, WORD))
        endpoint.submit(Revoke("r"))
    world.turn()
    assert (collect(world.src), world.words()) == ((set(), {}, set()), {FREE})


def test_an_offer_without_a_grant_is_freed_at_once(world: World) -> None:
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Offer("never", 30.0))
    world.turn()
    assert collect(world.src)[2] == {"never"}


def test_one_request_that_fails_leaves_the_others_alone(world: World) -> None:
    world.grant_and_offer(ttl_s=1e6)
    for name in ("a", "b", "c"):
        wanted = request(world.src.layout, world.dst.layout, 21, src_pages=[1, 2, 3, 4, 5, 99 if name == "b" else 6])
        for endpoint in world.dst.endpoints.values():
            endpoint.submit(Load(name, REMOTE, LEASE, wanted))
    world.turn()
    meet(world)
    world.turn()
    received, failed, _ = collect(world.dst)
    assert (received, set(failed)) == ({"a", "c"}, {"b"})
