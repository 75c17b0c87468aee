"""The replay of a recorded load, without the engines on which it failed.

1. Check the recorded compatibility facts, route both recorded layouts, bind the recorded request. Compare a refusal with the recorded one.
2. List the copies, at the recorded addresses. The version of kvreshard that wrote the record made the same ones; another may plan others.
3. Give the ranks that take part memory at new addresses, as large as their regions but touched only where the request has pages.
   Source pages get random bytes, new destination pages 0xFF.
4. Move the request over the memory transport, staged as it was, and compare both sides by digests. Bytes of new pages that no copy writes
   must be zero.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvreshard import __version__
from kvreshard.kinds.assemble import relocate
from kvreshard.model import BindError, EngineLayout, KvReshardError, LayoutMismatch, wire
from kvreshard.model.rank import Rank
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import Route, bind, compile_route, find_unwritten
from kvreshard.plan.copies import CopyList
from kvreshard.session.engine_metadata import FORM, VERSION, EngineMetadata, check_compatibility
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.transfer import pull
from kvreshard.tools.digest import compare, digest_transfers
from kvreshard.tools.flight import Flight, FlightSide
from kvreshard.transport.base import MemoryRegion, TransportError
from kvreshard.transport.local import HostMemory
from kvreshard.transport.memory import Fabric, MemoryTransport

Outcome = Literal["reproduced", "not in the plan", "never met", "different"]
POISON = 0xFF
# Python has the name from 3.13 on. Without it the kernel would reserve memory for a pool of hundreds of gigabytes that is never touched.
MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
KEY = b"replay"


class ReplayError(KvReshardError):
    """A record cannot be replayed on this machine."""


@dataclass(frozen=True, slots=True)
class CopySummary:
    """A summary of copies. `by_rank`: source rank -> (copies, bytes). `digest`: the same for the same copies.

    The digest is over rows of source rank, destination rank, source address, destination address and length, in ascending order, each number
    as eight little-endian bytes.
    """

    num_copies: int
    num_bytes: int
    digest: str
    by_rank: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """The outcome. `copies`: the present copy list; `refusal`: the present refusal, empty if none; `num_bytes`: moved again."""

    outcome: Outcome
    reason: str
    dst: EngineLayout
    src: EngineLayout | None
    request: Request
    refusal: str = ""
    copies: CopySummary | None = None
    num_bytes: int = 0


def replay(flight: Flight, seed: int = 0, available_bytes: int | None = None) -> ReplayResult:
    """Repeat a recorded load. `available_bytes`: memory of this machine, None if unknown.

    Raises ReplayError if there is too little memory, KvReshardError for a record whose layouts cannot be decoded.
    """
    dst, request = wire.decode(flight.dst.layout), flight.transfer
    if flight.src is None:
        reason = "the source was never met, so there is nothing to plan: see the failure and the events"
        return ReplayResult("never met", reason, dst, None, request)
    src = wire.decode(flight.src.layout)
    found = ReplayResult("different", "", dst, src, request)
    try:
        check_compatibility(_engine_metadata(flight.dst), _engine_metadata(flight.src), flight.allow_mismatch)
        route = compile_route(src, dst, flight.rank)
        found = replace(found, copies=summarize(bind(route, request)))
    except (LayoutMismatch, BindError) as error:
        return _refused(flight, found, error)
    if flight.failure.kind == "request" or (flight.failure.kind == "mismatch" and not flight.is_routed):
        return replace(found, reason=f"it was refused then and is not now: {flight.failure.text}")
    memory = _Memory(src, dst, route, flight.staging_bytes)
    memory.fill(request, seed, available_bytes)
    found = _move(memory, found, compile_route(memory.src, memory.dst, route.dst_rank))
    if found.outcome == "not in the plan" and flight.kvreshard != __version__:
        by = f"; kvreshard {flight.kvreshard} wrote the record and may have planned other copies, this is {__version__}"
        return replace(found, reason=found.reason + by)
    return found


def summarize(lists: Iterable[CopyList]) -> CopySummary:
    """The summary of a request's copies."""
    rows = np.concatenate([np.zeros((0, 5), dtype=np.int64), *map(_rows, lists)])
    rows = rows[np.lexsort(rows.T[::-1])]
    digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=16).hexdigest()
    lengths = {int(rank): rows[rows[:, 0] == rank, 4] for rank in np.unique(rows[:, 0])}
    by_rank = {rank: (len(of_rank), int(of_rank.sum())) for rank, of_rank in lengths.items()}
    return CopySummary(len(rows), int(rows[:, 4].sum()), digest, by_rank)


def _rows(copies: CopyList) -> NDArray[np.int64]:
    ranks = [np.full(len(copies.length), rank, dtype=np.int64) for rank in (copies.src_rank, copies.dst_rank)]
    return np.stack([*ranks, copies.src_address, copies.dst_address, copies.length], axis=1)


def _refused(flight: Flight, found: ReplayResult, error: KvReshardError) -> ReplayResult:
    kind, text = "request" if isinstance(error, BindError) else "mismatch", str(error)
    if flight.failure.kind != kind:
        return replace(found, refusal=text, reason=f"this is refused now, and failed as '{flight.failure.kind}' then")
    same = flight.failure.text == text
    reason = "the same refusal" if same else "a refusal of the same kind in other words; is the version another?"
    return replace(found, outcome="reproduced", refusal=text, reason=reason)


