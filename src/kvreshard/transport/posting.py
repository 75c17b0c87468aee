"""What the owner thread posts next: transfers cut into slices, a window per peer, and turns between peers.

1. A `SlicedTransfer` is a transfer on its way, slice by slice.
2. Every peer has a window: at most so many slices, of at most so many bytes together, posted and not yet settled. So no reader floods a
   source, and a source that has stopped holds up no other. Cost counts for bytes: it is never less (`slices.DESCRIPTOR_COST_BYTES`).
3. A peer has its turn while its window is open and something of a transfer with it is left to post (`Posting`). The peers take turns, and
   so do the transfers with one peer. A peer whose window is full comes back when a slice of it has settled. No choice costs more where
   more transfers wait.
4. `Pace` says how often the thread polls and how long a post may take.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from kvreshard.model.logs import fields, get_logger
from kvreshard.plan.copies import MAX_COPY_BYTES
from kvreshard.transport.base import Transfer, TransportError
from kvreshard.transport.slices import DESCRIPTOR_COST_BYTES, Cursor

logger = get_logger(__name__)

# No slice of copies costs more than its share, or than the largest copy if that is more.
_LARGEST_PIECE = MAX_COPY_BYTES + DESCRIPTOR_COST_BYTES


class Windows:
    """The windows of all peers. Not thread-safe."""

    __slots__ = ("_bytes", "_max_bytes", "_max_slices", "_slices", "num_in_flight", "share_bytes")

    def __init__(self, max_slices: int, max_bytes: int) -> None:
        self._max_slices, self._max_bytes = max_slices, max_bytes
        self.share_bytes = max(1, max_bytes // max_slices)
        self._slices: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self.num_in_flight = 0  # slices, of all peers

    def is_open(self, peer: str) -> bool:
        """Whether a slice of at most `share_bytes`, or of one copy, may be posted to a peer."""
        num_slices = self._slices.get(peer, 0)
        if not num_slices:
            return True
        fits = self._bytes[peer] + max(self.share_bytes, _LARGEST_PIECE) <= self._max_bytes
        return fits and num_slices < self._max_slices

    def enter(self, peer: str, cost_bytes: int) -> None:
        """A slice was posted."""
        self.num_in_flight += 1
        self._slices[peer] = self._slices.get(peer, 0) + 1
        self._bytes[peer] = self._bytes.get(peer, 0) + cost_bytes

    def leave(self, peer: str, cost_bytes: int) -> None:
        """A slice has settled, or was given up."""
        self.num_in_flight -= 1
        self._slices[peer] -= 1
        self._bytes[peer] -= cost_bytes
        if not self._slices[peer]:
            del self._slices[peer], self._bytes[peer]


@dataclass(slots=True, eq=False)
class SlicedTransfer:
    """A transfer on its way through the owner, slice by slice. `peer` is the agent's own name, `handles` the slices in flight and their cost.

    `is_torn`: a slice of it failed, of which some copies may still move.
    """

    transfer: Transfer
    peer: str
    cursor: Cursor
    notify: bytes | None
    handles: list[tuple[object, int]] = field(default_factory=list)
    error: TransportError | None = None
    is_torn: bool = False

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of it is left to post and nothing is in flight."""
        return self.cursor.exhausted and not self.handles

    def fail(self, error: TransportError) -> None:
        """Post no more; the first error is the one that is told."""
        self.cursor.drop()
        self.error = self.error or error

    def settle(self) -> None:
        """Settle the transfer. A caller's callback that raises must not end the owner."""
        try:
            self.transfer.settle(self.error)
        except Exception:
            logger.exception("a transfer's callback raised", extra=fields("internal_error"))


class Posting:
    """What is left to post, in turns. Not thread-safe."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._of_peer: dict[str, deque[SlicedTransfer]] = {}
        self._turns: OrderedDict[str, None] = OrderedDict()

    def add(self, sliced: SlicedTransfer) -> None:
        """A transfer is to be posted."""
        self._of_peer.setdefault(sliced.peer, deque()).append(sliced)
        self.reopen(sliced.peer)

    def reopen(self, peer: str) -> None:
        """A peer's window may have become open."""
        if peer in self._of_peer and self._windows.is_open(peer):
            self._turns.setdefault(peer)

    def next(self) -> SlicedTransfer | None:
        """The transfer whose turn it is; it stays, behind the others. None: nothing may be posted now."""
        while self._turns:
            peer, _ = self._turns.popitem(last=False)
            waiting = self._of_peer[peer]
            while waiting and waiting[0].cursor.exhausted:
                waiting.popleft()
            if not waiting:
                del self._of_peer[peer]
            elif self._windows.is_open(peer):
                waiting.rotate(-1)
                self._turns[peer] = None
                return waiting[-1]
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How the owner spends its time.

    Attributes:
        post_s: aimed duration of one post.
        max_in_flight: slices posted to one peer and not settled. Settling waits for the peer's poll, so one slice in
            flight would idle for the rest of the peer's interval.
        max_in_flight_bytes: what they may have together: each a quarter, which takes some 20 ms on one host. A link of 50 GB/s
            moves 25 MB between two polls.
        spin_s: after the last event, poll without rest for so long while slices are in flight.
        fast_s: rest while slices are in flight, or something happened within `linger_s`.
        attentive_s: rest of an attentive transport (2 ms: 1.0 to 2.4 % of a core; 0.5 ms took 5.6 %).
        slow_s: rest otherwise (10 ms: 0.6 to 1.2 % of a core, 2.2 % on a busy machine; 20 ms half of that). A peer that reads meanwhile waits
            for this long at most.
        linger_s: how long an event keeps the pace fast.
        close_s: how long `stop` waits for slices in flight. What is in flight then takes milliseconds, or its peer does not poll.
        call_s: after how long a call into the library counts as stuck (`watchdog`).
    """

    post_s: float = 0.020
    max_in_flight: int = 4
    max_in_flight_bytes: int = 512 << 20
    spin_s: float = 0.0005
    fast_s: float = 0.0005
    attentive_s: float = 0.002
    slow_s: float = 0.020
    linger_s: float = 0.050
    close_s: float = 0.2
    call_s: float = 10.0
