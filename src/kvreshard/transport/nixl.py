"""A transport between processes and machines, over NIXL.

It joins three parts:

1. `NixlTransport`: the public face. Checks copies against the regions of both sides, on the caller's thread.
2. `owner.Owner`: the one thread that talks to the agent, in slices of some 20 ms.
3. `nixl_agent.NixlAgent`: NIXL's Python API behind the narrow protocol that the owner needs; NIXL is imported with the first one.

What NIXL 1.5.1 with UCX needs from its surroundings (nothing of it is set here, the environment is the operator's):

- `UCX_NET_DEVICES`: which interfaces; `lo` when all peers are on one host without a network.
- `UCX_TLS`: leave unset to get shared memory and CMA on one host. `sm,self` alone cannot start, a network transport
  must be among them (`tcp` for tests across network namespaces, some ten times slower).
- CMA reads another process's memory: the same user, and `kernel.yama.ptrace_scope` 0 (or CAP_SYS_PTRACE).
  Where it is not allowed, UCX falls back to slower transports without saying so.
- `NIXL_LOG_LEVEL`, `UCX_LOG_LEVEL`: their logs. NIXL's Python logger writes INFO lines to stdout; unless
  NIXL_LOG_LEVEL is set it is raised to WARNING here.

NIXL's progress thread stays off: it spins a whole core per agent even when idle. The owner polls instead. The UCX backend may have
threads of its own that share what one post has in many copies, and rest between posts (`NixlOptions.num_threads`).
A target that does not poll stalls its peers: with CMA most reads and all writes settled only with the target's next
poll, and removing and adding a peer that lives on leaks one socket a side and worker, one more than there are threads, until either
transport closes.
Never used: NIXL's serialised descriptor lists, which are pickles. Peers exchange NIXL's own agent metadata inside
`regions.Metadata`. It still configures connections and remote keys: take it from trusted peers only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from kvreshard.model.expect import expect
from kvreshard.plan.copies import Copies, CopyList, Page
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
from kvreshard.transport.nixl_agent import NixlAgent, NixlOptions
from kvreshard.transport.owner import Owner
from kvreshard.transport.posting import SlicedTransfer
from kvreshard.transport.regions import RegionTable, decode_metadata, encode_metadata
from kvreshard.transport.slices import Cursor, RowSet, check_pages, is_indexed, listed_rows, make_rows

PageRows = tuple[RegionTable, RegionTable, list[RowSet]]
"""Where a page lies, and the regions that this holds for."""


class NixlTransport:
    """A `Transport` over one NIXL agent, which it makes and owns.

    Args:
        name: the start of the agent's name; process id and a random part are added, so that it is unique.
        options: how to set up the agent.
        clock: seconds, for `Transfer.seconds` and the owner's pace.
        enter: what the thread that talks to NIXL does first. Registered memory of a device wants that device to be current there: a new
            thread has no CUDA context, and where UCX finds none it leaves `cuda_ipc` out, and with it NVLink (vLLM#36475; UCX 1.20,
            `cuda_ipc_md.c`).

    Raises:
        TransportError: NIXL is not installed, or its backend does not start.
    """

    def __init__(
        self,
        name: str = "kvreshard",
        options: NixlOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        options = options or NixlOptions()
        own_name = f"{name}-{os.getpid()}-{secrets.token_hex(6)}"
        inbox: deque[tuple[str, bytes]] = deque()
        self._name = own_name
        self._clock = clock
        self._inbox = inbox
        # Held while the owner works on a change of regions or peers. Post, notify and notifications do without it, so
        # that a transfer's callback, which runs on the owner's thread, may call them.
        self._admin = threading.Lock()
        self._closed = False
        self._table = RegionTable()
        # Changed in place, one entry at a time: other threads look names up meanwhile.
        self._peers: dict[str, tuple[str, RegionTable]] = {}
        self._aliases: dict[str, str] = {}
        # Per page and (peer's own name, direction). A page goes with its route.
        self._page_rows: weakref.WeakKeyDictionary[Page, dict[tuple[str, Direction], PageRows]] = (
            weakref.WeakKeyDictionary()
        )

        def make_agent() -> NixlAgent:
            enter()
            return NixlAgent(own_name, options)

        self._owner = Owner(
            own_name,
            make_agent,
            lambda peer, payload: inbox.append((peer, payload)),
            options.pace,
            clock,
        )
        # The thread does not keep this object alive; when it is dropped or the interpreter ends, the agent is closed.
        self._finalizer = weakref.finalize(self, self._owner.stop)

    @property
    def name(self) -> str:
        """The agent's name."""
        return self._name

    def register(self, regions: Iterable[MemoryRegion]) -> None:
        """See `Transport.register`. One NIXL registration per region: register allocations, not pages."""
        regions = checked_regions(regions)
        with self._admin:
            table = self._open_table().plus(regions)
            self._owner.call(lambda agent: agent.register(regions))
            self._table = table

    def deregister(self, regions: Iterable[MemoryRegion]) -> None:
        """See `Transport.deregister`."""
        regions = checked_regions(regions, "deregister")
        with self._admin:
            table = self._open_table().minus(regions)
            self._owner.call(lambda agent: agent.deregister(regions))
            self._table = table

    def metadata(self) -> bytes:
        """See `Transport.metadata`."""
        with self._admin:
            table = self._open_table()
            return encode_metadata("nixl", self._name, table, self._owner.call(lambda agent: agent.metadata()))

    def add_peer(self, name: str, metadata: bytes) -> None:
        """See `Transport.add_peer`."""
        expect(name, str, "the name of a peer", "a name of your choice, as in 'prefill-0'")
        self.add_peers({name: metadata})

    def add_peers(self, peers: Mapping[str, bytes]) -> None:
        """See `Transport.add_peers`."""
        found = {name: decode_metadata("nixl", metadata) for name, metadata in checked_peers(peers).items()}
        fresh = {name: (peer.name, peer.table()) for name, peer in found.items()}
        with self._admin:
            self._open_table()
            check_new_peers(self._name, {name: peer.name for name, peer in found.items()}, self._peers, self._aliases)
            self._owner.add_peers({peer.name: peer.native for peer in found.values()})
            self._peers |= fresh
            self._aliases |= {own_name: name for name, (own_name, _) in fresh.items()}

    def remove_peer(self, name: str) -> None:
        """See `Transport.remove_peer`. Does not block on NIXL, nor on whoever adds peers."""
        own_name, _ = self._peer(name)
        if self._peers.pop(name, None) is None:
            raise unknown_peer(self._name, name, list(self._peers))
        self._aliases.pop(own_name, None)
        error = TransportError(f"peer {name!r} ({own_name}) was removed while this transfer was pending")
        self._owner.remove_peer(own_name, error)

    def post(self, peer: str, direction: Direction, copies: Copies, notify: bytes | None = None) -> Transfer:
        """See `Transport.post`. Does not block on NIXL."""
        own_name, _ = self._peer(peer)
        check_post(direction, copies, notify)
        cursor = self._cursor(peer, direction, copies)
        transfer = Transfer(peer, direction, copies, self._clock)
        self._owner.post(SlicedTransfer(transfer, own_name, cursor, notify))
        return transfer

    def _cursor(self, peer: str, direction: Direction, copies: Copies) -> Cursor:
        """Copies that are checked and placed: a list each time, a page once per peer as long as nobody's regions change."""
        own_name, remote = self._peer(peer)
        local, side = self._open_table(), f"remote of {peer!r}"
        if isinstance(copies, CopyList):
            return Cursor(make_rows(copies, direction, local, remote, side))
        check_pages(copies)
        known = self._page_rows.setdefault(copies.page, {})
        found = known.get((own_name, direction))
        # A `RegionTable` is never changed, only replaced.
        if found is None or found[0] is not local or found[1] is not remote:
            found = known[own_name, direction] = local, remote, make_rows(copies.page, direction, local, remote, side)
        if not is_indexed(copies.page):
            return Cursor(listed_rows(copies, direction, local, remote, side))
        is_read = direction is Direction.READ
        return Cursor(found[2], (copies.dst_page, copies.src_page) if is_read else (copies.src_page, copies.dst_page))

    def cancel(self, transfer: Transfer) -> None:
        """See `Transport.cancel`."""
        self._owner.cancel(transfer)

    def notify(self, peer: str, payload: bytes) -> None:
        """See `Transport.notify`. Does not block on NIXL."""
        own_name, _ = self._peer(peer)
        self._owner.send(own_name, check_payload(payload))

    def notifications(self) -> list[Notification]:
        """See `Transport.notifications`."""
        self._open_table()
        fresh = []
        # One pop at a time: two threads may be reading, and the owner appends meanwhile.
        with contextlib.suppress(IndexError):
            while True:
                fresh.append(self._inbox.popleft())
        return [Notification(self._aliases.get(peer, peer), payload) for peer, payload in fresh]

    def set_attentive(self, attentive: bool) -> None:
        """See `Transport.set_attentive`: `Pace.fast_s` for `Pace.linger_s`, then `attentive_s` instead of `slow_s`."""
        self._owner.attend(attentive)

    def stuck(self) -> StuckCall | None:
        """See `Transport.stuck`."""
        return None if self._closed else self._owner.watchdog.stuck()

    def close(self) -> None:
        """See `Transport.close`. Waits up to `Pace.close_s` for slices in flight."""
        self._closed = True
        self._finalizer()

    @property
    def is_running(self) -> bool:
        """Whether the agent is there. It may be for some time after `close`, if a call into NIXL does not return."""
        return self._owner.is_running

    def _open_table(self) -> RegionTable:
        if self._closed:
            raise closed_transport(self._name)
        return self._table

    def _peer(self, name: str) -> tuple[str, RegionTable]:
        self._open_table()
        try:
            return self._peers[name]
        except (KeyError, TypeError):  # the latter for what can be no name
            raise unknown_peer(self._name, name, list(self._peers)) from None
