"""How does one load get from its order to its end, while nobody waits for it?

MEETING its source, then PULLING its bytes, then over. A job that is stopped (cancelled, too late) posts no more and goes on
until everything that was posted has settled: only then are its pages given back. What has not settled within the bound is
given up: the job ends as failed with its pages quarantined, and stays known until its reads settle after all.

Whoever watches the load (`observer`) may look at what has landed before the load is over, and reject it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvreshard.model import BindError, EngineLayout, KvReshardError, LayoutMismatch
from kvreshard.session.commands import EndpointOptions, Failure, FailureKind, Load
from kvreshard.session.handshake_messages import HandshakeError
from kvreshard.session.observer import Landing, LoadObserver, RejectedLoad
from kvreshard.session.peer import Peer
from kvreshard.session.pull import LeaseProof, Moved, StaleLease, Steps, pull_steps
from kvreshard.session.seal import SealError, check_seal
from kvreshard.transport.base import Transfer, TransferState, TransportError


@dataclass(slots=True, eq=False)
class Job:
    """One load on its way. `scratch`: takes a place for so many words, or None while there is none.

    `is_given_up`: it is over, and its reads have not come to rest.
    """

    load: Load
    meeting: Future[Peer]
    ordered_s: float
    dst: EngineLayout
    options: EndpointOptions
    wake: Callable[[], None]
    scratch: Callable[[int], int | None]
    observer: LoadObserver
    peer: Peer | None = None
    outcome: Moved | Failure | None = None
    scratch_address: int | None = None
    is_given_up: bool = False
    _steps: Steps | None = None
    _waiting: Transfer | None = None
    _posted: list[Transfer] = field(default_factory=list)
    _stopped: Failure | None = None
    _stopped_s: float = 0.0
    _has_landed: bool = False

    @property
    def is_settled(self) -> bool:
        """Whether no byte of it can move any more."""
        return all(transfer.state is not TransferState.PENDING for transfer in self._posted)

    @property
    def is_stopped(self) -> bool:
        """Whether it shall not go on."""
        return self._stopped is not None

    @property
    def is_polling(self) -> bool:
        """Whether it waits for something that does not wake it: a place for its words, the staging buffer, an answer of its source."""
        return self.peer is not None and self._stopped is None and self._waiting is None

    @property
    def deadline_s(self) -> float:
        """When it must be looked at although nothing has happened."""
        if self._stopped is not None:
            return self._stopped_s + self.options.settle_timeout_s
        return self.ordered_s + self.options.load_timeout_s

    def stop(self, failure: Failure, now_s: float) -> None:
        """Go on only as long as something may still move."""
        if self.outcome is None and self._stopped is None:
            self._stopped, self._stopped_s = failure, now_s
            event = "cancelled" if failure.kind == "cancelled" else "failed"
            self.observer.noted(event, f"{failure.kind}: {failure.text}")
            if self.peer is not None:
                for transfer in self._posted:
                    self.peer.mover.transport.cancel(transfer)

    def advance(self, now_s: float) -> None:
        """Do what can be done without waiting; sets `outcome` when the job is over."""
        if self.outcome is not None:
            return
        if self._stopped is None and now_s >= self.ordered_s + self.options.load_timeout_s:
            where = "reading" if self.peer is not None else "meeting its source"
            where = "being compared with its source" if self._has_landed else where
            text = f"not loaded within {self.options.load_timeout_s:g} s; it was {where}: is the source alive and reachable?"
            self.stop(Failure("timeout", text), now_s)
        try:
            if self._stopped is not None:
                self._wind_up(self._stopped, now_s)
            elif self.peer is None:
                self._meet()
            if self.peer is not None and self._stopped is None and self.outcome is None:
                self._pull(self.peer)
        except Exception as error:  # noqa: BLE001  whatever it is, the request must end and its pages must be given back
            self.stop(to_failure(error), now_s)
            if self._stopped is not None and self.is_settled:
                self._wind_up(self._stopped, now_s)

    def close(self) -> None:
        """Give back what the steps hold, the staging buffer among it. Only once it is settled."""
        if self._steps is not None:
            self._steps.close()

    def _meet(self) -> None:
        if self.meeting.done():
            self.peer = self.meeting.result()
            self.observer.noted("met", f"reads from ranks {', '.join(map(str, self.peer.route.src_ranks)) or 'none'}")

    def _pull(self, peer: Peer) -> None:
        if self._steps is None:
            self._check_seal(peer)
            self.scratch_address = self.scratch(len(peer.route.src_ranks))
            if self.scratch_address is None:
                return
            self._steps = self._load_steps(peer, peer.lease_proof(self.load.lease, self.scratch_address))
        while self._waiting is None or self._waiting.state is not TransferState.PENDING:
            try:
                self._waiting = next(self._steps)
            except StopIteration as done:
                self.outcome = done.value
                return
            if self._waiting is None:
                return

    def _check_seal(self, peer: Peer) -> None:
        """Before anything is posted: the lease and the tables are those that the source sealed. Raises SealError."""
        remote, lease = self.load.remote, self.load.lease
        source = remote.engine, remote.instance_id
        named = lease.request, lease.slot, lease.word
        check_seal(peer.engine_metadata.key, source, named, self.load.transfer.src_tables, self.load.seal)

    def _load_steps(self, peer: Peer, proof: LeaseProof) -> Steps:
        tell = self.observer.noted
        moved = yield from pull_steps(peer.mover, peer.route, self.load.transfer, self.dst, proof, self._note, tell)
        tell("read", f"{moved.num_bytes} bytes, the lease held on every rank that was read")
        self._has_landed = True
        yield from self.observer.landed(Landing(peer, self.dst, self._track, self.wake))
        return moved

    def _track(self, transfer: Transfer) -> None:
        """A transfer of the observer's: one of many, of which none is remembered that is over."""
        self._posted = [one for one in self._posted if one.state is TransferState.PENDING]
        if transfer.state is TransferState.PENDING:
            self._posted.append(transfer)
            transfer.add_done_callback(lambda _: self.wake())

    def _note(self, transfer: Transfer) -> None:
        self._posted.append(transfer)
        what = f"{transfer.num_descriptors} pieces, {transfer.num_bytes} bytes, {transfer.peer}"
        self.observer.noted("posted", what)

        def settled(done: Transfer) -> None:
            if done.error is not None:
                self.observer.noted("transfer failed", f"{what}: {done.error}")
            self.wake()

        transfer.add_done_callback(settled)

    def _wind_up(self, failure: Failure, now_s: float) -> None:
        if self.is_settled:
            self.close()
            self.outcome = failure
        elif now_s >= self._stopped_s + self.options.settle_timeout_s:
            text = f"{failure.text}; reads did not settle within {self.options.settle_timeout_s:g} s: pages are quarantined"
            self.outcome = Failure(failure.kind, text, is_quarantined=True)
            self.observer.noted("quarantined", text)


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
