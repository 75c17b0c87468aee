"""What is one engine of a soak made of? Real ranks of the session, NIXL agents and a listener; only the model is missing.

One process may hold several engines: each rank has memory, a transport, a lease table, a staging buffer and an endpoint with its
thread. `Counters` tells everything that may leak.
"""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tests.ports import free_ports
from tests.soak.content import Content, views
from tests.soak.early_fields import choose_early_fields
from tests.soak.pages import Pool
from tests.soak.shapes import MAX_TOKENS, Shape

from kvreshard.kinds.assemble import relocate
from kvreshard.model.changed import replace
from kvreshard.plan.copies import CopyList
from kvreshard.plan.cost import CostModel
from kvreshard.session.commands import Command, EndpointOptions, Load, RemoteEngine, Results
from kvreshard.session.endpoint import Endpoint
from kvreshard.session.engine_metadata import RankMetadata, make_engine_metadata
from kvreshard.session.handshake_messages import Address
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.lease import LeaseTable
from kvreshard.session.mover import Staging
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.seal import new_key
from kvreshard.tools.observer import ObserverOptions, RankObserver, WatchedLoad
from kvreshard.transport.base import Direction, MemoryRegion
from kvreshard.transport.local import HostMemory
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.slices import SPLIT_COPIES

LEASE_SLOTS = 256
LEASE_S = 30.0
STAGING_BYTES = 256 << 10
PIECE_BYTES = 64
PATIENCE_S = 60.0
WATCHED = ObserverOptions(digest_share=0.1, digest_timeout_s=2.0)


@dataclass(frozen=True)
class Counters:
    """Of a process and one engine in it."""

    fds: int
    threads: int
    resident_bytes: int
    leases: int
    quarantined: int
    jobs: int
    scratch_places: int
    pages_missing: int
    pages_trespassed: int
    handles: int
    prepared: int
    regions: int
    peers: int


class SoakObserver(RankObserver):
    """One that also knows which loads have begun again (`begun_again`: requests)."""

    def __init__(self, rank: int, options: ObserverOptions, begun_again: set[str]) -> None:
        super().__init__(rank, HostMemory(), options)
        self.begun_again = begun_again

    def observe(self, load: Load) -> WatchedLoad:
        return _SoakLoad(self, load)


class _SoakLoad(WatchedLoad):
    def __init__(self, rank: SoakObserver, load: Load) -> None:
        super().__init__(rank, load)
        self._request, self._begun_again = load.request, rank.begun_again

    def on_event(self, event: str, text: str = "") -> None:
        if event == "begun again":
            self._begun_again.add(self._request)
        super().on_event(event, text)


@dataclass(frozen=True)
class _Rank:
    memory: dict[str, np.ndarray]
    transport: NixlTransport
    table: LeaseTable
    staging: np.ndarray
    endpoint: Endpoint
    observer: SoakObserver


