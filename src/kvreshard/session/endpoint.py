"""Who does the work of a rank's session, away from the engine's step?

One thread per rank, which never waits for a peer. Each turn:

1. take the commands that were handed in;
2. read notifications: reports end leases, heartbeats renew them; end the leases whose time has run out, but after standing still
   (a stopped process, a suspended machine) only when what had been sent meanwhile has been heard;
3. see whether a call into the transport's library does not come back: then all loads come to their end, those of which something may
   still be written with their pages quarantined;
4. advance the loads of which something has happened as far as they go without waiting; report those that are over to their source ranks,
   well or badly; give whoever watches (`observer`) a turn;
5. renew the leases that are wanted here, each source's as often as its own time asks for, also for some time while the engine is paused;
6. rest until something happens, briefly while leases are published (a source must answer), long otherwise.

The engine's thread only submits and collects, and sees whether the session's thread comes back from its turns: where it does not, all loads have
failed within `load_timeout_s` and `settle_timeout_s` together. `turn` is the whole loop body, for tests without a thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.model.logs import get_logger
from kvreshard.session.commands import (
    Acquire,
    Cancel,
    CheckResult,
    Command,
    EndpointOptions,
    Failure,
    Load,
    Publish,
    Release,
    Renew,
    Results,
    Revoke,
    StopRenewing,
)
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.job import Job, Jobs, to_failure
from kvreshard.session.lease import LeaseTable
from kvreshard.session.local_leases import LocalLeases
from kvreshard.session.observer import LoadObserver, Observer
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.peers import Peers
from kvreshard.session.remote_leases import RemoteLeases
from kvreshard.session.results import ResultQueue
from kvreshard.session.scratch import Scratch
from kvreshard.session.staging import Staging
from kvreshard.transport.base import MemoryRegion, StuckCall, Transport
from kvreshard.transport.local import LocalMemory
from kvreshard.transport.watchdog import Watchdog, session_is_stuck

logger = get_logger(__name__)

REST_WITH_LOADS_S = 0.050
REST_WITH_LEASES_S = 0.005
REST_IDLE_S = 0.500
CLOSE_S = 0.2


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
        observer: Observer | None = None,
    ) -> None:
        self._rank, self._transport, self._memory = rank, transport, memory
        self._options, self._staging, self._clock = options, staging, clock
        self._scratch = Scratch()
        self._observer = observer or Observer()
        self._own = LocalLeases(rank, transport, self._observer, table, clock)
        self._peers = peers or Peers(options, clock, self.wake)
        self._remote_leases = RemoteLeases(transport, self._peers, options.heartbeat_s)
        self._me: LocalRank | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._jobs = Jobs(self.wake)
        self._collected_s = clock()
        self._results = ResultQueue()
        self._is_expecting = self._is_attentive = False
        self._stuck: StuckCall | None = None
        self._watchdog = Watchdog(
            f"rank {rank}", options.load_timeout_s + options.settle_timeout_s, self._clock, session_is_stuck
        )
        self._is_told_stuck = False
        self._event = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """Memory of the endpoint and its observer that the transport must know."""
        return (self._scratch.region, *self._observer.regions)

    def introduce(self, engine_metadata: EngineMetadata, layout: EngineLayout) -> None:
        """Say which engine this rank belongs to; loads wait for it."""
        self._me = LocalRank(engine_metadata, layout, self._rank, self._transport, self._memory, self._staging)
        self.wake()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"kvreshard-session-{self._rank}", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Hand in a command; does not wait."""
        if isinstance(command, Load):
            self._results.expect(command.request)
        elif isinstance(command, Acquire):
            # The step that hands this in ends with the parameters that name the word.
            self._own.book.write_early(command.slot, command.word)
        self._commands.put(command)
        self.wake()

    def collect(self, patience_s: float = 0.0) -> Results:
        """What has ended since the last call. While loads are under way, waits so long for the first to end."""
        self._collected_s = self._clock()
        self._look_at_session()
        return self._results.take(patience_s)

    def wake(self) -> None:
        """End the current rest."""
        self._event.set()

    @property
    def num_quarantined(self) -> int:
        """Loads that were given up and whose reads have not settled."""
        return self._jobs.num_given_up

    @property
    def num_scratch_places(self) -> int:
        """Loads that have a place for lease words."""
        return len(self._scratch)

    @property
    def num_kept(self) -> int:
        """Requests that are loaded and whose source waits for a word."""
        return self._remote_leases.num_kept

    @property
    def num_leases(self) -> int:
        """Leases that are acquired or published here."""
        return len(self._own.book)

    def close(self) -> None:
        """End the thread and the handshakes under way, and wait for neither longer than `CLOSE_S`. The caller closes the transport."""
        self._stopping = True
        self.wake()
        self._peers.close()
        self._observer.close()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                logger.warning("rank %d: the session's thread is at work and is left behind", self._rank)

    def turn(self) -> float:
        """One turn of the loop; returns how long it may rest."""
        self._watchdog.begin("turn")
        try:
            return self._turn()
        finally:
            self._watchdog.end()

    def _turn(self) -> float:
        now_s = self._clock()
        self._event.clear()
        self._take_commands(now_s)
        self._own.hear(now_s)
        self._own.expire(now_s)
        self._results.free(self._own.book.take_finished())
        self._look_at_transport(now_s)
        over, at_rest = self._jobs.advance(now_s)
        for job in over:
            try:
                self._finish(job)
            except Exception:  # the others must end
                logger.exception("request %s", job.load.request)
        for job in at_rest:
            job.close()
            self._free_scratch(job)
            self._results.settle(job.load.request)
        has_more = self._me is not None and self._observer.work(self._own.book, self._me.layout)
        self._peers.sweep(self._jobs.peers)
        self._remote_leases.update(self._me, now_s)
        keys, unmet = self._remote_leases.take_keys()
        if keys or unmet:
            self._results.meet(keys, {request: to_failure(error) for request, error in unmet.items()})
        quiet_s = self._renew(now_s)
        self._attend()
        if has_more:
            return 0.0
        if self._own.book.num_published:
            return min(REST_WITH_LEASES_S, quiet_s)
        return min(REST_WITH_LOADS_S if self._jobs else REST_IDLE_S, quiet_s)

    def _look_at_session(self) -> None:
        """On the engine's thread: loads end in time also if the session's does not come back, say from a copy on a hung device."""
        stuck = self._watchdog.stuck()
        if stuck is not None:
            self._results.give_up(Failure("fault", stuck.text, is_quarantined=True))
            if not self._is_told_stuck:
                self._results.note_stuck(stuck.call)
        self._is_told_stuck = stuck is not None

    def _look_at_transport(self, now_s: float) -> None:
        """A call into the transport's library that does not come back keeps everything that is pending: loads come to their end."""
        stuck = self._transport.stuck()
        if stuck is not None:
            if self._stuck is None:
                self._results.note_stuck(stuck.call)
            self._jobs.stop_all(Failure("transfer", stuck.text), now_s)
        self._stuck = stuck

    def _attend(self) -> None:
        """Tell the transport when its pace changes, and of every published lease: its reader is on the way."""
        is_attentive = bool(self._jobs or self._own.book.num_published)
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

    def _take_commands(self, now_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                try:
                    self._execute(command, now_s)
                except Exception as error:  # a command that fails must not take the others with it
                    logger.exception("%s", command)
                    if isinstance(command, Load):
                        self._remote_leases.stop_renewing(command.request)
                        self._fail(command, to_failure(error))

    def _execute(self, command: Command, now_s: float) -> None:
        match command:
            case Acquire():
                self._own.book.acquire(command.request, command.slot, command.word)
            case Publish():
                self._is_expecting = True
                if not self._own.book.publish(command.request, command.ttl_s, now_s, command.tables):
                    self._results.free({command.request: "revoked"})
            case Revoke():
                self._own.book.revoke(command.request)
            case _:
                self._execute_for_reader(command, now_s)

    def _execute_for_reader(self, command: Command, now_s: float) -> None:
        match command:
            case Load():
                self._load(command, now_s)
            case Release():
                if self._me is None or not self._own.release(self._me.name, command):
                    self._remote_leases.release(command)
            case Cancel():
                self._remote_leases.cancel(command.request)
                self._jobs.stop(command.request, Failure("cancelled", "the request was aborted"), now_s)
            case Renew():
                self._remote_leases.start_renewing(command, self._me)
            case StopRenewing():
                self._remote_leases.stop_renewing(command.request)

    def _load(self, load: Load, now_s: float) -> None:
        if self._me is None:
            raise KvReshardError("a load was ordered before the endpoint knew its engine")
        if load.refusal is not None:
            self._refuse(load, load.refusal)
            return
        handshake, observer = self._peers.get(self._me, load.remote), self._observer.ordered(load)
        note, take_scratch = self._jobs.note, self._scratch.take
        self._jobs.add(Job(load, handshake, now_s, self._me.layout, self._options, note, take_scratch, observer))
        self._remote_leases.begin(load)

    def _refuse(self, load: Load, failure: Failure) -> None:
        """The engine knows that its source cannot be met: nobody is asked again for it."""
        self._remote_leases.stop_renewing(load.request)
        self._fail(load, failure)
        observer = self._observer.ordered(load)
        observer.noted("refused", failure.text)
        self._tell_failed(observer, load, None, failure)

    def _finish(self, job: Job) -> None:
        """A load is over."""
        request, outcome = job.load.request, job.outcome
        failed = isinstance(outcome, Failure)
        if not job.is_given_up:
            self._free_scratch(job)
        self._let_go(job, is_good=not failed)
        if isinstance(outcome, Failure):
            self._fail(job.load, outcome, job.observer.check)
            self._tell_failed(job.observer, job.load, job.peer, outcome)
            self._look_after(job, outcome)
        elif outcome is not None:
            self._results.end(request, outcome, job.observer.check)

    def _let_go(self, job: Job, *, is_good: bool) -> None:
        """Whatever goes wrong with what is said to the source, the request must end."""
        if self._me is None:
            return
        is_kept = is_good and not (job.is_stopped or job.load.gives_back)
        try:
            self._remote_leases.end(self._me, job.load, job.peer, is_good=is_good, is_kept=is_kept)
        except Exception:
            logger.exception("request %s: its source is not told that it is over", job.load.request)

    def _look_after(self, job: Job, failure: Failure) -> None:
        """Of a source from which a load has failed. One that is late may be gone or slow, and others are reading from it."""
        if job.peer is not None and failure.kind == "transfer":
            self._peers.forget(job.load.remote, job.peer)
        elif job.peer is not None and failure.kind == "timeout" and self._me is not None:
            self._peers.check(self._me, job.peer)

    def _fail(self, load: Load, failure: Failure, check: CheckResult | None = None) -> None:
        source = f"engine {load.remote.engine} at {str(load.remote.address).removeprefix('tcp://')}"
        logger.warning("request %s was not loaded from %s (%s): %s", load.request, source, failure.kind, failure.text)
        self._results.end(load.request, failure, check)

    def _tell_failed(self, observer: LoadObserver, load: Load, peer: Peer | None, failure: Failure) -> None:
        """Tell the load's observer that it has failed."""
        if self._me is None:
            return
        engine_metadata = peer.engine_metadata if peer is not None else self._me.refused.get(load.remote)
        observer.failed(failure, self._me.engine_metadata, engine_metadata, is_routed=peer is not None)

    def _free_scratch(self, job: Job) -> None:
        if job.scratch_address is not None:
            self._scratch.give(job.scratch_address)

    def _renew(self, now_s: float) -> float:
        """Renew the leases that are wanted; how long nobody need be told."""
        if self._me is None or now_s > self._collected_s + self._options.paused_renewal_s:
            return REST_IDLE_S  # an engine that never goes on must not hold its sources' blocks for ever
        return self._remote_leases.renew(self._me, now_s)
