"""Who does the work of a rank's session, away from the engine's step?

One thread per rank, which never waits for a peer. Each turn:

1. take the orders that were handed in;
2. read notifications: reports end leases, heartbeats renew them; end the leases whose time has run out;
3. advance every load as far as it goes without waiting; report those that are over to their source ranks, well or badly, and
   leave a record of those that failed; answer some of the questions of readers;
4. renew the leases that are wanted here, each source's as often as its own time asks for, as long as the engine steps;
5. rest until something happens, briefly while leases are offered (a source must answer), long otherwise.

The engine's thread only submits and collects. `turn` is the whole loop body, for tests without a thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable

from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.session.answers import Answerer
from kvreshard.session.board import AnswerBoard
from kvreshard.session.card import EngineCard
from kvreshard.session.events import Events
from kvreshard.session.holder import LeaseHolder
from kvreshard.session.job import Job, to_failure
from kvreshard.session.lease import LeaseBook, LeaseTable
from kvreshard.session.notes import VERSION, Heartbeat, Question, Report, read_note
from kvreshard.session.orders import (
    Cancel,
    CheckResult,
    EndpointOptions,
    Failure,
    Grant,
    Load,
    Offer,
    Order,
    Release,
    Results,
    Revoke,
    Unwatch,
    Watch,
)
from kvreshard.session.outbox import Outbox
from kvreshard.session.peers import Peers, Self
from kvreshard.session.recorder import Crash, Recorder
from kvreshard.session.scratch import Scratch
from kvreshard.session.staging import Staging
from kvreshard.transport.base import MemoryRegion, Transport, TransportError
from kvreshard.transport.local import LocalMemory

logger = logging.getLogger(__name__)

REST_WITH_LOADS_S = 0.050
REST_WITH_LEASES_S = 0.005
REST_IDLE_S = 0.500
MAX_OBSTACLES_LOGGED = 64


class Endpoint:
    """A rank's session. All public methods may be called from any thread but `turn`, which is the loop's own.

    `table`: this rank's lease words; it, the scratch words and the staging buffer must be registered before the transport's
    metadata is taken (`regions`).
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        memory: LocalMemory,
        options: EndpointOptions,
        *,
        table: LeaseTable,
        staging: Staging | None = None,
        clock: Callable[[], float] = time.monotonic,
        peers: Peers | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._rank, self._transport, self._memory = rank, transport, memory
        self._options, self._staging, self._clock = options, staging, clock
        self._scratch = Scratch()
        self._book = LeaseBook(table)
        self.board = AnswerBoard()
        self._answerer = Answerer(rank, self.board, self._book, memory, clock)
        self._recorder = recorder
        self._obstacles: set[str] = set()
        self._peers = peers or Peers(options, clock, self.wake)
        self._holder = LeaseHolder(transport, self._peers, options.heartbeat_s)
        self._me: Self | None = None
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._jobs: list[Job] = []
        self._given_up: list[Job] = []
        self._collected_s = clock()
        self._outbox = Outbox()
        self._is_expecting = self._is_attentive = self._is_deaf = False
        self._event = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """Memory of the endpoint itself that the transport must know."""
        return (self._scratch.region, self.board.region)

    def introduce(self, card: EngineCard, layout: EngineLayout) -> None:
        """Say which engine this rank belongs to; loads wait for it."""
        self._me = Self(card, layout, self._rank, self._transport, self._memory, self._staging)
        self.wake()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"kvreshard-session-{self._rank}", daemon=True)
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Hand in an order; does not wait."""
        if isinstance(order, Load):
            self._outbox.expect(order.request)
        elif isinstance(order, Grant):
            # The step that hands this in ends with the parameters that name the word.
            self._book.foretell(order.slot, order.word)
        self._orders.put(order)
        self.wake()

    def collect(self, patience_s: float = 0.0) -> Results:
        """What has ended since the last call. While loads are under way, waits so long for the first to end."""
        self._collected_s = self._clock()
        return self._outbox.take(patience_s)

    def wake(self) -> None:
        """End the current rest."""
        self._event.set()

    @property
    def num_quarantined(self) -> int:
        """Loads that were given up and whose reads have not settled."""
        return len(self._given_up)

    @property
    def num_scratch_places(self) -> int:
        """Loads that have a place for lease words."""
        return len(self._scratch)

    @property
    def num_kept(self) -> int:
        """Requests that are loaded and whose source waits for a word."""
        return self._holder.num_kept

    @property
    def num_leases(self) -> int:
        """Leases that are granted or offered here."""
        return len(self._book)

    def close(self) -> None:
        """End the thread, then the meetings under way. The caller closes the transport."""
        self._stopping = True
        self.wake()
        if self._thread is not None:
            self._thread.join()
        self._peers.close()

    def turn(self) -> float:
        """One turn of the loop; returns how long it may rest."""
        now_s = self._clock()
        self._event.clear()
        self._take_orders(now_s)
        self._read_notes(now_s)
        self._book.expire(now_s)
        self._outbox.free(self._book.take_finished())
        for job in self._jobs:
            job.advance(now_s)
        self._finish_jobs()
        if self._me is not None:
            self._answerer.work(self._me.layout)
        self._peers.sweep({job.peer for job in (*self._jobs, *self._given_up) if job.peer is not None})
        self._holder.send_releases(self._me)
        quiet_s = self._renew(now_s)
        self._attend()
        if self._me is not None and len(self._answerer):
            return 0.0
        if self._book.num_offered:
            return min(REST_WITH_LEASES_S, quiet_s)
        return min(REST_WITH_LOADS_S if self._jobs or self._holder.is_releasing else REST_IDLE_S, quiet_s)

    def _attend(self) -> None:
        """Tell the transport when its pace changes, and of every offer: its reader is on the way."""
        is_attentive = bool(self._jobs or self._book.num_offered)
        if is_attentive != self._is_attentive or self._is_expecting:
            self._transport.set_attentive(is_attentive)
        self._is_attentive, self._is_expecting = is_attentive, False

    def _run(self) -> None:
        while not self._stopping:
            try:
                rest_s = self.turn()
            except Exception:  # the thread must live: without it every request of this rank would hang
                logger.exception("kvreshard session of rank %d", self._rank)
                rest_s = REST_WITH_LOADS_S
            self._event.wait(rest_s)

    def _take_orders(self, now_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                try:
                    self._obey(order, now_s)
                except Exception as error:  # an order that cannot be obeyed must not take the others with it
                    logger.exception("%s", order)
                    if isinstance(order, Load):
                        self._holder.unwatch(order.request)
                        self._fail(order, to_failure(error))

    def _obey(self, order: Order, now_s: float) -> None:
        match order:
            case Grant():
                self._book.grant(order.request, order.slot, order.word)
            case Offer():
                self._is_expecting = True
                if not self._book.offer(order.request, order.ttl_s, now_s):
                    self._outbox.free({order.request: "revoked"})
            case Revoke():
                self._book.revoke(order.request)
            case _:
                self._obey_reader(order, now_s)

    def _obey_reader(self, order: Order, now_s: float) -> None:
        match order:
            case Load():
                self._load(order, now_s)
            case Release():
                if not self._release_own(order):
                    self._holder.release(order)
            case Cancel():
                self._holder.cancel(order.request)
                for job in self._jobs:
                    if job.load.request == order.request:
                        job.stop(Failure("cancelled", "the request was aborted"), now_s)
            case Watch():
                self._holder.watch(order, self._me)
            case Unwatch():
                self._holder.unwatch(order.request)

    def _release_own(self, release: Release) -> bool:
        """End this rank's own lease, if it is one: every rank of an engine that was to read from itself is told so."""
        if self._me is None or (release.remote.engine, release.remote.incarnation) != self._me.name:
            return False
        lease, consumer = release.lease, "/".join(self._me.name)
        self._book.report(Report(VERSION, consumer, lease.request, lease.word, self._rank, (self._rank,)))
        return True

    def _load(self, load: Load, now_s: float) -> None:
        if self._me is None:
            raise KvReshardError("a load was ordered before the endpoint knew its engine")
        meeting = self._peers.get(self._me, load.remote)
        events = Events(self._clock)
        events.add("ordered", f"request {load.request} from {load.remote.engine} at {load.remote.address}")
        self._jobs.append(
            Job(load, meeting, now_s, self._me.layout, self._options, self.wake, self._scratch.take, events)
        )
        self._holder.begin(load)

    def _read_notes(self, now_s: float) -> None:
        try:
            messages = self._transport.notifications()
        except TransportError as error:  # closed: its transfers have failed, and their loads must end
            if not self._is_deaf:
                logger.error("rank %d hears nothing any more: %s", self._rank, error)
            self._is_deaf, messages = True, ()
        for message in messages:
            note = read_note(message.payload)
            if isinstance(note, Report):
                self._book.report(note)
            elif isinstance(note, Heartbeat):
                self._book.renew(note, now_s)
            elif isinstance(note, Question):
                self._answerer.take(note)

    def _finish_jobs(self) -> None:
        for job in [job for job in self._jobs if job.outcome is not None]:
            self._jobs.remove(job)
            request, outcome = job.load.request, job.outcome
            failed = isinstance(outcome, Failure)
            if failed and not job.is_settled:
                self._given_up.append(job)
            else:
                self._free_scratch(job)
            self._let_go(job, is_good=not failed)
            self._tell_obstacle(job)
            if isinstance(outcome, Failure):
                self._fail(job.load, outcome, job.check)
                self._record(job, outcome)
                self._look_after(job, outcome)
            elif outcome is not None:
                self._outbox.end(request, outcome, job.check)
        for job in [job for job in self._given_up if job.is_settled]:
            self._given_up.remove(job)
            job.close()
            self._free_scratch(job)
            self._outbox.settle(job.load.request)

    def _let_go(self, job: Job, *, is_good: bool) -> None:
        """Whatever goes wrong with what is said to the source, the request must end."""
        if self._me is None:
            return
        is_kept = is_good and not (job.is_stopped or job.load.gives_back)
        try:
            self._holder.end(self._me, job.load, job.peer, is_good=is_good, is_kept=is_kept)
        except Exception:
            logger.exception("request %s: its source is not told that it is over", job.load.request)

    def _look_after(self, job: Job, failure: Failure) -> None:
        """Of a source from which a load has failed. One that is late may be gone or slow, and others are reading from it."""
        if job.peer is not None and failure.kind == "transfer":
            self._peers.forget(job.load.remote, job.peer)
        elif job.peer is not None and failure.kind == "timeout" and self._me is not None:
            self._peers.doubt(self._me, job.peer)

    def _fail(self, load: Load, failure: Failure, check: CheckResult | None = None) -> None:
        logger.warning(
            "request %s was not loaded from engine %s at %s:%d (%s): %s",
            *(load.request, load.remote.engine, load.remote.address.host, load.remote.address.port),
            *(failure.kind, failure.text),
        )
        self._outbox.end(load.request, failure, check)

    def _tell_obstacle(self, job: Job) -> None:
        if job.obstacle and job.obstacle not in self._obstacles and len(self._obstacles) < MAX_OBSTACLES_LOGGED:
            self._obstacles.add(job.obstacle)
            logger.warning("loads are not compared with their source: %s", job.obstacle)

    def _record(self, job: Job, failure: Failure) -> None:
        """Leave a record of a failed load; an aborted request is none, unless its pages were lost."""
        if self._recorder is None or self._me is None or (failure.kind == "cancelled" and not failure.is_quarantined):
            return
        peer = job.peer
        card = peer.card if peer is not None else self._me.refused.get(job.load.remote)
        self._recorder.record(
            Crash(
                job.load, self._rank, failure, self._me.card, card, None if peer is None else peer.route, job.events,
                0 if self._staging is None else self._staging.size_bytes, self._options.allow_mismatch,
            )
        )  # fmt: skip

    def _free_scratch(self, job: Job) -> None:
        if job.scratch_address is not None:
            self._scratch.give(job.scratch_address)

    def _renew(self, now_s: float) -> float:
        """Renew the leases that are wanted; how long nobody need be told."""
        if self._me is None or now_s > self._collected_s + self._options.silence_s:
            return REST_IDLE_S  # a paused engine must not keep its sources from resting
        return self._holder.renew(self._me, now_s)
