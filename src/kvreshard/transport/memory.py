"""A transport within one process, with faults on request.

1. A `Fabric` is the network: transports made with the same fabric can reach each other. There is no other state.
2. `MemoryTransport.post` checks all pieces against both sides' regions, asks the fault plan what shall happen to this
   post, and puts the transfer on the fabric. Without a fault it is copied and settled before `post` returns.
3. `Fabric.step` is the clock of faults: a transfer delayed by n steps moves its bytes in the n-th step, not before, so
   that a caller who reuses memory too early is caught. Nothing here sleeps or depends on real time.

Refused, beside what every transport refuses: device memory, since only host memory can be copied with memmove.
Addresses are real: a piece inside a registered region that has been unmapped crashes the process, as it should.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvreshard.plan.copies import Copies, CopyList, PagedCopies
from kvreshard.transport.base import (
    Direction,
    MemoryRegion,
    Notification,
    StuckCall,
    Transfer,
    TransportError,
    check_payload,
)
from kvreshard.transport.refusals import check_new_peers, closed_transport, closed_while_pending, unknown_peer
from kvreshard.transport.regions import RegionTable, decode_metadata, encode_metadata
from kvreshard.transport.slices import check_pages, make_rows


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to one post. The default is what a good transport does.

    Attributes:
        delay_steps: bytes move and the transfer settles in that many calls of `Fabric.step`; 0 is within `post`.
        drop: no byte moves and the transfer stays pending until its transport closes.
        fail_after_pieces: only so many pieces move, then the transfer fails.
        corrupt_byte: this byte of the transfer, counted over its pieces in order, arrives inverted.
    """

    delay_steps: int = 0
    drop: bool = False
    fail_after_pieces: int | None = None
    corrupt_byte: int | None = None


FaultPlan = Callable[[int, Transfer], Fault]
"""The fault of a transport's n-th post, n from 0."""

DeliveryPlan = Callable[[int, str, bytes], int]
"""How often a transport's n-th notification arrives, given n from 0, peer and payload: 0 loses it, 2 repeats it."""


def no_fault(_index: int, _transfer: Transfer) -> Fault:
    """The fault plan of a good transport."""
    return Fault()


def deliver_once(_index: int, _peer: str, _payload: bytes) -> int:
    """The delivery plan of a good transport."""
    return 1


@dataclass(slots=True, eq=False)
class _Posted:
    """A transfer that has not settled, on the fabric. `due_step` None: never."""

    owner: MemoryTransport
    target: str
    transfer: Transfer
    copies: CopyList
    fault: Fault
    notify: bytes | None
    due_step: int | None
    removed: bool = False


class Fabric:
    """The network of one test: makes transports reach each other and steps the delayed transfers.

    Args:
        shuffle_seed: settle the transfers of one step in a shuffled order, the same for the same seed.
    """

    def __init__(self, shuffle_seed: int | None = None) -> None:
        self.lock = threading.RLock()
        self.transports: dict[str, MemoryTransport] = {}
        self.posted: list[_Posted] = []
        self._now_step = 0
        self._names = itertools.count()
        self._random = None if shuffle_seed is None else random.Random(shuffle_seed)

    def step(self, count: int = 1) -> int:
        """Let `count` steps pass; returns how many transfers settled."""
        settled = 0
        for _ in range(count):
            with self.lock:
                self._now_step += 1
                due = [entry for entry in self.posted if entry.due_step == self._now_step]
                if self._random is not None:
                    self._random.shuffle(due)
                self.posted = [entry for entry in self.posted if entry not in due]
            for entry in due:
                finish(entry)
            settled += len(due)
        return settled

    @property
    def num_pending(self) -> int:
        """Transfers that have not settled, the dropped ones included."""
        return len(self.posted)

    def join(self, prefix: str, transport: MemoryTransport) -> str:
        """For transports: enter under a unique name."""
        with self.lock:
            name = f"{prefix}-{next(self._names)}"
            self.transports[name] = transport
            return name

    def schedule(self, entry: _Posted) -> None:
        """For transports: put a posted transfer on the fabric, or finish it now when nothing delays it."""
        with self.lock:
            if entry.fault.drop or entry.fault.delay_steps > 0:
                entry.due_step = None if entry.fault.drop else self._now_step + entry.fault.delay_steps
                self.posted.append(entry)
                return
        finish(entry)


