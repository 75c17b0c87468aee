"""Two engines of several ranks in one process: memory transports, a clock that the test turns, no threads of the endpoints' own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from tests.faulty_memory import Fault, FaultPlan, FaultyFabric, FaultyTransport
from tests.pairs.small import engine, request

from kvreshard.kinds import Attention
from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan import compile_route
from kvreshard.session.commands import Acquire, EndpointOptions, Failure, Load, Publish, RemoteEngine
from kvreshard.session.endpoint import REST_IDLE_S, Endpoint
from kvreshard.session.engine_metadata import EngineMetadata, RankMetadata, make_engine_metadata
from kvreshard.session.follower import Follower
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease, LeaseTable
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.peer import LocalRank, Peer, disconnect
from kvreshard.session.peers import Peers
from kvreshard.session.seal import Seal, instance_id_of, make_seal
from kvreshard.tools.observer import ObserverOptions, RankObserver
from kvreshard.tools.recorder import Recorder
from kvreshard.transport.base import MemoryRegion, Transfer
from kvreshard.transport.local import HostMemory, LocalMemory

WORD, SLOT = 0xABC, 5
KEY = bytes(range(32))
LIFE = instance_id_of(KEY)
HOST: tuple[str, LocalMemory] = ("cpu", HostMemory())
KIND = Attention(2, 8, "bfloat16")
UNWATCHED = ObserverOptions()
OPTIONS = EndpointOptions(load_timeout_s=100.0, settle_timeout_s=10.0, heartbeat_s=5.0, retry_s=5.0)


def at_once(work: Callable[[], None]) -> bool:
    """Recorders' work, on the test's own thread."""
    work()
    return True


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
    transports: dict[int, FaultyTransport]
    endpoints: dict[int, Endpoint]
    observers: dict[int, RankObserver] = field(default_factory=dict)
    staging: list[np.ndarray] = field(default_factory=list)
    lease_s: float = 30.0
    key: bytes = KEY
    is_early: bool = True

    def engine_metadata(self) -> EngineMetadata:
        ranks = [
            RankMetadata(
                rank,
                self.transports[rank].metadata(),
                self.tables[rank].region.address,
                len(self.tables[rank]),
                self.observers[rank].mailbox.region.address,
                len(self.observers[rank].mailbox),
                self.tables[rank].progress_address,
            )
            for rank in self.transports
        ]
        early = {field.name: int(field.name.split(".")[1]) for field in self.layout.fields} if self.is_early else {}
        return make_engine_metadata(self.layout, self.key, {}, ranks, self.lease_s, early_fields=early)

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            for endpoint in self.endpoints.values():
                endpoint.turn()


@dataclass
class World:
    """A source, a destination, the network and the clock between them."""

    clock: Clock
    fabric: FaultyFabric
    src: Side
    dst: Side
    met: list[Callable[[], None]]
    faults: dict[int, Fault]
    meeting_error: list[Exception]

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            self.src.turn(1)
            self.dst.turn(1)

    def wait(self, seconds: float, *sides: Side) -> None:
        """Time passes while these sides have their turns, or both, so that they do not stand still."""
        until_s = self.clock.now_s + seconds
        while self.clock.now_s < until_s:
            self.clock.now_s = min(until_s, self.clock.now_s + REST_IDLE_S)
            for side in sides or (self.src, self.dst):
                side.turn(1)

    def acquire_and_publish(self, name: str = "r", ttl_s: float = 30.0) -> None:
        """A lease of the pages that `order_load` reads."""
        tables = request(self.src.layout, self.dst.layout, 21).src_tables
        for endpoint in self.src.endpoints.values():
            endpoint.submit(Acquire(Lease(name, SLOT, WORD)))
            endpoint.submit(Publish(name, ttl_s, tables))

    def close(self) -> None:
        for side in (self.src, self.dst):
            for endpoint in side.endpoints.values():
                endpoint.close()

    def words(self) -> set[int]:
        return {table[SLOT] for table in self.src.tables.values()}


REMOTE = RemoteEngine("prefill", LIFE, Address("127.0.0.1", 1))
LEASE = Lease("r", SLOT, WORD)


def seal(
    transfer: Request,
    lease: Lease = LEASE,
    remote: RemoteEngine = REMOTE,
    key: bytes = KEY,
    compatibility: bytes = b"",
) -> Seal:
    """What the source says of a transfer."""
    return make_seal(key, remote.name, lease, transfer.src_tables, compatibility)


def make_side(
    world_clock: Clock,
    fabric: FaultyFabric,
    layout: EngineLayout,
    peers: Callable[[int], Peers | None],
    faults: FaultPlan,
    options: EndpointOptions,
    recorder: Recorder | None = None,
    local: tuple[str, LocalMemory] = HOST,
    watched: ObserverOptions = UNWATCHED,
    follower: Callable[[], Follower | None] = lambda: None,
) -> Side:
    """One engine whose caches lie on a device, and what reads them there: (device, memory)."""
    device, local_memory = local
    memory = {(r.rank, g.name): np.full(g.size_bytes, 9, np.uint8) for r in layout.ranks for g in r.regions}
    addresses = {r.rank: {g.name: memory[r.rank, g.name].ctypes.data for g in r.regions} for r in layout.ranks}
    side = Side(relocate(layout, addresses, device=device), memory, {}, {}, {})
    for rank in side.layout.ranks:
        transport = FaultyTransport(fabric, f"{layout.engine}{rank.rank}", faults=faults)
        table, buffer = LeaseTable(64), np.zeros(1 << 16, np.uint8)
        observer = RankObserver(rank.rank, local_memory, watched, recorder=recorder, clock=world_clock)
        endpoint = Endpoint(
            rank.rank,
            transport,
            local_memory,
            options,
            table=table,
            staging=Staging(buffer.ctypes.data, buffer.size),
            clock=world_clock,
            peers=peers(rank.rank),
            observer=observer,
            follower=follower(),
        )
        areas = [MemoryRegion(g.address, g.size_bytes) for g in rank.regions]
        transport.register([*areas, table.region, *endpoint.regions, MemoryRegion(buffer.ctypes.data, buffer.size)])
        side.tables[rank.rank], side.transports[rank.rank] = table, transport
        side.endpoints[rank.rank], side.observers[rank.rank] = endpoint, observer
        side.staging.append(buffer)
    return side


class ScriptedPeers(Peers):
    """Meetings happen when the test says so, on the test's thread: they wait in `queue`."""

    def __init__(self, queue: list[Callable[[], None]]) -> None:
        self.queue = queue
        self.known: dict[RemoteEngine, Future[Peer]] = {}

    def get(self, me: LocalRank, remote: RemoteEngine) -> Future[Peer]:
        if remote not in self.known:
            self.known[remote] = future = Future()
            self.queue.append(lambda: None if future.cancelled() else self._meet(me, remote, future))
        return self.known[remote]

    def met(self, remote: RemoteEngine) -> Peer | None:
        future = self.known.get(remote)
        return future.result() if future and future.done() and not future.exception() else None

    def forget(self, peer: Peer) -> None:
        if self.met(peer.remote) is peer:
            del self.known[peer.remote]
            disconnect(peer)

    def retire(self, peer: Peer) -> None:
        """At once: a test's loads of one peer fail together."""
        self.forget(peer)

    def check(self, me: LocalRank, peer: Peer) -> None:
        self.queue.append(lambda: self._ask(peer))

    def cancel(self, remote: RemoteEngine) -> None:
        future = self.known.get(remote)
        if future is not None and future.cancel():
            del self.known[remote]

    @property
    def num_met(self) -> int:
        return sum(peer.done() and peer.exception() is None for peer in self.known.values())

    def sweep(self, in_use: Callable[[], Collection[Peer]]) -> None:
        """Nothing is forgotten here for its age."""

    def close(self) -> None:
        """Nothing runs."""

    def _meet(self, me: LocalRank, remote: RemoteEngine, future: Future[Peer]) -> None:
        raise NotImplementedError

    def _ask(self, peer: Peer) -> None:
        """Whether a peer that is checked is still there; if not, it is forgotten."""
        raise NotImplementedError


