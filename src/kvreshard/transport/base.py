"""The interface of a transport, and a transfer as its poster sees it.

A transport owns the memory regions of one rank that others may touch, knows some peers, and copies bytes between
its own regions ("local") and those of a peer ("remote"). The road of one transfer:

1. `register` the local regions, hand `metadata()` to the peer over a channel of your own, `add_peer` with the bytes
   that came back. Only the side that posts needs the other's metadata.
2. `post` `Copies` (`plan.copies`) in one `Direction`. They are checked as a whole against the regions of both sides before any
   byte moves; then it returns a `Transfer` at once.
3. The `Transfer` settles exactly once, as done or failed. Settled means: no further byte of it will move. A failed
   transfer may have moved any part of its bytes.
4. After the last byte, and only then, the peer gets the notification that was posted with the transfer.

Refused, with a `TransportError`: an unknown peer, copies outside the registered regions of either side or across
the border of two, devices without a known kind, overlapping regions, oversized notifications, use after `close`.
Geometry is not known here: addresses and lengths only. Overlapping destination copies are the caller's business, and
the order in which copies or transfers complete is not defined.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvreshard.model.expect import expect, expect_whole
from kvreshard.plan.copies import Copies, CopyList, PagedCopies

# A notification is a word about a transfer, never the data: 64 KiB holds a set of 1,000 reporters with room to spare.
MAX_NOTIFICATION_BYTES = 64 * 1024

# Addresses are signed 64-bit numbers: no processor or device has memory above.
ADDRESS_SPACE_BYTES = 2**63


class TransportError(Exception):
    """A transport refused or could not finish something; the message names the fact, both sides and the remedy."""


class Direction(enum.Enum):
    """Which side the bytes come from, seen from the transport that posts."""

    READ = "read"
    """Pull: remote bytes to local memory."""
    WRITE = "write"
    """Push: local bytes to remote memory."""


def is_device(text: str) -> bool:
    """Whether this names a device: "cpu", or "cuda:" and a number."""
    kind, _, number = text.partition(":")
    return text == "cpu" or (kind == "cuda" and number.isascii() and number.isdigit())


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Memory that peers may touch: `size_bytes` bytes from `address` on `device` ("cpu" or "cuda:N").

    Raises:
        TransportError: if the size is not positive, the range leaves the address space, or the device has no
            known kind.
        UsageError: for values of other types.
    """

    address: int
    size_bytes: int
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not (type(self.address) is type(self.size_bytes) is int):
            expect_whole(self.address, "the address of a region")
            expect_whole(self.size_bytes, "the size of a region")
            for name in ("address", "size_bytes"):  # NumPy's may be of a few bits, and wrap around
                object.__setattr__(self, name, int(getattr(self, name)))
        expect(self.device, str, "the device of a region", "as in 'cpu' or 'cuda:0'")
        if self.size_bytes <= 0 or self.address < 0 or self.address + self.size_bytes > ADDRESS_SPACE_BYTES:
            raise TransportError(
                f"region of {self.size_bytes} bytes at {self.address:#x} does not lie in the address space of 63 bits; "
                "give a positive size and the address of its first byte"
            )
        if not is_device(self.device):
            raise TransportError(f"region at {self.address:#x} is on device {self.device!r}; known: 'cpu', 'cuda:N'")

    @property
    def end(self) -> int:
        """The address after the last byte."""
        return self.address + self.size_bytes

    def __str__(self) -> str:
        return f"[{self.address:#x}, {self.end:#x}) on {self.device}"