class Engine:
    """One life of an engine. `port` 0: one that nobody has; a restarted engine takes the port of its former life."""

    def __init__(
        self,
        shape: Shape,
        options: EndpointOptions,
        rng: random.Random,
        port: int = 0,
        watched: ObserverOptions = WATCHED,
    ) -> None:
        self.shape, self.rng, self._watched = shape, rng, watched
        if shape.is_staged:
            options = replace(options, cost=CostModel(copy_s=1.0))
        layout = shape.layout()
        memory = {
            rank.rank: {region.name: np.zeros(region.size_bytes, np.uint8) for region in rank.regions}
            for rank in layout.ranks
        }
        addresses = {
            rank: {name: int(content.ctypes.data) for name, content in regions.items()}
            for rank, regions in memory.items()
        }
        self.layout = relocate(layout, addresses)
        self.memory = memory
        self.pool = Pool(views(self.layout, memory), shape.num_pages, rng)
        self.content = Content(self.layout, MAX_TOKENS)
        self.begun_again: set[str] = set()
        self._ranks = {rank.rank: self._open(rank.rank, memory[rank.rank], options) for rank in layout.ranks}
        metadata_by_rank = [self._engine_metadata(number, rank) for number, rank in self._ranks.items()]
        self.key = new_key()
        self.rendezvous, self.early_fields = Rendezvous(self.key), choose_early_fields(layout, rng)
        engine_metadata = make_engine_metadata(
            self.layout, self.key, {"model": shape.model}, metadata_by_rank, LEASE_S, early_fields=self.early_fields
        )
        for rank in self._ranks.values():
            rank.endpoint.introduce(engine_metadata, self.layout)
            rank.endpoint.start()
        address = Address("127.0.0.1", port or free_ports(1))
        self.listener = HandshakeServer(address, engine_metadata, rendezvous=self.rendezvous)
        self.remote = RemoteEngine(shape.name, engine_metadata.instance_id, self.listener.address)

    def _open(self, number: int, memory: dict[str, np.ndarray], options: EndpointOptions) -> _Rank:
        transport = NixlTransport(f"{self.shape.name}-{number}")
        table, staging = LeaseTable(LEASE_SLOTS), np.zeros(STAGING_BYTES, np.uint8)
        buffer = Staging(int(staging.ctypes.data), staging.nbytes)
        observer = SoakObserver(number, self._watched, self.begun_again)
        endpoint = Endpoint(number, transport, HostMemory(), options, table=table, staging=buffer, observer=observer)
        areas = [MemoryRegion(int(content.ctypes.data), content.nbytes) for content in memory.values()]
        transport.register(
            [*areas, table.region, *endpoint.regions, MemoryRegion(int(staging.ctypes.data), staging.nbytes)]
        )
        return _Rank(memory, transport, table, staging, endpoint, observer)

    @staticmethod
    def _engine_metadata(number: int, rank: _Rank) -> RankMetadata:
        table, mailbox = rank.table, rank.observer.mailbox
        return RankMetadata(
            number, rank.transport.metadata(), table.region.address, len(table), mailbox.region.address, len(mailbox),
            table.progress_address,
        )  # fmt: skip

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._ranks)

    @property
    def endpoints(self) -> Mapping[int, Endpoint]:
        return {number: rank.endpoint for number, rank in self._ranks.items()}

    def tell_readers(self) -> None:
        """Have the listener answer, if what it says of prefills has changed."""
        if self.rendezvous.has_changed:
            self.rendezvous.has_changed = False
            self.listener.wake()

    def submit(self, order: Command) -> None:
        """The same order for every rank."""
        for rank in self._ranks.values():
            rank.endpoint.submit(order)

    def collect(self) -> dict[int, Results]:
        """What has ended on each rank."""
        return {number: rank.endpoint.collect() for number, rank in self._ranks.items()}

    def read_from(self, source: Engine, times: int) -> None:
        """Read from a source in posts that NIXL's threads share: until a thread has had a share of a post, its connection holds
        more file descriptors, and which thread takes a share is not for us to say.
        """
        names = {rank.transport.name for rank in source._ranks.values()}
        for rank in self._ranks.values():
            here = int(rank.staging.ctypes.data) + np.arange(4 * SPLIT_COPIES, dtype=np.uint64) * np.uint64(PIECE_BYTES)
            for peer, (name, table) in list(rank.transport._peers.items()):
                if name not in names:
                    continue
                there = max(table.regions, key=lambda region: region.size_bytes).address + (here - here[0])
                for _ in range(times):
                    rank.transport.post(peer, Direction.READ, CopyList.of(there, here, PIECE_BYTES)).wait(PATIENCE_S)

    def count(self, num_pages_in_use: int = 0) -> Counters:
        """What there is of everything at this moment."""
        gc.collect()
        endpoints = [rank.endpoint for rank in self._ranks.values()]
        agents = [rank.transport._owner.call(_inside) for rank in self._ranks.values()]
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Counters(
            fds=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            resident_bytes=resident,
            leases=sum(len(endpoint._own.book) for endpoint in endpoints),
            quarantined=sum(len(endpoint._jobs._given_up) for endpoint in endpoints),
            jobs=sum(len(endpoint._jobs) for endpoint in endpoints),
            scratch_places=sum(
                len(rank.endpoint._scratch) + len(rank.observer.scratch) for rank in self._ranks.values()
            ),
            pages_missing=self.pool.num_pages - self.pool.num_free - num_pages_in_use,
            pages_trespassed=self.pool.count_changed(),
            handles=sum(rank.transport._owner._windows.num_in_flight for rank in self._ranks.values()),
            prepared=sum(prepared for prepared, _, _ in agents),
            regions=sum(regions for _, regions, _ in agents),
            peers=sum(peers for _, _, peers in agents),
        )

    def close(self) -> None:
        """End everything, the listener first."""
        self.listener.close()
        for rank in self._ranks.values():
            rank.endpoint.close()
        for rank in self._ranks.values():
            rank.transport.close()


def _inside(agent: object) -> tuple[int, int, int]:
    """Prepared lists, registered regions and connected peers of a NIXL agent."""
    agent = agent.agent  # what is watched
    lists = sum(len(found) for found in agent._prepared.values())
    return lists, len(agent._registered), len(agent._peers)
