"""The loads of one rank: each goes through its states without anybody waiting for it.

A `Job` carries out one load: it waits for the handshake, reads, lets the observer check what has landed, and ends as received or failed.
One that is stopped (cancelled, too late) posts no more and ends when everything that was posted has settled, so that its pages may be
reused. What has not settled within `settle_timeout_s` is given up: the job fails with its pages quarantined, and is kept until its reads
have settled.

`Jobs` finds the loads that a turn must advance: those of which something has happened (`Job.wake`), those whose deadline has passed, and those
that wait for something that does not wake them (`Job.is_polling`).
"""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kvreshard.model import BindError, EngineLayout, KvReshardError, LayoutMismatch
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import EndpointOptions, Failure, FailureKind, Load
from kvreshard.session.handshake_messages import HandshakeError
from kvreshard.session.lease import Lease
from kvreshard.session.observer import Landing, LoadObserver, RejectedLoad
from kvreshard.session.peer import Peer
from kvreshard.session.pull import LeaseProof, StaleLease, Steps, TransferStats, check_words, pull_steps
from kvreshard.session.seal import SealError, check_seal
from kvreshard.transport.base import Transfer, TransferState, TransportError

logger = get_logger(__name__)

LoadState = Literal[
    "meeting its source", "waiting for its prefill to go on", "reading", "being compared with its source"
]


