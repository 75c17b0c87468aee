"""How do bytes move between processes and machines, through NIXL?

The only module that imports nixl, and it does so when the first `NixlTransport` is made. It joins three parts:

1. `NixlTransport`: the public face. Checks pieces against the regions of both sides, on the caller's thread.
2. `owner.Owner`: the one thread that talks to the agent, in slices of some 20 ms.
3. `_NixlAgent`: NIXL's Python API behind the narrow protocol that the owner needs.

What NIXL 1.5.1 with UCX needs from its surroundings (nothing of it is set here, the environment is the operator's):

- `UCX_NET_DEVICES`: which interfaces; `lo` when all peers are on one host without a network.
- `UCX_TLS`: leave unset to get shared memory and CMA on one host. `sm,self` alone cannot start, a network transport
  must be among them (`tcp` for tests across network namespaces, some ten times slower).
- CMA reads another process's memory: the same user, and `kernel.yama.ptrace_scope` 0 (or CAP_SYS_PTRACE).
  Where it is not allowed, UCX falls back to slower transports without saying so.
- `NIXL_LOG_LEVEL`, `UCX_LOG_LEVEL`: their logs. NIXL's Python logger writes INFO lines to stdout; unless
  NIXL_LOG_LEVEL is set it is raised to WARNING here.

NIXL's progress thread stays off: it spins a whole core per agent even when idle. The owner polls instead.
A target that does not poll stalls its peers: with CMA most reads and all writes settled only with the target's next
poll, and removing and adding a peer that lives on leaks one socket a side until either transport closes.
Never used: NIXL's serialised descriptor lists, which are pickles. Peers exchange NIXL's own agent metadata inside
`regions.Metadata`. It still configures connections and remote keys: take it from trusted peers only.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvreshard.transport.base import (
    Copies,
    Direction,
    MemoryRegion,
    Notification,
    Transfer,
    TransportError,
    check_payload,
)
from kvreshard.transport.framed import Frame, FramedCopies
from kvreshard.transport.frames import FrameCursor, FramePlace, FrameSlice, place, strided_rows
from kvreshard.transport.owner import Job, Owner, Pace
from kvreshard.transport.refusals import check_new_peer, closed_transport, unknown_peer
from kvreshard.transport.regions import RegionTable, decode_metadata, encode_metadata
from kvreshard.transport.slices import Slice, SliceCursor

# A route has a few frames per source rank; what a peer can make us keep is bounded, not what it needs.
MAX_PREPARED = 256

_SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """How to set up the agent.

    Attributes:
        backend: NIXL's plugin.
        backend_params: the plugin's parameters. For UCX, `engine_config` takes "NET_DEVICES=lo,LOG_LEVEL=error": UCX
            settings without their prefix, for this agent only; the environment wins over it, and a value cannot hold a
            comma.
        progress_thread: NIXL's own polling thread; spins a core.
        pace: how the owner thread spends its time.
    """

    backend: str = "UCX"
    backend_params: Mapping[str, str] = field(default_factory=dict)
    progress_thread: bool = False
    pace: Pace = field(default_factory=Pace)


def load_nixl() -> Any:
    """NIXL's Python API module.

    Raises:
        TransportError: it is not installed.
    """
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportError(f"NIXL cannot be imported ({error}); pip install kvreshard[nixl]") from error
    log = logging.getLogger("nixl")
    if log.level == logging.INFO and "NIXL_LOG_LEVEL" not in os.environ:
        log.setLevel(logging.WARNING)
    return api


@contextlib.contextmanager
def _told_as(fact: str, remedy: str = "NIXL_LOG_LEVEL=DEBUG tells more") -> Iterator[None]:
    """Turn NIXL's exceptions, which share no base class, into `TransportError`s."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} {error}".strip()
        raise TransportError(f"NIXL {fact}: {reason}; {remedy}") from error