def finish(entry: _Posted) -> None:
    """Move the bytes of a posted transfer as its fault says, notify, settle."""
    transfer, fault = entry.transfer, entry.fault
    error: TransportError | None = None
    with entry.owner.fabric.lock:
        target = entry.owner.fabric.transports.get(entry.target)
        if target is None:
            error = TransportError(
                f"peer {transfer.peer!r} ({entry.target}) has closed; remove it and add its successor"
            )
        else:
            try:
                # Regions may have been closed since the post: memory behind them may be gone.
                copies = entry.copies
                is_read = transfer.direction is Direction.READ
                remote = copies.src_address if is_read else copies.dst_address
                target.table.check(f"remote of {transfer.peer!r}", remote, copies.length)
                _move(copies, fault)
            except TransportError as refusal:
                error = refusal
        if error is None and fault.fail_after_pieces is not None:
            error = TransportError(
                f"injected: {transfer.direction.value} with {transfer.peer!r} failed after "
                f"{fault.fail_after_pieces} of {transfer.num_descriptors} pieces"
            )
        if error is None and entry.removed:
            error = TransportError(f"peer {transfer.peer!r} was removed while its transfer was pending")
        if error is None and entry.notify is not None:
            entry.owner.deliver(entry.target, transfer.peer, entry.notify)
    transfer.settle(error)


def _move(copies: CopyList, fault: Fault) -> None:
    """Copy pieces in order; stops and inverts as the fault says."""
    count = copies.num_copies if fault.fail_after_pieces is None else min(fault.fail_after_pieces, copies.num_copies)
    src, dst, length = copies.src_address[:count], copies.dst_address[:count], copies.length[:count]
    for to_address, source_address, num_bytes in zip(dst.tolist(), src.tolist(), length.tolist(), strict=True):
        ctypes.memmove(to_address, source_address, num_bytes)
    if fault.corrupt_byte is not None:
        ends = np.cumsum(length)
        row = int(np.searchsorted(ends, fault.corrupt_byte, side="right"))
        if row < count:
            offset = fault.corrupt_byte - int(ends[row] - length[row])
            byte = ctypes.c_ubyte.from_address(int(dst[row]) + offset)
            byte.value ^= 0xFF


