"""The cost of one event of a session where `n` others wait: processor seconds, by the kind of event.

Each function sets `n` of something up and returns the cost of one event among them. Without NIXL and without sockets: what is measured is
our own part.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from tests.unit.session.world import OPTIONS, REMOTE, Clock, make_world, meet

from bench.compare import median_s
from kvreshard.plan.copies import CopyList
from kvreshard.session.commands import Acquire, Publish, Release, RemoteEngine, Renew
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease, LeaseTable
from kvreshard.session.peer import Peer
from kvreshard.session.peers import Peers, _PeerEntry
from kvreshard.session.remote_leases import RemoteLeases
from kvreshard.session.results import ResultQueue
from kvreshard.transport.base import Direction, MemoryRegion, Transfer
from kvreshard.transport.owner import Owner
from kvreshard.transport.posting import Pace, SlicedTransfer
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import Cursor, make_rows

REPEATS = 25
NUM_PEERS = 64


def offered_leases(count: int) -> float:
    """One turn of a source that offers so many leases."""
    world = make_world(1, 1)
    endpoint = world.src.endpoints[0]
    endpoint._own.book._table = LeaseTable(count)
    for number in range(count):
        endpoint.submit(Acquire(Lease(f"cmpl-{number:032x}", number, number + 1)))
        endpoint.submit(Publish(f"cmpl-{number:032x}", 30.0))
    endpoint.turn()
    spent = median_s(endpoint.turn, REPEATS)
    world.close()
    return spent


def watched_requests(count: int) -> float:
    """One lease that a reader gives back while so many other requests wait."""
    world = make_world(1, 1)
    endpoint = world.dst.endpoints[0]
    remote_leases, me = endpoint._remote_leases, endpoint._me
    endpoint._peers.get(me, REMOTE)  # type: ignore[arg-type]
    meet(world)
    for number in range(count):
        remote_leases.start_renewing(Renew(f"w{number}", REMOTE, Lease(f"cmpl-{number:032x}", number, number + 1)), me)
    gone = Release(REMOTE, Lease("gone", 1, 1))
    spent = median_s(lambda: (remote_leases.release(gone), remote_leases.update(me, 0.0)), REPEATS)
    world.close()
    return spent


def known_sources(count: int) -> float:
    """One renewal at one of so many sources, each of which has a lease that is wanted."""
    world = make_world(1, 1)
    endpoint = world.dst.endpoints[0]
    me = endpoint._me
    if me is None:
        raise RuntimeError("a world's engines know themselves")
    endpoint._peers.get(me, REMOTE)
    meet(world)
    base = endpoint._peers.met(REMOTE)
    clock, silent = Clock(), SimpleNamespace(notify=lambda peer, payload: None)
    peers = Peers(OPTIONS, clock, lambda: None)
    remote_leases = RemoteLeases(silent, peers, ResultQueue(), 5.0)  # type: ignore[arg-type]
    for number in range(count):
        remote = RemoteEngine(f"engine-{number}", f"{number:032x}", Address("10.0.0.1", number))
        known = _PeerEntry(0.0, 0.0)
        engine_metadata = msgspec.structs.replace(base.engine_metadata, lease_s=30.0)  # type: ignore[union-attr]
        known.peer.set_result(Peer(remote, engine_metadata, base.layout, base.route, base.mover))  # type: ignore[union-attr]
        peers._known[remote] = known
        peers._note_met(remote)
        remote_leases.start_renewing(Renew(f"w{number}", remote, Lease(f"r{number}", number, number + 1)), me)
    remote_leases.update(me, clock.now_s)
    remote_leases.renew(me, clock.now_s)
    started_s, rounds = time.process_time(), 5
    for _ in range(rounds):
        clock.now_s += 5.0
        remote_leases.renew(me, clock.now_s)
    spent = (time.process_time() - started_s) / (rounds * count)
    world.close()
    return spent


class _Instant:
    """An agent whose slices have settled when they are asked for."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return {"is_done": lambda handle: True, "receive": list}.get(name, lambda *arguments: 1)


def queued_transfers(count: int) -> float:
    """One of so many transfers that are posted at once to `NUM_PEERS` peers, from its post until it has settled."""
    table = RegionTable([MemoryRegion(1 << 20, 1 << 30)])
    addresses = np.arange(16) * 4096 + (1 << 20)
    copies = CopyList.of(addresses, addresses, 4096)
    owner = Owner("bench", _Instant, lambda peer, payload: None, Pace())  # type: ignore[arg-type, return-value]
    started_s, transfers = time.process_time(), []
    for number in range(count):
        peer = f"p{number % NUM_PEERS}"
        transfers.append(Transfer(peer, Direction.READ, copies, time.monotonic))
        cursor = Cursor(make_rows(copies, Direction.READ, table, table, peer))
        owner.post(SlicedTransfer(transfers[-1], peer, cursor, None))
    for transfer in transfers:
        transfer.wait(600.0)
    spent = (time.process_time() - started_s) / count
    owner.stop()
    return spent


def waiting_requests(count: int) -> float:
    """One request that ends in the decode engine's scheduler while so many others are being loaded. Needs vLLM."""
    from tests.vllm.schedulers import TOKENS, Decode, full, groups, prefill, request

    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    decode = Decode(full(64))
    for number in range(count):
        asked = request(f"d{number}", TOKENS, kv_transfer_params=params)
        list(decode.side.arrive(asked, params))
    names = iter(range(count))
    return median_s(lambda: (list(decode.side.ended(f"d{next(names)}")), decode.side.is_waiting), REPEATS)


EVENTS: dict[str, tuple[Callable[[int], float], tuple[int, ...]]] = {
    "turn of a source, by offered leases": (offered_leases, (1024, 8192, 65_536)),
    "lease given back, by watched requests": (watched_requests, (100, 1000, 10_000)),
    "renewal, by known sources": (known_sources, (100, 400, 1600)),
    "transfer, by queued transfers": (queued_transfers, (500, 2000, 8000)),
}
if importlib.util.find_spec("vllm") is not None:
    EVENTS["request that ends in the scheduler, by waiting requests"] = (waiting_requests, (100, 1000, 10_000))