class TransferState(enum.Enum):
    """Where a transfer stands. It leaves PENDING once and for good."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Transfer:
    """Some posted copies, as its poster sees it. Safe to use from any thread.

    `peer`, `direction`, `num_bytes` and `num_descriptors` say what was posted. `seconds` is the time from post to
    settlement by the transport's clock, None while pending.
    """

    __slots__ = (
        "_callbacks", "_clock", "_error", "_event", "_lock", "_posted_s", "_settled_s", "_state",
        "direction", "num_bytes", "num_descriptors", "peer",
    )  # fmt: skip

    def __init__(self, peer: str, direction: Direction, copies: Copies, clock: Callable[[], float]) -> None:
        self.peer = peer
        self.direction = direction
        self.num_bytes = copies.num_bytes
        self.num_descriptors = copies.num_copies
        self._clock = clock
        self._posted_s = clock()
        self._settled_s: float | None = None
        self._state = TransferState.PENDING
        self._error: TransportError | None = None
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Transfer], None]] = []

    def __repr__(self) -> str:
        what = f"{self.direction.value} of {self.num_descriptors} copies, {self.num_bytes} bytes, peer {self.peer!r}"
        return f"<Transfer {self._state.value}: {what}>"

    @property
    def state(self) -> TransferState:
        """Pending, done or failed."""
        return self._state

    @property
    def error(self) -> TransportError | None:
        """Why it failed; None while pending and when done."""
        return self._error

    @property
    def seconds(self) -> float | None:
        """Seconds from post to settlement; None while pending."""
        return None if self._settled_s is None else self._settled_s - self._posted_s

    def wait(self, timeout_s: float) -> None:
        """Return when done.

        Raises:
            TransportError: the transfer failed; this is its `error`.
            TimeoutError: it is still pending after `timeout_s` seconds. Its bytes may still move later.
        """
        if not self._event.wait(timeout_s):
            raise TimeoutError(
                f"{self!r} has not settled within {timeout_s} s; its memory must not be reused until it does"
            )
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call `callback(transfer)` once settled: at once if it is, else on the thread that settles it.

        That thread is the transport's own: a callback must be short, must not block and must not raise.
        """
        with self._lock:
            if self._state is TransferState.PENDING:
                self._callbacks.append(callback)
                return
        callback(self)

    def settle(self, error: TransportError | None) -> None:
        """For transports only: leave PENDING. A second call changes nothing."""
        with self._lock:
            if self._state is not TransferState.PENDING:
                return
            self._settled_s = self._clock()
            self._error = error
            self._state = TransferState.DONE if error is None else TransferState.FAILED
            callbacks, self._callbacks = self._callbacks, []
        self._event.set()
        for callback in callbacks:
            callback(self)


@dataclass(frozen=True, slots=True)
class Notification:
    """A message from a peer. `peer` is the name it was added under here, or its transport's own name if it was not."""

    peer: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class StuckCall:
    """A call into a transport's library that does not come back: its name, and what that means in a sentence."""

    call: str
    text: str


@runtime_checkable
class Transport(Protocol):
    """What every transport offers. All methods may be called from any thread and raise `TransportError` as said."""

    @property
    def name(self) -> str:
        """This transport's own name, unique among those that live at the same time."""

    def register(self, regions: Iterable[MemoryRegion]) -> None:
        """Open regions to peers. Refused: one that overlaps a registered one. Peers see only what was registered
        when `metadata` was taken.
        """

    def deregister(self, regions: Iterable[MemoryRegion]) -> None:
        """Close regions. Refused: a region that is not registered. The caller has settled what used them."""

    def metadata(self) -> bytes:
        """All that a peer needs for `add_peer`: name and registered regions, as of now."""

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Make a peer known under a name of the caller's choice. Refused: a name or a peer that is known already,
        malformed metadata, another kind of transport.
        """

    def add_peers(self, peers: Mapping[str, bytes]) -> None:
        """Make some peers known, by name with their metadata: all, or none if one is refused."""

    def remove_peer(self, name: str) -> None:
        """Forget a peer at once. What has not been posted of its pending transfers is dropped; they fail when the rest
        has settled. Does not wait for that.
        """

    def post(self, peer: str, direction: Direction, copies: Copies, notify: bytes | None = None) -> Transfer:
        """Start copying; an empty list is done at once. The sources of a READ are remote, those of a WRITE local; the ranks that
        the copies name do not matter here. A `Page` is checked with all pages that it may have. `notify` reaches the peer after the
        last byte, once, and not at all if the transfer fails. Refused: unknown peer, copies out of bounds on either side (nothing
        moves).
        """

    def cancel(self, transfer: Transfer) -> None:
        """Post no more of a transfer of this transport. It fails when what was posted of it has settled, or is done if
        that was everything; nothing happens if it has settled.
        """

    def notify(self, peer: str, payload: bytes) -> None:
        """Send a message on its own. Delivery to a peer that has died is not reported."""

    def notifications(self) -> Sequence[Notification]:
        """The messages that arrived since the last call, each once."""

    def set_attentive(self, attentive: bool) -> None:
        """Say whether peers are expected to read, write or notify soon: an attentive transport answers faster and costs
        more processor time while idle. Each call with True says that one more is on its way, and is answered fastest.
        """

    def stuck(self) -> StuckCall | None:
        """The call into the transport's library that has not come back within its bound: until it does, nothing that is pending settles,
        and what waits for the library raises. None where there is none. Never waits.
        """

    def close(self) -> None:
        """Settle or fail what is pending, forget peers, deregister. A second call does nothing. All else raises."""


def check_post(direction: Direction, copies: Copies, notify: bytes | None) -> None:
    """Raises UsageError for values of other types: a direction that is none would write where its caller meant to read."""
    expect(direction, Direction, "the direction of a transfer", "Direction.READ or Direction.WRITE")
    expect(copies, (CopyList, PagedCopies), "the copies of a transfer", "what `kvreshard.bind` returns, one at a time")
    if notify is not None:
        check_payload(notify)


def check_payload(payload: bytes) -> bytes:
    """Return the payload. Raises UsageError unless it is bytes, TransportError if there are more than `MAX_NOTIFICATION_BYTES`."""
    expect(payload, bytes, "a notification", "bytes, as in b'done'")
    if len(payload) > MAX_NOTIFICATION_BYTES:
        raise TransportError(
            f"notification of {len(payload)} bytes; the limit is {MAX_NOTIFICATION_BYTES}: send a name of the data"
        )
    return payload


def checked_regions(regions: Iterable[MemoryRegion], use: str = "register") -> tuple[MemoryRegion, ...]:
    """Raises UsageError unless they are regions."""
    expect(regions, Iterable, f"regions to {use}", "[MemoryRegion(address, size_bytes), ...]")
    found = tuple(regions)
    for region in found:
        expect(region, MemoryRegion, "a region", "MemoryRegion(address, size_bytes)")
    return found


def checked_peers(peers: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Raises UsageError unless they are names with metadata."""
    expect(peers, Mapping, "peers to add", "name of a peer -> what `metadata()` of its transport returns")
    for name in peers:
        expect(name, str, "the name of a peer", "a name of your choice, as in 'prefill-0'")
    return peers