class MemoryTransport:
    """A `Transport` within one process.

    Args:
        fabric: the network; transports of different fabrics do not know each other.
        name: the start of this transport's own name.
        faults: asked once per post.
        deliveries: asked once per notification, posted with a transfer or alone.
        clock: seconds, for `Transfer.seconds`.
    """

    def __init__(
        self,
        fabric: Fabric,
        name: str = "memory",
        *,
        faults: FaultPlan = no_fault,
        deliveries: DeliveryPlan = deliver_once,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fabric = fabric
        self.table = RegionTable()
        self._faults = faults
        self._deliveries = deliveries
        self._clock = clock
        self._peers: dict[str, tuple[str, RegionTable]] = {}
        self._inbox: list[Notification] = []
        self._num_posts = 0
        self._num_notifications = 0
        self._closed = False
        self._name = fabric.join(name, self)

    @property
    def name(self) -> str:
        """This transport's own name on the fabric."""
        return self._name

    def register(self, regions: Iterable[MemoryRegion]) -> None:
        """See `Transport.register`. Refuses devices other than "cpu"."""
        regions = tuple(regions)
        for region in regions:
            if region.device != "cpu":
                raise TransportError(f"region {region}: the memory transport copies host memory only; use 'nixl'")
        with self._open() as table:
            self.table = table.plus(regions)

    def deregister(self, regions: Iterable[MemoryRegion]) -> None:
        """See `Transport.deregister`."""
        with self._open() as table:
            self.table = table.minus(regions)

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        with self._open() as table:
            return encode_metadata("memory", self._name, table)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See `Transport.add_peer`."""
        self.add_peers({name: metadata})

    def add_peers(self, peers: Mapping[str, bytes]) -> None:
        """See `Transport.add_peers`."""
        fresh = {name: decode_metadata("memory", metadata) for name, metadata in peers.items()}
        with self._open():
            aliases = {own_name: name for name, (own_name, _) in self._peers.items()}
            check_new_peers(self._name, {name: peer.name for name, peer in fresh.items()}, self._peers, aliases)
            for name, peer in fresh.items():
                if peer.name not in self.fabric.transports:
                    raise TransportError(f"peer {name!r} ({peer.name}) is not on this fabric; use one for both")
            self._peers |= {name: (peer.name, peer.table()) for name, peer in fresh.items()}

    def remove_peer(self, name: str) -> None:
        """See `Transport.remove_peer`. The bytes of a delayed transfer still move in its step: they were in flight."""
        with self._open():
            self._peer(name)
            del self._peers[name]
            for entry in self.fabric.posted:
                if entry.owner is self and entry.transfer.peer == name:
                    entry.removed = True

    def post(self, peer: str, direction: Direction, copies: Copies, notify: bytes | None = None) -> Transfer:
        """See `Transport.post`."""
        with self._open() as table:
            target, remote_table = self._peer(peer)
            if notify is not None:
                check_payload(notify)
            if isinstance(copies, PagedCopies):
                check_pages(copies)
                make_rows(copies.page, direction, table, remote_table, f"remote of {peer!r}")
            else:
                make_rows(copies, direction, table, remote_table, f"remote of {peer!r}")
            transfer = Transfer(peer, direction, copies, self._clock)
            fault = self._faults(self._num_posts, transfer)
            self._num_posts += 1
        self.fabric.schedule(_Posted(self, target, transfer, copies.flat(), fault, notify, due_step=None))
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        """Nothing to hold back: a transfer is in flight here as a whole, from post to settlement."""

    def notify(self, peer: str, payload: bytes) -> None:
        """See `Transport.notify`."""
        with self._open():
            target, _ = self._peer(peer)
            self.deliver(target, peer, check_payload(payload))

    def notifications(self) -> list[Notification]:
        """See `Transport.notifications`."""
        with self._open():
            inbox, self._inbox = self._inbox, []
            return inbox

    def set_attentive(self, attentive: bool) -> None:
        """Nothing to do: memory always answers."""

    def stuck(self) -> StuckCall | None:
        """See `Transport.stuck`: there is no library."""
        return None

    def close(self) -> None:
        """See `Transport.close`. No byte of a pending transfer moves afterwards."""
        with self.fabric.lock:
            if self._closed:
                return
            self._closed = True
            self.fabric.transports.pop(self._name, None)
            mine = [entry for entry in self.fabric.posted if entry.owner is self]
            self.fabric.posted = [entry for entry in self.fabric.posted if entry.owner is not self]
            self._peers.clear()
            self.table = RegionTable()
        for entry in mine:
            entry.transfer.settle(closed_while_pending(self._name))

    def deliver(self, target: str, peer: str, payload: bytes) -> None:
        """For the fabric: put a notification in the target's inbox as often as the delivery plan says."""
        times = self._deliveries(self._num_notifications, peer, payload)
        self._num_notifications += 1
        receiver = self.fabric.transports.get(target)
        if receiver is not None:
            receiver.receive(self._name, payload, times)

    def receive(self, sender: str, payload: bytes, times: int) -> None:
        """For the fabric: a message has arrived."""
        alias = next((alias for alias, (own_name, _) in self._peers.items() if own_name == sender), sender)
        self._inbox.extend([Notification(alias, payload)] * times)

    def _peer(self, name: str) -> tuple[str, RegionTable]:
        try:
            return self._peers[name]
        except KeyError:
            raise unknown_peer(self._name, name, self._peers) from None

    @contextlib.contextmanager
    def _open(self) -> Iterator[RegionTable]:
        """The registered regions, under the fabric's lock; raises once closed."""
        with self.fabric.lock:
            if self._closed:
                raise closed_transport(self._name)
            yield self.table