@dataclass(slots=True, eq=False)
class Job:
    """One load. `on_event` is called, on any thread, when the job must be advanced.

    `take_scratch`: the address of so many words, None while there are none. `scratch_address`: what it has returned. `since_s`: when it was
    ordered, or its prefill has last gone on. `first_lease`: that of its command, which its release will name. `is_awaited`: its request has waited
    for it from the first moment on; the others come second.
    """

    is_awaited: ClassVar[bool] = True
    overdue: ClassVar[str] = "not loaded within"

    load: Load
    handshake: Future[Peer]
    since_s: float
    dst: EngineLayout
    options: EndpointOptions
    on_event: Callable[[Job], None]
    take_scratch: Callable[[int], int | None]
    observer: LoadObserver
    state: LoadState = "meeting its source"
    peer: Peer | None = None
    outcome: TransferStats | Failure | None = None
    scratch_address: int | None = None
    first_lease: Lease = field(init=False)
    _steps: Steps = field(init=False)
    _waiting: Transfer | float | None = None
    _posted: list[Transfer] = field(default_factory=list)
    _stopped: Failure | None = None
    _stopped_s: float = 0.0

    def __post_init__(self) -> None:
        self.first_lease = self.load.lease
        self._steps = self._load_steps()

    @property
    def known_load(self) -> Load:
        """The load with all that is known of it by now."""
        return self.load

    @property
    def is_settled(self) -> bool:
        """Whether no byte of it can move any more."""
        return all(transfer.state is not TransferState.PENDING for transfer in self._posted)

    @property
    def is_stopped(self) -> bool:
        return self._stopped is not None

    @property
    def is_given_up(self) -> bool:
        """Whether it has failed with its pages quarantined."""
        return isinstance(self.outcome, Failure) and self.outcome.is_quarantined

    @property
    def is_polling(self) -> bool:
        """Whether it waits for something that does not wake it: scratch words, the staging buffer, the answer to a digest request."""
        return self.peer is not None and self._stopped is None and self._waiting is None

    @property
    def deadline_s(self) -> float:
        """When it must be advanced although nothing has happened."""
        if self._stopped is not None:
            return self._stopped_s + self.options.settle_timeout_s
        return self.since_s + self.options.load_timeout_s

    def wake(self) -> None:
        """Have it advanced soon."""
        self.on_event(self)

    def stop(self, failure: Failure, now_s: float) -> None:
        """Post no more, and fail as soon as nothing moves."""
        if self.outcome is None and self._stopped is None:
            self._stopped, self._stopped_s = failure, now_s
            event = "cancelled" if failure.kind == "cancelled" else "failed"
            self._note(event, f"{failure.kind}: {failure.text}")
            if self.peer is not None:
                for transfer in self._posted:
                    with contextlib.suppress(TransportError):  # closed: they have settled, or do so by themselves
                        self.peer.mover.transport.cancel(transfer)

    def advance(self, now_s: float) -> None:
        """Do what can be done without waiting. Sets `outcome` at the end."""
        if self.outcome is not None:
            return
        if self._stopped is None and now_s >= self.deadline_s:
            text = f"{self.overdue} {self.options.load_timeout_s:g} s; it was {self.state}: is the source alive and reachable?"
            self.stop(Failure("timeout", text), now_s)
        try:
            if self._stopped is not None:
                self._wind_up(self._stopped, now_s)
            elif self.handshake.done():
                self._resume()
        except Exception as error:  # noqa: BLE001  whatever it is, the request must end and its pages must be free again
            self.stop(to_failure(error), now_s)
            if self._stopped is not None and self.is_settled:
                self._wind_up(self._stopped, now_s)

    def close(self) -> None:
        """Release what the steps hold, such as the staging buffer. Only once it is settled."""
        self._steps.close()

    def _resume(self) -> None:
        while not isinstance(self._waiting, Transfer) or self._waiting.state is not TransferState.PENDING:
            try:
                self._waiting = next(self._steps)
            except StopIteration as done:
                self.outcome = done.value
                return
            if not isinstance(self._waiting, Transfer):
                return

    def _load_steps(self) -> Steps:
        """Everything after the handshake. Yields a transfer that must settle first, None to be resumed in the next turn, or infinity to be
        resumed when something happens.
        """
        self.peer = peer = self.handshake.result()
        self.state = "reading"
        moved = yield from self._read(peer)
        self.state = "being compared with its source"
        yield from self.observer.on_landing(Landing(peer, self.dst, self.load, self._track, self.wake))
        return moved

    def _read(self, peer: Peer) -> Steps:
        """Read everything, and see that the lease held."""
        note = self._note
        note("met", f"reads from ranks {', '.join(map(str, peer.route.src_ranks)) or 'none'}")
        self._check_seal(peer)
        proof = yield from self._find_proof(peer)
        moved = yield from pull_steps(
            peer.mover, peer.route, self.load.transfer, self.dst, proof, self._note_posted, note
        )
        note("read", f"{moved.num_bytes} bytes, the lease held on every rank that was read")
        return moved

    def _find_proof(self, peer: Peer) -> Generator[Transfer | float | None, None, LeaseProof]:
        """Where the lease words are, and room to read them."""
        while self.scratch_address is None:
            self.scratch_address = self.take_scratch(len(peer.route.src_ranks))
            if self.scratch_address is None:
                yield None
        return peer.lease_proof(self.load.lease, self.scratch_address)

    def _check_seal(self, peer: Peer) -> None:
        """Before anything is posted: the lease and the tables are those that the source sealed. Raises SealError."""
        load = self.load
        check_seal(peer.engine_metadata.key, load.remote.name, load.lease, load.transfer.src_tables, load.seal)

    def _track(self, transfer: Transfer) -> None:
        """A transfer that must settle before the load ends. There may be many: those that have settled are forgotten."""
        self._posted = [one for one in self._posted if one.state is TransferState.PENDING]
        if transfer.state is TransferState.PENDING:
            self._posted.append(transfer)
            transfer.add_done_callback(lambda _: self.wake())

    def _note_posted(self, transfer: Transfer) -> None:
        what = f"{transfer.num_descriptors} pieces, {transfer.num_bytes} bytes, {transfer.peer}"
        self._note("posted", what)

        def note_error(done: Transfer) -> None:
            if done.error is not None:
                self._note("transfer failed", f"{what}: {done.error}")

        transfer.add_done_callback(note_error)
        self._track(transfer)

    def _note(self, event: str, text: str) -> None:
        """Tell the observer. Whatever it raises must not cost the load, nor let it end before its reads."""
        try:
            self.observer.on_event(event, text)
        except Exception:
            name = self.load.request
            logger.exception("request %s", name, extra=fields("internal_error", request_id=name))

    def _wind_up(self, failure: Failure, now_s: float) -> None:
        if self.is_settled:
            self.close()
            self.outcome = failure
        elif now_s >= self.deadline_s:
            text = f"{failure.text}; reads did not settle within {self.options.settle_timeout_s:g} s: pages are quarantined"
            self.outcome = Failure(failure.kind, text, is_quarantined=True)
            self._note("quarantined", text)


