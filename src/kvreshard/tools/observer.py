"""The observer of a rank: compares a share of its loads with their source, answers digest requests of other ranks, records failed loads.

Without a share no load is compared, without a recorder no event is stored, and without a trace no span is made. Digest requests are always
answered, since the reader decides which loads are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvreshard import __version__
from kvreshard.model import EngineLayout
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import CheckResult, Failure, Load
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.lease import WORD_BYTES, LeaseBook
from kvreshard.session.mover import Scratch
from kvreshard.session.observer import Landing, LoadObserver, Observer
from kvreshard.session.pull import TransferStats
from kvreshard.tools.digest_check import CHECK_BYTES, DigestCheck, DigestError, find_obstacle, is_chosen
from kvreshard.tools.digest_request import read_request
from kvreshard.tools.digest_server import DigestServer
from kvreshard.tools.flight import Flight, FlightSide
from kvreshard.tools.mailbox import DigestMailbox
from kvreshard.tools.recorder import Events, Recorder, is_recorded
from kvreshard.tools.spans import LoadSpans
from kvreshard.transport.base import MemoryRegion, Transfer
from kvreshard.transport.local import LocalMemory

logger = get_logger(__name__)

MAX_OBSTACLES_LOGGED = 64


@dataclass(frozen=True, slots=True)
class ObserverOptions:
    """Options of a rank's observer.

    `digest_share`: share of requests, 0 to 1, whose source and destination are compared after the load. `digest_timeout_s`: how long a
    comparison may take; then the load fails. `staging_bytes`, `allow_mismatch`: options of the loads, for flight records.
    """

    digest_share: float = 0.0
    digest_timeout_s: float = 30.0
    staging_bytes: int = 0
    allow_mismatch: tuple[str, ...] = ()


class RankObserver(Observer):
    """See the module. `memory`: this rank's, for digests. Used from the session's thread."""

    def __init__(
        self,
        rank: int,
        memory: LocalMemory,
        options: ObserverOptions,
        *,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.memory, self.options, self.recorder, self.clock = rank, memory, options, recorder, clock
        self.mailbox = DigestMailbox()
        self.server = DigestServer(rank, self.mailbox, memory, clock)
        self.scratch = Scratch()
        self._obstacles: set[str] = set()

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        return (self.mailbox.region, self.scratch.region)

    def observe(self, load: Load) -> LoadObserver:
        """See `Observer.observe`."""
        return WatchedLoad(self, load)

    def on_notification(self, payload: bytes, leases: LeaseBook) -> None:
        """See `Observer.on_notification`."""
        request = read_request(payload)
        if request is not None:
            self.server.take(request, leases)

    def work(self, leases: LeaseBook, layout: EngineLayout) -> bool:
        """See `Observer.work`."""
        return self.server.work(leases, layout)

    def close(self) -> None:
        """See `Observer.close`."""
        if self.recorder is not None:
            self.recorder.close()

    def log_obstacle(self, obstacle: str) -> None:
        """Log once why loads are not compared."""
        if obstacle not in self._obstacles and len(self._obstacles) < MAX_OBSTACLES_LOGGED:
            self._obstacles.add(obstacle)
            logger.warning("loads are not compared with their source: %s", obstacle, extra=fields("digest_skipped"))


class WatchedLoad(LoadObserver):
    """One load of a rank."""

    def __init__(self, rank: RankObserver, load: Load) -> None:
        self._rank, self._load = rank, load
        self._check: CheckResult | None = None
        self._events = None if rank.recorder is None else Events(rank.clock)
        self._spans = LoadSpans(rank.rank, load, load.trace_headers) if load.trace_headers else None
        self.on_event("ordered", f"request {load.request} from {load.remote.engine} at {load.remote.address}")

    @property
    def check(self) -> CheckResult | None:
        return self._check

    def on_event(self, event: str, text: str = "") -> None:
        """See `LoadObserver.on_event`."""
        if self._events is not None:
            self._events.add(event, text)
        if self._spans is not None:
            self._spans.on_event(event)

    def on_end(self, outcome: TransferStats | Failure) -> None:
        """See `LoadObserver.on_end`. Whatever the tracer raises, a trace must not cost the load."""
        if self._spans is None:
            return
        try:
            self._spans.on_end(outcome)
        except Exception:
            logger.debug("request %s left no spans", self._load.request, exc_info=True)

    def on_landing(self, landing: Landing) -> Generator[Transfer | None, None, None]:
        """Compare the load with its source, if its request is in the share."""
        moves = any(len(intervals) for intervals in self._load.transfer.intervals.values())
        if not (moves and is_chosen(self._load.request, self._rank.options.digest_share)):
            return
        peer, memory = landing.peer, self._rank.memory
        mine, metadata_by_rank = landing.dst.rank_by_number[peer.route.dst_rank], peer.engine_metadata.rank_by_number
        obstacle = find_obstacle(peer.route, peer.layout, metadata_by_rank, mine, memory)
        if obstacle:
            self._skip(obstacle)
            return
        scratch = self._rank.scratch
        while (address := scratch.take(CHECK_BYTES // WORD_BYTES)) is None:
            yield None
        try:
            yield from self._compare(landing, address)
        except DigestError as error:
            self._check = error.result
            if error.result != "skipped":
                raise
            self._skip(f"engine '{self._load.remote.engine}': {error}")
        finally:
            scratch.give(address)

    def on_failure(
        self, load: Load, failure: Failure, dst: EngineMetadata, src: EngineMetadata | None, *, is_routed: bool
    ) -> None:
        """Write a flight record."""
        recorder, events = self._rank.recorder, self._events
        if recorder is None or events is None or not is_recorded(failure):
            return
        rank, options = self._rank.rank, self._rank.options

        def make(written_at_s: float) -> Flight:
            return Flight(
                kvreshard=__version__,
                written_at_s=written_at_s,
                rank=rank,
                request=load.request,
                source_request=load.lease.request,
                source_address=str(load.remote.address),
                failure=failure,
                dst=FlightSide.of(dst),
                src=None if src is None else FlightSide.of(src),
                transfer=load.transfer,
                is_routed=is_routed,
                staging_bytes=options.staging_bytes,
                allow_mismatch=list(options.allow_mismatch),
                events=events.list(),
                num_events_forgotten=events.num_forgotten,
            )

        recorder.record(load.request, make)

    def _compare(self, landing: Landing, address: int) -> Generator[Transfer | None, None, None]:
        timeout_s, clock = self._rank.options.digest_timeout_s, self._rank.clock
        self.on_event("checking", "comparing digests with the source")
        num_bytes = yield from DigestCheck(landing.load, landing, self._rank.memory, address, timeout_s, clock).steps()
        self._check = "equal"
        self.on_event("checked", f"{num_bytes} bytes are equal")

    def _skip(self, obstacle: str) -> None:
        self._check = "skipped"
        self.on_event("not checked", obstacle)
        self._rank.log_obstacle(obstacle)