class _NixlAgent:
    """`owner.Agent` over `nixl_agent`, for one thread only. A handle is NIXL's transfer request."""

    def __init__(self, name: str, options: NixlOptions) -> None:
        api = load_nixl()
        config = api.nixl_agent_config(enable_prog_thread=options.progress_thread, backends=[])
        with _told_as("could not start an agent"):
            self._agent: Any = api.nixl_agent(name, config)
        plugins = self._agent.get_plugin_list()
        if options.backend not in plugins:
            raise TransportError(f"NIXL has no plugin {options.backend!r}; it has: {', '.join(sorted(plugins))}")
        surroundings = [f"{key}={os.environ.get(key)!r}" for key in ("UCX_TLS", "UCX_NET_DEVICES")]
        with _told_as(
            f"could not start backend {options.backend} with {dict(options.backend_params)}",
            f"check {' and '.join(surroundings)}: among them must be a network transport",
        ):
            self._agent.create_backend(options.backend, dict(options.backend_params))
        self._registered: dict[MemoryRegion, Any] = {}
        self._peers: set[str] = set()
        # Held here, not by the frames: a list must be given back on this thread.
        self._prepared: dict[str, dict[Frame, tuple[Any, Any]]] = {}

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for index, region in enumerate(regions):
            kind, _, number = region.device.partition(":")
            row = np.array([[region.address, region.size_bytes, int(number or 0)]], dtype=np.uint64)
            try:
                with _told_as(f"could not register {region}", "is it mapped, and does UCX know the device?"):
                    self._registered[region] = self._agent.register_memory(row, _SEGMENTS[kind])
            except TransportError:
                self.deregister(regions[:index])
                raise

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        for peer in list(self._prepared):
            self._release_prepared(peer)
        for region in regions:
            with _told_as(f"could not deregister {region}"):
                self._agent.deregister_memory(self._registered.pop(region))

    def metadata(self) -> bytes:
        with _told_as("could not give the agent's metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, name: str, native: bytes) -> None:
        with _told_as(f"could not load the metadata of {name}", "are NIXL's version and backend the same there?"):
            loaded = self._agent.add_remote_agent(native)
            found = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
            if found != name:
                self._agent.remove_remote_agent(found)
                raise TransportError(
                    f"peer metadata says {name!r} outside, {found!r} inside; pass what metadata() gave"
                )
        self._peers.add(name)

    def remove_peer(self, name: str) -> None:
        self._peers.discard(name)
        self._release_prepared(name)
        with _told_as(f"could not disconnect {name}"):
            self._agent.remove_remote_agent(name)

    def start(self, peer: str, direction: Direction, piece: Slice | FrameSlice) -> object | None:
        agent = self._agent
        with _told_as(f"could not post {len(piece)} pieces"):
            if isinstance(piece, FrameSlice):
                local, remote = self._prepared_lists(peer, piece.frame, piece.place)
                request = agent.make_prepped_xfer(direction.name, local, piece.local_index, remote, piece.remote_index)
            else:
                local = agent.get_xfer_descs(piece.local, _SEGMENTS[piece.local_kind])
                remote = agent.get_xfer_descs(piece.remote, _SEGMENTS[piece.remote_kind])
                request = agent.initialize_xfer(direction.name, local, remote, peer)
            state = "ERR"
            try:
                state = agent.transfer(request)
            finally:
                if state != "PROC":
                    agent.release_xfer_handle(request)
            if state == "ERR":
                raise TransportError("NIXL answered 'ERR' to a post")
        return request if state == "PROC" else None

    def _prepared_lists(self, peer: str, frame: Frame, place: FramePlace) -> tuple[Any, Any]:
        """NIXL's strided lists of both sides of a frame, made once per peer."""
        lists = self._prepared.setdefault(peer, {})
        found = lists.get(frame)
        if found is None:
            if len(lists) >= MAX_PREPARED:
                self._release_lists(lists.pop(next(iter(lists))))
            local, remote = strided_rows(frame, place, local=True), strided_rows(frame, place, local=False)
            found = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, _SEGMENTS[place.local_kind]),
                self._agent.prep_xfer_dlist(peer, remote, _SEGMENTS[place.remote_kind]),
            )
            lists[frame] = found
        return found

    def _release_prepared(self, peer: str) -> None:
        for lists in self._prepared.pop(peer, {}).values():
            self._release_lists(lists)

    def _release_lists(self, lists: tuple[Any, Any]) -> None:
        for prepared in lists:
            with _told_as("could not release a prepared list"):
                self._agent.release_dlist_handle(prepared)

    def is_done(self, handle: object) -> bool:
        with _told_as("reports the failure of a posted slice"):
            state = self._agent.check_xfer_state(handle)
        if state not in ("PROC", "DONE"):
            raise TransportError(f"NIXL answered {state!r} when asked for a posted slice")
        return bool(state == "DONE")

    def release(self, handle: object) -> None:
        with _told_as("could not release a transfer"):
            self._agent.release_xfer_handle(handle)

    def send(self, peer: str, payload: bytes) -> None:
        with _told_as(f"could not send a notification to {peer}"):
            self._agent.send_notif(peer, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        with _told_as("could not read its notifications"):
            fresh = self._agent.get_new_notifs()
        return [(peer, bytes(payload)) for peer, payloads in fresh.items() for payload in payloads]

    def close(self) -> None:
        try:
            for peer in list(self._peers):
                self.remove_peer(peer)
            self.deregister(list(self._registered))
        finally:
            self._agent = None  # its end frees whatever could not be given back one by one


class NixlTransport:
    """A `Transport` over one NIXL agent, which it makes and owns.

    Args:
        name: the start of the agent's name; process id and a random part are added, so that it is unique.
        options: how to set up the agent.
        clock: seconds, for `Transfer.seconds` and the owner's pace.

    Raises:
        TransportError: NIXL is not installed, or its backend does not start.
    """

    def __init__(
        self,
        name: str = "kvreshard",
        options: NixlOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
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
        self._peers: dict[str, tuple[str, RegionTable]] = {}
        # Where each frame lies, as long as the regions of both sides are the ones it was checked against.
        self._places: WeakKeyDictionary[Frame, tuple[RegionTable, RegionTable, FramePlace | None]] = WeakKeyDictionary()
        self._owner = Owner(
            own_name,
            lambda: _NixlAgent(own_name, options),
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
        regions = tuple(regions)
        with self._admin:
            table = self._open_table().plus(regions)
            self._owner.call(lambda agent: agent.register(regions))
            self._table = table

    def deregister(self, regions: Iterable[MemoryRegion]) -> None:
        """See `Transport.deregister`."""
        regions = tuple(regions)
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
        peer = decode_metadata("nixl", metadata)
        table = peer.table()
        with self._admin:
            self._open_table()
            check_new_peer(self._name, name, peer.name, {own: alias for alias, (own, _) in self._peers.items()})
            self._owner.add_peer(peer.name, peer.native)
            self._peers = {**self._peers, name: (peer.name, table)}

    def remove_peer(self, name: str) -> None:
        """See `Transport.remove_peer`."""
        with self._admin:
            own_name, _ = self._peer(name)
            self._peers = {alias: peer for alias, peer in self._peers.items() if alias != name}
            error = TransportError(f"peer {name!r} ({own_name}) was removed while this transfer was pending")
            self._owner.remove_peer(own_name, error)

    def post(
        self, peer: str, direction: Direction, copies: Copies | FramedCopies, notify: bytes | None = None
    ) -> Transfer:
        """See `Transport.post`. Does not block on NIXL."""
        own_name, remote_table = self._peer(peer)
        if notify is not None:
            check_payload(notify)
        cursor = self._cursor(copies, remote_table, f"remote of {peer!r}")
        transfer = Transfer(peer, direction, copies, self._clock)
        self._owner.post(Job(transfer, own_name, cursor, notify))
        return transfer

    def _cursor(self, copies: Copies | FramedCopies, remote: RegionTable, side: str) -> SliceCursor | FrameCursor:
        table = self._open_table()
        if isinstance(copies, Copies):
            return SliceCursor(copies, table, remote, side)
        known = self._places.get(copies.frame)
        if known is None or known[0] is not table or known[1] is not remote:
            known = table, remote, place(copies.frame, table, remote, side)
            self._places[copies.frame] = known
        found = known[2]
        return SliceCursor(copies.flat(), table, remote, side) if found is None else FrameCursor(copies, found)

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
        aliases = {own_name: alias for alias, (own_name, _) in self._peers.items()}
        fresh = []
        # One pop at a time: two threads may be reading, and the owner appends meanwhile.
        with contextlib.suppress(IndexError):
            while True:
                fresh.append(self._inbox.popleft())
        return [Notification(aliases.get(peer, peer), payload) for peer, payload in fresh]

    def set_attentive(self, attentive: bool) -> None:
        """See `Transport.set_attentive`: `Pace.attentive_s` instead of `Pace.slow_s` between polls."""
        self._owner.attentive = attentive

    def close(self) -> None:
        """See `Transport.close`. Waits up to `Pace.close_s` for slices in flight."""
        self._closed = True
        self._finalizer()

    def _open_table(self) -> RegionTable:
        if self._closed:
            raise closed_transport(self._name)
        return self._table

    def _peer(self, name: str) -> tuple[str, RegionTable]:
        self._open_table()
        try:
            return self._peers[name]
        except KeyError:
            raise unknown_peer(self._name, name, self._peers) from None