class LeaseCheck(Job):
    """Reads the lease words of a request and nothing else. Fails if one could not be read, or is another."""

    __slots__ = ()
    is_awaited = False

    def _read(self, peer: Peer) -> Steps:
        proof = yield from self._find_proof(peer)
        error = yield from check_words(peer.mover, proof, peer.route.src_ranks, self._note_posted)
        if error is not None:
            raise error
        return TransferStats()


class Jobs:
    """The loads that have not ended, and those that were given up and have not settled. `on_event`: called, on any thread, when a job must
    be advanced. The rest is for the session's thread.
    """

    def __init__(self, on_event: Callable[[], None]) -> None:
        self._on_event = on_event
        # Loads under way that their requests wait for.
        self.num_awaited = 0
        self._under_way: dict[Job, None] = {}
        self._given_up: dict[Job, None] = {}
        # A request may be loaded again before its former load has ended.
        self._of_request: dict[str, dict[Job, None]] = {}
        self._deadlines_s: dict[Job, float] = {}
        self._polled: dict[Job, None] = {}
        self._happened: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._under_way)

    def peers(self) -> set[Peer]:
        """The peers that loads use."""
        return {job.peer for job in (*self._under_way, *self._given_up) if job.peer is not None}

    def note(self, job: Job) -> None:
        """Something has happened to a job. On any thread."""
        self._happened.put(job)
        self._on_event()

    def add(self, job: Job) -> None:
        """Begin a load."""
        self._under_way[job] = None
        self.num_awaited += job.is_awaited
        self._of_request.setdefault(job.load.request, {})[job] = None
        self._deadlines_s[job] = job.deadline_s
        self._happened.put(job)
        job.handshake.add_done_callback(lambda _: self.note(job))

    def stop(self, request: str, failure: Failure, now_s: float) -> None:
        """Stop the loads of a request."""
        for job in self._of_request.get(request, ()):
            self._stop(job, failure, now_s)

    def stop_all(self, failure: Failure, now_s: float) -> None:
        """Stop all loads."""
        for job in self._under_way:
            if not job.is_stopped:
                self._stop(job, failure, now_s)

    def advance(self, now_s: float) -> tuple[list[tuple[Job, TransferStats | Failure]], list[Job]]:
        """Advance the loads that are due: (those that have ended and how, those given up before that have settled)."""
        ended, settled = list[tuple[Job, TransferStats | Failure]](), list[Job]()
        for job in self._take_due(now_s):
            if job in self._under_way:
                job.advance(now_s)
                self._deadlines_s[job] = job.deadline_s
                if job.outcome is not None:
                    self._end(job)
                    ended.append((job, job.outcome))
                elif job.is_polling:
                    self._polled[job] = None
            elif job in self._given_up and job.is_settled:
                del self._given_up[job]
                settled.append(job)
        return ended, settled

    def _stop(self, job: Job, failure: Failure, now_s: float) -> None:
        job.stop(failure, now_s)
        self._deadlines_s[job] = job.deadline_s
        self._happened.put(job)

    def _take_due(self, now_s: float) -> dict[Job, None]:
        due, self._polled = self._polled, {}
        with contextlib.suppress(queue.Empty):
            while True:
                due[self._happened.get_nowait()] = None
        if min(self._deadlines_s.values(), default=math.inf) <= now_s:
            due |= {job: None for job, deadline_s in self._deadlines_s.items() if deadline_s <= now_s}
        return due

    def _end(self, job: Job) -> None:
        del self._under_way[job], self._deadlines_s[job]
        self.num_awaited -= job.is_awaited
        of_request = self._of_request[job.load.request]
        del of_request[job]
        if not of_request:
            del self._of_request[job.load.request]
        if job.is_given_up:
            self._given_up[job] = None


_KINDS: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (HandshakeError, "handshake"),
    (LayoutMismatch, "mismatch"),
    (SealError, "seal"),
    (StaleLease, "stale lease"),
    (RejectedLoad, "digest"),
    (BindError, "request"),
    (TransportError, "transfer"),
    (KvReshardError, "mismatch"),
)


def to_failure(error: BaseException) -> Failure:
    """What an exception means for a request."""
    for kind, name in _KINDS:
        if isinstance(error, kind):
            return Failure(name, str(error))
    return Failure("fault", f"{type(error).__name__}: {error}")