# Errors that all transports word alike.


def unknown_peer(own_name: str, peer: str, known: Iterable[str]) -> TransportError:
    """A peer that was never added, or was removed."""
    names = ", ".join(sorted(repr(name) for name in known)) or "none"
    return TransportError(
        f"peer {peer!r} is unknown to transport {own_name!r}; its peers are: {names}; call add_peer with the metadata"
    )


def cancelled(transfer: Transfer) -> TransportError:
    """The end of a transfer whose poster no longer wants it."""
    return TransportError(f"{transfer.direction.value} with peer {transfer.peer!r} was cancelled")


def closed_transport(own_name: str) -> TransportError:
    """Use after close."""
    return TransportError(f"transport {own_name!r} is closed; make a new one and exchange metadata again")


def closed_while_pending(own_name: str) -> TransportError:
    """The end of a transfer that close gave up."""
    return TransportError(f"transport {own_name!r} was closed while this transfer was pending; post it again elsewhere")


def torn_peer(peer_name: str) -> TransportError:
    """The end of a transfer with a peer that another's failure has disconnected."""
    return TransportError(
        f"peer {peer_name} was disconnected since a transfer with it failed; remove it and add it again"
    )


def failed(transfer: Transfer, peer_name: str, error: Exception) -> TransportError:
    """The end of a transfer of which a slice has failed, or its last word."""
    reason = str(error)
    if not isinstance(error, TransportError):
        reason = f"{type(error).__name__} {reason}".strip()
    return TransportError(
        f"{transfer.direction.value} of {transfer.num_bytes} bytes with peer {transfer.peer!r} ({peer_name}) failed: {reason}; if the "
        "peer is gone, remove it and add its successor"
    )


def check_new_peers(
    own_name: str, fresh: Mapping[str, str], known: Mapping[str, tuple[str, object]], aliases: Mapping[str, str]
) -> None:
    """Raise unless all of the fresh peers are new, by their own names and by ours. `fresh` maps the names here to the peers' own. Of those
    known, `known` maps the names here to (their own, ...), `aliases` their own to those here.
    """
    added: dict[str, str] = {}
    for alias, peer_name in fresh.items():
        if peer_name == own_name:
            raise TransportError(f"peer {alias!r} is transport {own_name!r} itself; copy local memory directly")
        ours = aliases.get(peer_name) or added.get(peer_name)
        if ours is not None:
            raise TransportError(
                f"peer {alias!r} ({peer_name}) is known already as {ours!r}; remove_peer it first to refresh it"
            )
        if alias in known:
            raise TransportError(
                f"peer name {alias!r} belongs to {known[alias][0]}, now offered {peer_name}; remove_peer the old one first"
            )
        added[peer_name] = alias
