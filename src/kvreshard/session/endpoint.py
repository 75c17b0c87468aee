"""The session of one rank: one thread that carries out the engine's commands, away from the engine's step, and never waits for a peer.

Each turn:

1. execute the commands that were submitted;
2. apply the notifications of readers, and end the leases that have expired (`lease`);
3. stop all loads if a call into the transport's library does not return;
4. advance the loads of which something has happened, and report those that have ended;
5. renew the leases that are wanted here, for some time also while the engine is paused;
6. rest until something happens: briefly while leases are published (a source must answer), longer otherwise.

The engine's thread submits and collects, and notices when the session's thread does not return from a turn: then all loads have failed after
`load_timeout_s` and `settle_timeout_s` together. Tests without a thread call `turn`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import (
    ABORTED,
    FOR_OTHERS,
    Acquire,
    Cancel,
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
from kvreshard.session.early_job import EarlyJob
from kvreshard.session.early_loads import EarlyLoads
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.follower import Follower
from kvreshard.session.job import Job, Jobs, LeaseCheck, to_failure
from kvreshard.session.lease import LeaseTable, LocalLeases
from kvreshard.session.mover import Scratch, Staging
from kvreshard.session.observer import LoadObserver, Observer
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.peers import Peers
from kvreshard.session.progress import ProgressBoard, StepProgress
from kvreshard.session.pull import TransferStats
from kvreshard.session.remote_leases import RemoteLeases
from kvreshard.session.results import ResultQueue
from kvreshard.transport.base import MemoryRegion, Transport
from kvreshard.transport.local import LocalMemory
from kvreshard.transport.watchdog import Watchdog, session_is_stuck

logger = get_logger(__name__)

REST_WITH_LOADS_S = 0.050
REST_WITH_LEASES_S = 0.005
# A device is asked this often whether it has computed what readers wait for.
REST_WITH_EVENTS_S = 0.001
REST_IDLE_S = 0.500
CLOSE_S = 0.2
# An engine that is put to sleep waits this long for a turn to end: its memory goes next.
END_S = 10.0


class Endpoint:
    """Public methods may be called from any thread, but for `turn`, which is the loop's own.

    `table`: this rank's lease words, `board`: its progress words. The table, `regions` and the staging buffer must be registered before the
    transport's metadata is taken.
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
        board: ProgressBoard | None = None,
        follower: Follower | None = None,
    ) -> None:
        self._rank, self._transport, self._memory = rank, transport, memory
        self._options, self._staging, self._clock = options, staging, clock
        self._scratch = Scratch()
        self._observer = observer or Observer()
        self._own = LocalLeases(rank, transport, self._observer.on_notification, table, clock)
        self.board = board or ProgressBoard(table)
        self._results = ResultQueue()
        self._peers = peers or Peers(options, clock, self.wake, on_handshake=self._results.note_handshake)
        self._remote_leases = RemoteLeases(transport, self._peers, self._results, options.heartbeat_s)
        self._me: LocalRank | None = None
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._jobs = Jobs(self.wake)
        self._collected_s = clock()
        self._early = EarlyLoads(self._scratch, self._results, options, self.wake, follower)
        self._is_attentive = self._has_published = False
        self._watchdog = Watchdog(
            f"rank {rank}", options.load_timeout_s + options.settle_timeout_s, self._clock, session_is_stuck
        )
        self._event = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        """Memory of the endpoint and its observer that the transport must register."""
        return (self._scratch.region, *self._observer.regions)

    def introduce(self, engine_metadata: EngineMetadata, layout: EngineLayout) -> None:
        """Set the engine that this rank belongs to. Must precede its loads."""
        self._me = LocalRank(engine_metadata, layout, self._rank, self._transport, self._memory, self._staging)
        self.wake()

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name=f"kvreshard-session-{self._rank}", daemon=True)
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queue a command."""
        if isinstance(command, Load):
            self._results.expect(command.request)
        elif isinstance(command, Acquire):
            # The parameters that name the word leave the engine at the end of this step.
            self._own.book.write(command.lease.slot, command.lease.word)
        elif isinstance(command, Revoke):
            self.board.take_back(command.lease.slot, command.lease.word)
        self._commands.put(command)
        self.wake()

    def begin_step(self, computed: Sequence[StepProgress]) -> None:
        """The engine begins a step that computes these prefills, which readers may follow. `board` is told how it goes on."""
        if computed and not self.board.is_computing:
            self.wake()
        self.board.begin(computed)

    def collect(self, patience_s: float = 0.0) -> Results:
        """What has ended since the last call. While loads are under way, waits up to `patience_s` for the first to end."""
        self._collected_s = self._clock()
        stuck = self._watchdog.stuck()
        if stuck is not None:  # say in a copy on a hung device: loads end in time all the same
            self._results.give_up(Failure("fault", stuck.text, is_quarantined=True))
        self._results.note_stuck("session", stuck)
        if self._stopping:  # an engine that could not be put to sleep goes on, without this rank's session
            self._results.give_up(self._ended())
            if self._thread is not None and not self._thread.is_alive():
                self._end_leases()
        return self._results.take(patience_s)

    def wake(self) -> None:
        """End the current rest."""
        self._event.set()

    def close(self) -> None:
        """End the thread and all handshakes, and wait `CLOSE_S` at most. The caller closes the transport."""
        if not self._stop(CLOSE_S):
            logger.warning(
                "rank %d: the session's thread is busy and is left behind",
                self._rank,
                extra=fields("thread_left_behind", rank=self._rank),
            )

    def end(self) -> Results:
        """Close, before the memory of the caches goes: loads have failed, leases have ended, and their words are cleared. Returns what is left.

        Raises KvReshardError if the thread is busy with that memory and does not end: loads have failed, in quarantine, and further ones fail.
        """
        if not self._stop(END_S):
            self._results.give_up(self._ended(is_quarantined=True))
            raise KvReshardError(
                f"rank {self._rank}: the session's thread is busy and has not ended in {END_S:g} s; the memory of the caches must stay, so restart "
                "the engine"
            )
        self._end_leases()
        self._results.give_up(Failure("cancelled", "the engine is put to sleep"))
        self._results.note_peers(0)
        for thread in ("session", "transport"):
            self._results.note_stuck(thread, None)
        return self._results.take(0.0)

    def _end_leases(self) -> None:
        """End all leases, also those of which the thread, which has ended, has not heard."""
        self._execute_commands(self._clock())
        self._own.book.revoke_all()
        self._results.free(self._own.book.take_finished())

    def _ended(self, *, is_quarantined: bool = False) -> Failure:
        return Failure("fault", f"the session of rank {self._rank} has ended; restart the engine", is_quarantined)

    def _stop(self, wait_s: float) -> bool:
        """End the thread and all handshakes. Returns whether the thread has ended."""
        self._stopping = True
        self.wake()
        self._peers.close()
        self._early.close()
        self._observer.close()
        if self._thread is not None:
            self._thread.join(wait_s)
        return self._thread is None or not self._thread.is_alive()

    def turn(self) -> float:
        """One turn; seconds that it may rest afterwards."""
        self._watchdog.begin("turn")
        try:
            return self._turn()
        finally:
            self._watchdog.end()

    def _run(self) -> None:
        while not self._stopping:
            try:
                rest_s = self.turn()
            except Exception:  # the thread must live: without it every request of this rank would hang
                logger.exception("session of rank %d", self._rank, extra=fields("internal_error", rank=self._rank))
                rest_s = REST_WITH_LOADS_S
            self._event.wait(rest_s)

    def _turn(self) -> float:
        now_s, book = self._clock(), self._own.book
        self._event.clear()
        self._execute_commands(now_s)
        self._own.receive(now_s)
        self._own.expire(now_s)
        self._results.free(book.take_finished())
        self._check_transport(now_s)
        self.board.poll()
        early_rest_s = self._early.step(now_s)
        self._advance_jobs(now_s)
        has_more = self._me is not None and self._observer.work(book, self._me.layout)
        self._peers.sweep(self._jobs.peers)
        self._remote_leases.update(self._me, now_s)
        self._results.note_peers(self._peers.num_met)
        next_renewal_s = self._renew(now_s)
        self._set_pace()
        if has_more:
            return 0.0
        if self.board.is_pending:
            return min(REST_WITH_EVENTS_S, next_renewal_s)
        if book.num_published:
            return min(REST_WITH_LEASES_S, next_renewal_s, early_rest_s)
        return min(min(REST_WITH_LOADS_S, early_rest_s) if self._jobs else REST_IDLE_S, next_renewal_s)

    def _execute_commands(self, now_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                try:
                    if not self._stopping or isinstance(command, Acquire | Publish):
                        self._execute(command, now_s)
                except Exception as error:  # the others must be executed
                    logger.exception("%s", command, extra=fields("internal_error"))
                    if isinstance(command, Load):
                        self._remote_leases.stop_renewing(command.request)
                        self._results.end(command.request, to_failure(error))

    def _execute(self, command: Command, now_s: float) -> None:
        match command:
            case Acquire():
                self._own.book.acquire(command.lease)
            case Publish():
                self._own.book.publish(command.request, command.ttl_s, now_s, command.tables)
                self._has_published = True
            case Revoke():
                self._own.book.revoke(command.lease.request)
            case Load():
                self._load(command, now_s)
            case Release():
                if self._me is not None and command.remote.name == self._me.name:
                    self._own.release("/".join(self._me.name), command.lease)
                else:
                    self._remote_leases.release(command)
            case Cancel():
                self._jobs.stop(
                    command.request, Failure("cancelled", ABORTED if command.is_aborted else FOR_OTHERS), now_s
                )
            case Renew():
                self._remote_leases.start_renewing(command, self._me)
                if command.checks_lease:
                    self._check_lease(command, now_s)
            case StopRenewing():
                self._remote_leases.stop_renewing(command.request)

    def _load(self, load: Load, now_s: float) -> None:
        me, observer = self._introduced(), self._observer.observe(load)
        if load.refusal is not None:  # the engine knows that its source cannot be met
            self._remote_leases.stop_renewing(load.request)
            observer.on_event("refused", load.refusal.text)
            self._results.end(load.request, load.refusal)
            self._record_failure(me, observer, load, None, load.refusal)
            return
        job = self._job(me, EarlyJob if load.transfer_id else Job, load, observer, now_s)
        self._remote_leases.begin(load)
        if isinstance(job, EarlyJob):
            job.may_read = lambda: not self._jobs.num_awaited
            job.on_new_lease = self._remote_leases.change
            self._early.add(job, me)
        self._jobs.add(job)

    def _check_lease(self, command: Renew, now_s: float) -> None:
        """Read the word of a lease that is renewed. It is no load, and has no result as one."""
        self._jobs.add(self._job(self._introduced(), LeaseCheck, command.without_load, LoadObserver(), now_s))

    def _introduced(self) -> LocalRank:
        if self._me is None:
            raise KvReshardError("a load was ordered before the endpoint knew its engine")
        return self._me

    def _job(self, me: LocalRank, kind: type[Job], load: Load, observer: LoadObserver, now_s: float) -> Job:
        return kind(
            load=load,
            handshake=self._peers.get(me, load.remote),
            since_s=now_s,
            dst=me.layout,
            options=self._options,
            on_event=self._jobs.note,
            take_scratch=self._scratch.take,
            observer=observer,
        )

    def _check_transport(self, now_s: float) -> None:
        """A call into the transport's library that does not return keeps everything pending: stop all loads."""
        stuck = self._transport.stuck()
        self._results.note_stuck("transport", stuck)
        if stuck is not None:
            self._jobs.stop_all(Failure("transfer", stuck.text), now_s)

    def _advance_jobs(self, now_s: float) -> None:
        ended, settled = self._jobs.advance(now_s)
        for job, outcome in ended:
            try:
                self._finish(job, outcome)
            except Exception:  # the others must end
                logger.exception(
                    "request %s", job.load.request, extra=fields("internal_error", request_id=job.load.request)
                )
        for job in settled:
            job.close()
            self._scratch.give(job.scratch_address)
            if not isinstance(job, LeaseCheck):
                self._results.settle(job.load.request)

    def _finish(self, job: Job, outcome: TransferStats | Failure) -> None:
        load, peer = job.load, job.peer
        if not job.is_given_up:
            self._scratch.give(job.scratch_address)
        if isinstance(job, LeaseCheck):
            if isinstance(outcome, Failure):
                self._results.meet({}, {load.request: outcome})
                self._doubt(peer, outcome)
            elif peer is not None:
                self._results.meet({load.request: peer.engine_metadata.key}, {})
            return
        # First, since the request must end whatever goes wrong below.
        self._results.end(load.request, outcome, job.observer.check)
        if isinstance(job, EarlyJob):
            self._early.end(job)
        me, is_good = self._introduced(), isinstance(outcome, TransferStats)
        kept_as = job.first_lease if is_good and not load.gives_back else None
        self._remote_leases.end(me, load, peer, is_good=is_good, kept_as=kept_as)
        if isinstance(outcome, Failure):
            self._record_failure(me, job.observer, job.known_load, peer, outcome)
            self._doubt(peer, outcome)
        job.observer.on_end(outcome)

    def _doubt(self, peer: Peer | None, failure: Failure) -> None:
        """A source could not be read: meet it anew. One that is late is gone or slow, and others may be reading from it: see which."""
        if peer is not None and failure.kind == "transfer":
            self._peers.retire(peer)
        elif peer is not None and failure.kind == "timeout":
            self._peers.check(self._introduced(), peer)

    @staticmethod
    def _record_failure(me: LocalRank, observer: LoadObserver, load: Load, peer: Peer | None, failure: Failure) -> None:
        engine_metadata = peer.engine_metadata if peer is not None else me.refused.get(load.remote)
        observer.on_failure(load, failure, me.engine_metadata, engine_metadata, is_routed=peer is not None)

    def _renew(self, now_s: float) -> float:
        """Renew the leases that are wanted; seconds until the next renewal."""
        if self._me is None or now_s > self._collected_s + self._options.paused_renewal_s:
            return REST_IDLE_S  # an engine that never goes on must not hold its sources' blocks for ever
        return self._remote_leases.renew(self._me, now_s)

    def _set_pace(self) -> None:
        """Have the transport poll faster while there are loads or leases, and after each lease that was published: its reader is coming."""
        is_attentive = bool(self._jobs.num_awaited or self._own.book.num_published or self.board.is_computing)
        if is_attentive != self._is_attentive or self._has_published:
            self._transport.set_attentive(is_attentive)
        self._is_attentive, self._has_published = is_attentive, False