class FakePeers(ScriptedPeers):
    """Those of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(world.met)
        self.world, self.rank = world, rank

    def _meet(self, me: LocalRank, remote: RemoteEngine, future: Future[Peer]) -> None:
        if self.world.meeting_error:
            future.set_exception(self.world.meeting_error[0])
            return
        engine_metadata = self.world.src.engine_metadata()
        route = compile_route(self.world.src.layout, me.layout, self.rank)
        names = {rank: f"p{rank}" for rank in self.world.src.transports}
        for rank, name in names.items():
            me.transport.add_peer(name, engine_metadata.rank_by_number[rank].transport_metadata)
        future.set_result(
            Peer(
                remote, engine_metadata, self.world.src.layout, route, Mover(me.transport, me.memory, names, me.staging)
            )
        )

    def _ask(self, peer: Peer) -> None:
        if self.world.meeting_error:
            self.forget(peer)


def make_world(
    src_tp: int,
    dst_tp: int,
    options: EndpointOptions = OPTIONS,
    recorder: Recorder | None = None,
    local: tuple[tuple[str, LocalMemory], tuple[str, LocalMemory]] = (HOST, HOST),
    watched: ObserverOptions = UNWATCHED,
    follower: Callable[[], Follower | None] = lambda: None,
    stages: tuple[int, ...] = (0, 0),
) -> World:
    """Engines of `src_tp` and `dst_tp` ranks that know themselves, and not yet one another. `local`: of both, as in `make_side`. `watched`: of
    the loads; `follower`: of each of their ranks. `stages`: of the source's layers.
    """
    clock, fabric = Clock(), FaultyFabric()
    faults: dict[int, Fault] = {}
    made = World(clock, fabric, None, None, [], faults, [])

    def fault(index: int, transfer: Transfer) -> Fault:
        return faults.get(index, faults.get(-1, Fault()))

    src, dst = (
        engine(name, tp=tp, page=page, num_pages=24, kind=KIND, stages=layers)
        for name, tp, page, layers in (("prefill", src_tp, 4, stages), ("decode", dst_tp, 6, (0,) * len(stages)))
    )
    made.src = make_side(
        clock, fabric, src, lambda rank: FakePeers(made, rank), lambda i, t: Fault(), options, None, local[0]
    )
    made.dst = make_side(
        clock, fabric, dst, lambda rank: FakePeers(made, rank), fault, options, recorder, local[1], watched, follower
    )
    for side in (made.src, made.dst):
        for endpoint in side.endpoints.values():
            endpoint.introduce(side.engine_metadata(), side.layout)
    return made


def meet_engine(
    me: LocalRank, remote: RemoteEngine, options: EndpointOptions, is_told: Callable[[], object] = lambda: True
) -> Peer:
    """Meet one engine through its listener, and wait for that, and for what it is told of it."""
    peers = Peers(options, Clock(), lambda: None)
    try:
        return peers.get(me, remote).result(60.0)
    finally:
        while not is_told():
            time.sleep(0.001)
        peers.close()


def meet(world: World) -> None:
    meetings, world.met[:] = list(world.met), []
    for meeting in meetings:
        meeting()


def order_load(world: World, name: str = "d", *, lease: Lease = LEASE, gives_back: bool = True) -> Request:
    wanted = request(world.src.layout, world.dst.layout, 21, new_pages=[2, 3, 4, 5])
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load(name, REMOTE, lease, wanted, seal(wanted, lease), gives_back))
    return wanted


def collect(side: Side) -> tuple[set[str], dict[str, Failure], set[str]]:
    """(received on every rank, failures of any rank, freed on every rank), since the last call."""
    results = [endpoint.collect() for endpoint in side.endpoints.values()]
    received = set.intersection(*(set(r.received) for r in results))
    failed = {name: failure for r in results for name, failure in r.failed.items()}
    return received, failed, set.intersection(*(set(r.freed) for r in results))
