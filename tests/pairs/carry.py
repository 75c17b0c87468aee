"""Carries out a request as engines do it, on real memory, to compare what it leaves with the oracle.

`apply` lists what a plan says, one copy after the other. Here the session's own steps move it: a memory transport, staging buffers,
the permute of host memory.

1. Give every rank of both engines memory of its own, regions as far apart as the layout says where that is near.
2. Route the layouts at those addresses, transfers read as `way` says.
3. Pull on every destination rank, or push on every source rank after the destination has zeroed its new pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvreshard.kinds.assemble import relocate
from kvreshard.model import BindError, EngineLayout
from kvreshard.model.rank import Rank
from kvreshard.model.tables import Request
from kvreshard.plan import Route, compile_route, elect, match_fields
from kvreshard.plan.cost import Way
from kvreshard.plan.request_check import check_request
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.transfer import pull, push
from kvreshard.testing.oracle import Bytes, Memory
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.local import HostMemory, LocalMemory
from kvreshard.transport.memory import Fabric, MemoryTransport

MakeMemory = Callable[[Sequence[Bytes]], LocalMemory]
"""From all arrays that a destination rank has, its staging buffer among them, what zeroes and permutes them."""
# Regions further apart than that are laid out anew: nothing of one could be taken for a neighbour of the other.
MAX_SPAN_BYTES = 1 << 24
PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class _Engine:
    """An engine with memory: its layout at real addresses, and views of its regions by rank and name."""

    layout: EngineLayout
    memory: dict[tuple[int, str], Bytes]

    @staticmethod
    def of(layout: EngineLayout, memory: Memory) -> _Engine:
        """With a copy of `memory`."""
        views: dict[tuple[int, str], Bytes] = {}
        for rank in layout.ranks:
            offsets, size_bytes = _offsets(rank)
            own = np.zeros(size_bytes + PAGE_BYTES, dtype=np.uint8)
            own = own[-int(own.ctypes.data) % PAGE_BYTES :]
            for region in rank.regions:
                view = own[offsets[region.name] : offsets[region.name] + region.size_bytes]
                view[:] = memory[rank.rank, region.name]
                views[rank.rank, region.name] = view
        addresses = {
            rank.rank: {region.name: int(views[rank.rank, region.name].ctypes.data) for region in rank.regions}
            for rank in layout.ranks
        }
        return _Engine(relocate(layout, addresses), views)

    def transport(self, fabric: Fabric, rank: Rank, name: str) -> MemoryTransport:
        """Of one rank, with its regions."""
        made = MemoryTransport(fabric, name)
        made.register([MemoryRegion(region.address, region.size_bytes) for region in rank.regions])
        return made


def _offsets(rank: Rank) -> tuple[dict[str, int], int]:
    """Where each region lies in a rank's memory, and where that ends."""
    low = min((region.address for region in rank.regions), default=0)
    size_bytes = max((region.address + region.size_bytes - low for region in rank.regions), default=0)
    if size_bytes <= MAX_SPAN_BYTES:
        return {region.name: region.address - low for region in rank.regions}, size_bytes
    found, size_bytes = {}, 0
    for region in rank.regions:
        found[region.name] = size_bytes
        size_bytes += region.size_bytes + PAGE_BYTES
    return found, size_bytes


def carry(
    src: EngineLayout,
    dst: EngineLayout,
    request: Request,
    src_memory: Memory,
    dst_memory: Memory,
    *,
    way: Way | None,
    staging_bytes: int,
    is_push: bool = False,
    make_memory: MakeMemory = lambda arrays: HostMemory(),
) -> Mapping[tuple[int, str], Bytes]:
    """The destination's memory after the request, as a copy. A staging buffer of `staging_bytes`, or more where a slot needs it.

    Raises what the planner, the transport and the session raise.
    """
    source, target = _Engine.of(src, src_memory), _Engine.of(dst, dst_memory)
    fabric = Fabric()
    near = {rank.rank: source.transport(fabric, rank, f"src{rank.rank}") for rank in source.layout.ranks}
    far = {rank.rank: target.transport(fabric, rank, f"dst{rank.rank}") for rank in target.layout.ranks}
    table = elect(source.layout, target.layout, match_fields(source.layout, target.layout).names)
    routes = {rank: compile_route(source.layout, target.layout, rank, election=table, way=way) for rank in far}
    if is_push:
        for rank, route in routes.items():
            check_request(route, request)
            Mover(far[rank], HostMemory(), {}).fill(target.layout, route, request)
        for rank, transport in near.items():
            readers = [other for other, route in routes.items() if rank in route.src_ranks]
            mover = Mover(transport, HostMemory(), _meet(transport, far, readers))
            push(mover, [routes[other] for other in readers], request, rank)
        return target.memory
    for rank, route in routes.items():
        arrays = [view for (owner, _), view in target.memory.items() if owner == rank]
        peers = _meet(far[rank], near, route.src_ranks)
        _pull(far[rank], peers, route, request, target.layout, arrays, staging_bytes, make_memory)
    return target.memory


def _meet(transport: MemoryTransport, others: Mapping[int, MemoryTransport], ranks: Iterable[int]) -> dict[int, str]:
    """Add these ranks of the other engine; the names under which they are known."""
    peers = {rank: f"rank {rank}" for rank in ranks}
    for rank, name in peers.items():
        transport.add_peer(name, others[rank].metadata())
    return peers


def _pull(
    transport: MemoryTransport,
    peers: Mapping[int, str],
    route: Route,
    request: Request,
    dst: EngineLayout,
    arrays: Sequence[Bytes],
    staging_bytes: int,
    make_memory: MakeMemory,
) -> None:
    while True:
        buffer = np.zeros(staging_bytes, dtype=np.uint8)
        region = MemoryRegion(int(buffer.ctypes.data), buffer.nbytes)
        transport.register([region])
        try:
            staging = Staging(region.address, region.size_bytes)
            pull(Mover(transport, make_memory([*arrays, buffer]), peers, staging), route, request, dst)
            return
        except BindError:  # one slot does not fit; nothing has moved
            if staging_bytes > MAX_SPAN_BYTES:
                raise
            staging_bytes *= 2
        finally:
            transport.deregister([region])