def _move(memory: _Memory, found: ReplayResult, route: Route) -> ReplayResult:
    request, host = found.request, HostMemory()
    try:
        moved = pull(memory.mover(), route, request, memory.dst)
    except TransportError as error:
        return replace(found, reason=f"the memory transport refuses it: {error}")
    found = replace(found, num_bytes=moved.num_bytes)
    sides = (digest_transfers(route.transfers, side, request, host, KEY) for side in ("src", "dst"))
    verdict = compare(*sides)
    if verdict.differences:
        return replace(found, reason=f"wrong bytes here too: {verdict}")
    holes = find_unwritten(memory.dst, route.dst_rank, request, list(bind(route, request)))
    if any(host.read(low, high).any() for low, high in zip(holes.start.tolist(), holes.stop.tolist(), strict=True)):
        return replace(found, reason="bytes of new pages that no copy writes are not zero")
    reason = "every byte arrives: look at the transport, the peer, or the time it took"
    return replace(found, outcome="not in the plan", reason=reason)


def _engine_metadata(side: FlightSide) -> EngineMetadata:
    """As much of an engine's metadata as a record holds."""
    return EngineMetadata(
        *(FORM, VERSION, side.engine, side.instance_id, side.compatibility, side.layout, (), b"", 0.0, side.accepts)
    )


class _Memory:
    """The ranks of one load at new addresses, and a transport for each."""

    def __init__(self, src: EngineLayout, dst: EngineLayout, route: Route, staging_bytes: int) -> None:
        self._maps: list[mmap.mmap] = []
        self._route, self._staging_bytes = route, staging_bytes
        self.src = self._place(src, route.src_ranks)
        self.dst = self._place(dst, (route.dst_rank,))

    def fill(self, request: Request, seed: int, available_bytes: int | None) -> None:
        """Random bytes in the source's pages, poison in the destination's new ones. Raises ReplayError if memory does not suffice."""
        target = self.dst.rank_by_number[self._route.dst_rank]
        sources = [
            content
            for number in self._route.src_ranks
            for content in _pages(self.src, self.src.rank_by_number[number], request.src_tables)
        ]
        needed = sum(map(len, [*sources, *_pages(self.dst, target, request.dst_tables)]))
        if available_bytes is not None and needed > available_bytes:
            raise ReplayError(
                f"the pages of this load take {needed} bytes on both sides, and {available_bytes} are available; replay it on a "
                "larger machine"
            )
        rng = np.random.default_rng(seed)
        for content in sources:
            content[:] = np.frombuffer(rng.bytes(len(content)), dtype=np.uint8)
        for content in _pages(
            self.dst, target, {name: PageTable(new, 0) for name, new in request.dst_new_pages.items()}
        ):
            content[:] = POISON

    def mover(self) -> Mover:
        """The destination rank's mover, with the source ranks as peers."""
        fabric, peers = Fabric(), dict[int, str]()
        mine = MemoryTransport(fabric, "dst")
        mine.register(_regions(self.dst.rank_by_number[self._route.dst_rank]))
        staging = None
        if self._staging_bytes:
            staging = Staging(self._map(self._staging_bytes), self._staging_bytes)
            mine.register([MemoryRegion(staging.address, staging.size_bytes)])
        for number in self._route.src_ranks:
            peer = MemoryTransport(fabric, f"src{number}")
            peer.register(_regions(self.src.rank_by_number[number]))
            peers[number] = f"rank {number}"
            mine.add_peer(peers[number], peer.metadata())
        return Mover(mine, HostMemory(), peers, staging)

    def _place(self, layout: EngineLayout, ranks: tuple[int, ...]) -> EngineLayout:
        return relocate(
            layout,
            {
                rank.rank: {
                    region.name: self._map(region.size_bytes) if rank.rank in ranks else region.address
                    for region in rank.regions
                }
                for rank in layout.ranks
            },
        )

    def _map(self, size_bytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        try:
            self._maps.append(mmap.mmap(-1, size_bytes, flags=flags))
        except (OSError, ValueError, OverflowError) as error:
            raise ReplayError(f"{size_bytes} bytes of address space cannot be had: {error}") from None
        return ctypes.addressof(ctypes.c_uint8.from_buffer(self._maps[-1]))


def _regions(rank: Rank) -> list[MemoryRegion]:
    return [MemoryRegion(region.address, region.size_bytes) for region in rank.regions]


def _pages(layout: EngineLayout, rank: Rank, tables: Mapping[str, PageTable]) -> list[NDArray[np.uint8]]:
    """Views of the bytes that a request's pages own on a rank; ids outside of their pool are left out."""
    found, host = [], HostMemory()
    for group, table in ((layout.group_by_name.get(name), table) for name, table in tables.items()):
        for slab in rank.slabs:
            if group is None or slab.pool != group.pool:
                continue
            first = rank.region_by_name[slab.region].address + slab.offset_bytes
            for page in table.pages[(table.pages >= 0) & (table.pages < group.num_pages)].tolist():
                start = first + page * slab.page_stride_bytes
                found.append(host.read(start, start + slab.page_bytes))
    return found
