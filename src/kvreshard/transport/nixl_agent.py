"""NIXL's Python API behind the narrow protocol that `owner.Owner` needs; the only module that imports nixl.

It is imported when the first agent is made. What NIXL and UCX need from their surroundings is told in `transport.nixl`.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvreshard.transport.base import Direction, MemoryRegion, TransportError
from kvreshard.transport.posting import Pace
from kvreshard.transport.slices import SPLIT_COPIES, RowSet, Slice

# A route has a few pages per source rank; what a peer can make us keep is bounded, not what it needs.
MAX_PREPARED = 256

# What the cost model's constants are measured with.
UCX_UNRELEASED = ("UCX_RCACHE_MAX_UNRELEASED", "1024")
USUAL_THREADS = 2

# UCX reads another process's device memory by `cuda_ipc` only where it sees an NVLink (1.23, `cuda_ipc_iface.c`), and otherwise lets the
# peer's processor send it: 0.6 GB/s instead of 680 between two processes of one H200 whose links a virtual machine does not see.
READ_BY_CUDA_IPC = "CUDA_IPC_ENABLE_GET_ZCOPY=on"

REMEDY = "NIXL_LOG_LEVEL=DEBUG tells more"

_SEGMENTS = {"cpu": "DRAM", "cuda": "VRAM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOptions:
    """How to set up the agent.

    Attributes:
        backend: NIXL's plugin.
        backend_params: the plugin's parameters. For UCX, `engine_config` takes "NET_DEVICES=lo,LOG_LEVEL=error": UCX
            settings without their prefix, for this agent only; the environment wins over it, and a value cannot hold a
            comma. `READ_BY_CUDA_IPC` stands before what is given.
        num_threads: of the UCX backend, for slices of at least `SPLIT_COPIES` copies, which they share; they rest between transfers. 0:
            the owner posts everything by itself. More than two are worth it only where cores idle, and take doorbells of a NIC. While a
            network reads what they posted each polls a core without rest, see `usual_threads`.
        pace: how the owner thread spends its time.
    """

    backend: str = "UCX"
    backend_params: Mapping[str, str] = field(default_factory=dict)
    num_threads: int = USUAL_THREADS
    pace: Pace = field(default_factory=Pace)

    @property
    def params(self) -> dict[str, str]:
        """The parameters that the backend is made with."""
        given = dict(self.backend_params)
        if self.backend != "UCX":
            return given
        config = {"engine_config": ",".join(filter(None, (READ_BY_CUDA_IPC, given.get("engine_config"))))}
        pool = {"num_threads": str(self.num_threads), "split_batch_size": str(SPLIT_COPIES)} if self.num_threads else {}
        return {**pool, **given, **config}


def usual_threads(ucx_tls: str | None) -> int:
    """Threads for these transports of UCX, as the environment's UCX_TLS names them: none where that is TCP alone, since the kernel sends
    by itself what one thread has posted, and threads that poll take the cores that it needs (docs/design/0020).
    """
    return 0 if ucx_tls and {name.strip() for name in ucx_tls.split(",")} <= {"tcp", "self"} else USUAL_THREADS


def load_nixl() -> Any:
    """NIXL's Python API module. Where this is the first import of it, UCX keeps at most as many unreleased registrations as with
    NixlConnector, unless the environment says how many (vLLM 0.30 to 0.33, `distributed/nixl_utils.py`: else it may leak memory).

    Raises:
        TransportError: it is not installed.
    """
    if "nixl" not in sys.modules:
        os.environ.setdefault(*UCX_UNRELEASED)
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise TransportError(f"NIXL cannot be imported ({error}); pip install nixl pyzmq") from error
    log = logging.getLogger("nixl")
    if log.level == logging.INFO and "NIXL_LOG_LEVEL" not in os.environ:
        log.setLevel(logging.WARNING)
    return api


def list_plugins() -> list[str]:
    """The plugins that NIXL finds, by name. Loads NIXL and starts an agent without a backend. Raises TransportError."""
    api = load_nixl()
    with _as_errors("could not start an agent"):
        agent = api.nixl_agent("kvreshard-plugins", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        return sorted(map(str, agent.get_plugin_list()))


@contextlib.contextmanager
def _as_errors(fact: str, remedy: str = REMEDY) -> Iterator[None]:
    """Turn NIXL's exceptions, which share no base class, into `TransportError`s."""
    try:
        yield
    except TransportError:
        raise
    except Exception as error:
        raise _as_transport_error(fact, error, remedy) from error


def _as_transport_error(fact: str, error: Exception, remedy: str = REMEDY) -> TransportError:
    reason = f"{type(error).__name__} {error}".strip()
    return TransportError(f"NIXL {fact}: {reason}; {remedy}")


