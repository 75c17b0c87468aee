"""A transport within one process.

1. A `Fabric` is the network: transports made with the same fabric can reach each other. There is no other state.
2. `MemoryTransport.post` checks all copies against both sides' regions, copies the bytes and settles the transfer before it returns.

Refused, beside what every transport refuses: device memory, since only host memory can be copied with memmove.
Addresses are real: a copy inside a registered region that has been unmapped crashes the process, as it should.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvreshard.model.expect import expect
from kvreshard.plan.copies import Copies, CopyList, PagedCopies
from kvreshard.transport.base import (
    Direction,
    MemoryRegion,
    Notification,
    StuckCall,
    Transfer,
    TransportError,
    check_new_peers,
    check_payload,
    check_post,
    checked_peers,
    checked_regions,
    closed_transport,
    unknown_peer,
)
from kvreshard.transport.regions import RegionTable, decode_metadata, encode_metadata
from kvreshard.transport.slices import check_pages, make_rows


class Fabric:
    """The network of some transports of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.transports: dict[str, MemoryTransport] = {}
        self._names = itertools.count()

    def join(self, prefix: str, transport: MemoryTransport) -> str:
        """For transports: enter under a unique name."""
        with self.lock:
            name = f"{prefix}-{next(self._names)}"
            self.transports[name] = transport
            return name


class MemoryTransport:
    """A `Transport` within one process.

    Args:
        fabric: the network; transports of different fabrics do not know each other.
        name: the start of this transport's own name.
        clock: seconds, for `Transfer.seconds`.
    """

    def __init__(self, fabric: Fabric, name: str = "memory", *, clock: Callable[[], float] = time.monotonic) -> None:
        expect(fabric, Fabric, "the fabric of a memory transport", "Fabric(), one for all of them")
        self.fabric = fabric
        self.table = RegionTable()
        self._clock = clock
        self._peers: dict[str, tuple[str, RegionTable]] = {}
        self._inbox: list[Notification] = []
        self._closed = False
        self._name = fabric.join(name, self)

    @property
    def name(self) -> str:
        """This transport's own name on the fabric."""
        return self._name

    def register(self, regions: Iterable[MemoryRegion]) -> None:
        """See `Transport.register`. Refuses devices other than "cpu"."""
        regions = checked_regions(regions)
        for region in regions:
            if region.device != "cpu":
                raise TransportError(f"region {region}: the memory transport copies host memory only; use 'nixl'")
        with self._open() as table:
            self.table = table.plus(regions)

    def deregister(self, regions: Iterable[MemoryRegion]) -> None:
        """See `Transport.deregister`."""
        regions = checked_regions(regions, "deregister")
        with self._open() as table:
            self.table = table.minus(regions)

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        with self._open() as table:
            return encode_metadata("memory", self._name, table)

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See `Transport.add_peer`."""
        expect(name, str, "the name of a peer", "a name of your choice, as in 'prefill-0'")
        self.add_peers({name: metadata})

    def add_peers(self, peers: Mapping[str, bytes]) -> None:
        """See `Transport.add_peers`."""
        fresh = {name: decode_metadata("memory", metadata) for name, metadata in checked_peers(peers).items()}
        with self._open():
            aliases = {own_name: name for name, (own_name, _) in self._peers.items()}
            check_new_peers(self._name, {name: peer.name for name, peer in fresh.items()}, self._peers, aliases)
            for name, peer in fresh.items():
                if peer.name not in self.fabric.transports:
                    raise TransportError(f"peer {name!r} ({peer.name}) is not on this fabric; use one for both")
            self._peers |= {name: (peer.name, peer.table()) for name, peer in fresh.items()}

    def remove_peer(self, name: str) -> None:
        """See `Transport.remove_peer`."""
        with self._open():
            self._peer(name)
            del self._peers[name]

    def post(self, peer: str, direction: Direction, copies: Copies, notify: bytes | None = None) -> Transfer:
        """See `Transport.post`."""
        with self._open() as table:
            target, remote_table = self._peer(peer)
            check_post(direction, copies, notify)
            if isinstance(copies, PagedCopies):
                check_pages(copies)
            pages_or_list = copies.page if isinstance(copies, PagedCopies) else copies
            make_rows(pages_or_list, direction, table, remote_table, f"remote of {peer!r}")
            transfer = Transfer(peer, direction, copies, self._clock)
        self.carry_out(target, transfer, copies.flat(), notify)
        return transfer

    def carry_out(self, target: str, transfer: Transfer, copies: CopyList, notify: bytes | None) -> None:
        """Move the bytes of a transfer with the transport `target`, notify it, settle."""
        error: TransportError | None = None
        try:
            with self.fabric.lock:
                self._check_target(target, transfer, copies)
                self.move(transfer, copies)
                if notify is not None:
                    self.deliver(target, transfer.peer, notify)
        except TransportError as refusal:
            error = refusal
        transfer.settle(error)

    def move(self, transfer: Transfer, copies: CopyList) -> None:
        """Copy the bytes of a transfer, in order."""
        columns = (copies.dst_address.tolist(), copies.src_address.tolist(), copies.length.tolist())
        for dst_address, src_address, num_bytes in zip(*columns, strict=True):
            ctypes.memmove(dst_address, src_address, num_bytes)

    def cancel(self, transfer: Transfer) -> None:
        """See `Transport.cancel`. Nothing is held back: a transfer is in flight here as a whole, from post to settlement."""
        with self._open():
            pass

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
        """See `Transport.close`."""
        with self.fabric.lock:
            self._closed = True
            self.fabric.transports.pop(self._name, None)
            self._peers.clear()
            self.table = RegionTable()

    def deliver(self, target: str, peer: str, payload: bytes) -> None:
        """Put a notification in the inbox of `target`, which is known here as `peer`."""
        receiver = self.fabric.transports.get(target)
        if receiver is not None:
            receiver.receive(self._name, payload)

    def receive(self, sender: str, payload: bytes) -> None:
        """For other transports: a message has arrived."""
        alias = next((alias for alias, (own_name, _) in self._peers.items() if own_name == sender), sender)
        self._inbox.append(Notification(alias, payload))

    def _check_target(self, name: str, transfer: Transfer, copies: CopyList) -> None:
        """Raises TransportError where the target has closed, or its regions: memory behind them may be gone since `metadata` was taken."""
        target = self.fabric.transports.get(name)
        if target is None:
            raise TransportError(f"peer {transfer.peer!r} ({name}) has closed; remove it and add its successor")
        remote = copies.src_address if transfer.direction is Direction.READ else copies.dst_address
        target.table.locate(f"remote of {transfer.peer!r}", remote, copies.length)

    def _peer(self, name: str) -> tuple[str, RegionTable]:
        try:
            return self._peers[name]
        except (KeyError, TypeError):  # the latter for what can be no name
            raise unknown_peer(self._name, name, self._peers) from None

    @contextlib.contextmanager
    def _open(self) -> Iterator[RegionTable]:
        """The registered regions, under the fabric's lock; raises once closed."""
        with self.fabric.lock:
            if self._closed:
                raise closed_transport(self._name)
            yield self.table
