"""How does one load get from its order to its end, while nobody waits for it?

MEETING its source, then PULLING its bytes, then over. A job that is stopped (cancelled, too late) posts no more and goes on
until everything that was posted has settled: only then are its pages given back. What has not settled within the bound is
given up: the job ends as failed with its pages quarantined, and stays known until its reads settle after all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvreshard.model import BindError, EngineLayout, KvReshardError, LayoutMismatch
from kvreshard.session.handshake import HandshakeError
from kvreshard.session.orders import EndpointOptions, Failure, FailureKind, Load
from kvreshard.session.peers import Peer
from kvreshard.session.pull import Moved, StaleLease, Steps, pull_steps
from kvreshard.transport.base import Transfer, TransferState, TransportError


@dataclass(slots=True, eq=False)
class Job:
    """One load on its way. `scratch`: takes a place for lease words, or None while there is none."""

    load: Load
    meeting: Future[Peer]
    ordered_s: float
    dst: EngineLayout
    options: EndpointOptions
    wake: Callable[[], None]
    scratch: Callable[[int], int | None]
    peer: Peer | None = None
    outcome: Moved | Failure | None = None
    scratch_address: int | None = None
    _steps: Steps | None = None
    _waiting: Transfer | None = None
    _posted: list[Transfer] = field(default_factory=list)
    _stopped: Failure | None = None
    _stopped_s: float = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether no byte of it can move any more."""
        return all(transfer.state is not TransferState.PENDING for transfer in self._posted)

    def stop(self, failure: Failure, now_s: float) -> None:
        """Go on only as long as something may still move."""
        if self.outcome is None and self._stopped is None:
            self._stopped, self._stopped_s = failure, now_s
            if self.peer is not None:
                for transfer in self._posted:
                    self.peer.mover.transport.cancel(transfer)

    def advance(self, now_s: float) -> None:
        """Do what can be done without waiting; sets `outcome` when the job is over."""
        if self.outcome is not None:
            return
        if self._stopped is None and now_s >= self.ordered_s + self.options.load_timeout_s:
            where = "meeting its source" if self.peer is None else "reading"
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

    def _pull(self, peer: Peer) -> None:
        if self._steps is None:
            words = len(peer.route.src_ranks)
            self.scratch_address = self.scratch(words)
            if self.scratch_address is None:
                return
            proof = peer.lease_proof(self.load.lease, self.scratch_address)
            self._steps = pull_steps(peer.mover, peer.route, self.load.transfer, self.dst, proof, self._note)
        while self._waiting is None or self._waiting.state is not TransferState.PENDING:
            try:
                self._waiting = next(self._steps)
            except StopIteration as done:
                self.outcome = done.value
                return
            if self._waiting is None:
                return

    def _note(self, transfer: Transfer) -> None:
        self._posted.append(transfer)
        transfer.add_done_callback(lambda _: self.wake())

    def _wind_up(self, failure: Failure, now_s: float) -> None:
        if self.is_settled:
            self.close()
            self.outcome = failure
        elif now_s >= self._stopped_s + self.options.settle_timeout_s:
            text = f"{failure.text}; reads did not settle within {self.options.settle_timeout_s:g} s: pages are quarantined"
            self.outcome = Failure(failure.kind, text, is_quarantined=True)


_KINDS: tuple[tuple[type[BaseException], FailureKind], ...] = (
    (HandshakeError, "handshake"),
    (LayoutMismatch, "mismatch"),
    (StaleLease, "stale lease"),
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