class NixlAgent:
    """`watchdog.Agent` over `nixl_agent`, for one thread only. A handle is NIXL's transfer request."""

    def __init__(self, name: str, options: NixlOptions) -> None:
        api = load_nixl()
        config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
        with _as_errors("could not start an agent"):
            self._agent: Any = api.nixl_agent(name, config)
        plugins = self._agent.get_plugin_list()
        if options.backend not in plugins:
            raise TransportError(f"NIXL has no plugin {options.backend!r}; it has: {', '.join(sorted(plugins))}")
        surroundings = [f"{key}={os.environ.get(key)!r}" for key in ("UCX_TLS", "UCX_NET_DEVICES")]
        with _as_errors(
            f"could not start backend {options.backend} with {options.params}",
            f"check {' and '.join(surroundings)}: among them must be a network transport",
        ):
            self._agent.create_backend(options.backend, options.params)
        self._registered: dict[MemoryRegion, Any] = {}
        self._peers: set[str] = set()
        # Held here, not by the pages: a list must be given back on this thread.
        self._prepared: dict[str, dict[RowSet, tuple[Any, Any]]] = {}

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        for index, region in enumerate(regions):
            kind, _, number = region.device.partition(":")
            row = np.array([[region.address, region.size_bytes, int(number or 0)]], dtype=np.uint64)
            try:
                with _as_errors(f"could not register {region}", "is it mapped, and does UCX know the device?"):
                    self._registered[region] = self._agent.register_memory(row, _SEGMENTS[kind])
            except TransportError:
                self.deregister(regions[:index])
                raise

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        for peer in list(self._prepared):
            self._release_prepared(peer)
        for region in regions:
            with _as_errors(f"could not deregister {region}"):
                self._agent.deregister_memory(self._registered.pop(region))

    def metadata(self) -> bytes:
        with _as_errors("could not give the agent's metadata"):
            return bytes(self._agent.get_agent_metadata())

    def add_peer(self, name: str, native: bytes) -> None:
        with _as_errors(
            f"could not load the metadata of {name}",
            "is that engine still there and awake, and has it the same version and backend of NIXL?",
        ):
            loaded = self._agent.add_remote_agent(native)
            found = loaded.decode(errors="replace") if isinstance(loaded, bytes) else str(loaded)
            if found != name:
                self._agent.remove_remote_agent(found)
                raise TransportError(
                    f"peer metadata says {name!r} outside, {found!r} inside; run the same releases of kvreshard and NIXL on both sides"
                )
        self._peers.add(name)

    def remove_peer(self, name: str) -> None:
        self._peers.discard(name)
        # A list that NIXL keeps moves no byte: what is settled once the peer is disconnected must not wait for it.
        for lists in self._prepared.pop(name, {}).values():
            with contextlib.suppress(TransportError):
                self._release_lists(lists)
        with _as_errors(f"could not disconnect {name}"):
            self._agent.remove_remote_agent(name)

    def start(self, peer: str, direction: Direction, slice_: Slice) -> object | None:
        agent = self._agent
        try:
            if slice_.is_indexed:
                local, remote = self._prepared_lists(peer, slice_.row_set)
                request = agent.make_prepped_xfer(direction.name, local, slice_.local, remote, slice_.remote)
            else:
                local_kind, remote_kind = slice_.row_set.kinds
                local = agent.get_xfer_descs(slice_.local, _SEGMENTS[local_kind])
                remote = agent.get_xfer_descs(slice_.remote, _SEGMENTS[remote_kind])
                request = agent.initialize_xfer(direction.name, local, remote, peer)
            state = "ERR"
            try:
                state = agent.transfer(request)
            finally:
                if state != "PROC":
                    agent.release_xfer_handle(request)
        except Exception as error:
            raise _as_transport_error(f"could not post {len(slice_)} copies", error) from error
        if state == "ERR":
            raise TransportError("NIXL answered 'ERR' to a post")
        return request if state == "PROC" else None

    def _prepared_lists(self, peer: str, row_set: RowSet) -> tuple[Any, Any]:
        """NIXL's strided lists of both sides of a page, made once per peer."""
        lists = self._prepared.setdefault(peer, {})
        found = lists.get(row_set)
        if found is None:
            if len(lists) >= MAX_PREPARED:
                self._release_lists(lists.pop(next(iter(lists))))
            local, remote = (_SEGMENTS[kind] for kind in row_set.kinds)
            found = lists[row_set] = (
                self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", row_set.local, local),
                self._agent.prep_xfer_dlist(peer, row_set.remote, remote),
            )
        return found

    def _release_prepared(self, peer: str) -> None:
        for lists in self._prepared.pop(peer, {}).values():
            self._release_lists(lists)

    def _release_lists(self, lists: tuple[Any, Any]) -> None:
        for prepared in lists:
            with _as_errors("could not release a prepared list"):
                self._agent.release_dlist_handle(prepared)

    def is_done(self, handle: object) -> bool:
        with _as_errors("reports the failure of a posted slice"):
            state = self._agent.check_xfer_state(handle)
        if state not in ("PROC", "DONE"):
            raise TransportError(f"NIXL answered {state!r} when asked for a posted slice")
        return bool(state == "DONE")

    def release(self, handle: object) -> None:
        with _as_errors("could not release a transfer"):
            self._agent.release_xfer_handle(handle)

    def send(self, peer: str, payload: bytes) -> None:
        with _as_errors(f"could not send a notification to {peer}"):
            self._agent.send_notif(peer, payload)

    def receive(self) -> list[tuple[str, bytes]]:
        with _as_errors("could not read its notifications"):
            fresh = self._agent.get_new_notifs()
        return [(peer, bytes(payload)) for peer, payloads in fresh.items() for payload in payloads]

    def close(self) -> None:
        try:
            for peer in list(self._peers):
                self.remove_peer(peer)
            self.deregister(list(self._registered))
        finally:
            self._agent = None  # its end frees whatever could not be given back one by one
