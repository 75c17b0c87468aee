"""The engine part of one rank: both layouts as they would travel at handshake, the routes compiled from them, and requests that it carries out
with the production `Mover`, several at once, each in a thread of its own.
"""

from __future__ import annotations

import threading
import time
import traceback

import msgspec

from kvreshard.model import EngineLayout, KvReshardError, wire
from kvreshard.model.tables import Request
from kvreshard.plan import Route, compile_route, elect, match_fields
from kvreshard.plan.cost import CostModel, Way
from kvreshard.plan.request_check import check_request
from kvreshard.session import transfer
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.pull import TransferStats
from kvreshard.testing.rank_memory import Block
from kvreshard.transport.base import Transport, TransportError

NOTHING = TransferStats()


class Load(msgspec.Struct):
    """A rank's place in a pair of engines: rank `rank` of the destination or of the source.

    Peers are called "rank<n>"; `first_peer` is the number of the other engine's first rank. The staging buffer is
    `staging_bytes` from `staging_address`; zero bytes: none. `cost` chooses where `way` does not.
    """

    src: bytes
    dst: bytes
    is_source: bool
    rank: int
    first_peer: int
    way: Way | None
    staging_address: int
    staging_bytes: int
    cost: CostModel = CostModel()


class Outcome(msgspec.Struct, frozen=True):
    """The end of a request on one rank: what moved, or why it did not arrive."""

    error: str | None
    moved: TransferStats = NOTHING


class RankMover:
    """See the module. Not safe for use from several threads, apart from its own jobs."""

    def __init__(self, transport: Transport, block: Block, load: Load) -> None:
        started_s = time.monotonic()
        self._src, self._dst = wire.decode(load.src), wire.decode(load.dst)
        self._rank, self._is_source = load.rank, load.is_source
        election = elect(self._src, self._dst, match_fields(self._src, self._dst).names)
        ranks = election.readers[load.rank] if load.is_source else (load.rank,)
        self._routes: dict[int, Route] = {
            rank: compile_route(self._src, self._dst, rank, election=election, cost=load.cost, way=load.way)
            for rank in ranks
        }
        self.compile_s = time.monotonic() - started_s
        other: EngineLayout = self._dst if load.is_source else self._src
        peers = {rank.rank: f"rank{load.first_peer + index}" for index, rank in enumerate(other.ranks)}
        staging = Staging(load.staging_address, load.staging_bytes) if load.staging_bytes else None
        mine = (self._src if load.is_source else self._dst).rank_by_number[load.rank]
        for region in mine.regions:
            block.make_resident(region.address, region.size_bytes)
        if staging is not None:
            block.make_resident(staging.address, staging.size_bytes)
        self._mover = Mover(transport, block.memory, peers, staging)
        self._threads: dict[int, threading.Thread] = {}
        self._outcomes: dict[int, Outcome] = {}

    def start(self, request: Request, report: bytes, push: bool) -> int:
        """Start a request; returns its job at once. `report`: the notification that sources get. `push`: the sources write."""
        job = len(self._threads) + 1
        arguments = (job, request, report, push)
        self._threads[job] = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._threads[job].start()
        return job

    def wait(self, job: int, timeout_s: float) -> Outcome:
        """The end of a job, or that it is still running after `timeout_s`."""
        self._threads[job].join(timeout_s)
        return self._outcomes.get(job, Outcome(f"still running after {timeout_s} s"))

    def _run(self, job: int, request: Request, report: bytes, push: bool) -> None:
        try:
            self._outcomes[job] = Outcome(None, self._carry_out(request, report, push))
        except (KvReshardError, TransportError, TimeoutError) as error:
            self._outcomes[job] = Outcome(str(error))
        except Exception:  # noqa: BLE001  the controller reports it, and the rank lives on
            self._outcomes[job] = Outcome(traceback.format_exc())

    def _carry_out(self, request: Request, report: bytes, push: bool) -> TransferStats:
        if not push:
            return transfer.pull(self._mover, self._routes[self._rank], request, self._dst, report)
        if self._is_source:
            return transfer.push(self._mover, self._routes.values(), request, self._rank)
        check_request(self._routes[self._rank], request)
        self._mover.fill(self._dst, self._routes[self._rank], request)
        return NOTHING
