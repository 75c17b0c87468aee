"""The ranks that take part in a comparison: source ranks as processes of their own, and one destination rank, here.

1. Each source is a worker of `testing.ranks` with a memory file, a NIXL agent and its polling thread; both sides read from it.
2. The destination has two agents over the same memory: ours, behind `NixlTransport`, and a plain one for the in-tree
   connector. Neither has a progress thread (see `intree`).
3. `relocated` gives layouts their real addresses; `fill` writes random bytes to the pages of a request at the sources.
4. `wipe` and `snapshot` check what arrived: both sides must leave the same bytes, and `wanted` says which.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench.shapes import total_bytes
from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan.bind import bind
from kvreshard.plan.route import Route
from kvreshard.session.mover import Mover, Staging
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.local import HostMemory
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.nixl_agent import load_nixl
from kvreshard.transport.regions import decode_metadata

STAGING_BYTES = 64 << 20
# vLLM 0.32.0, nixl/base_worker.py: what its agents have unless told otherwise.
INTREE_THREADS = 4
# So many copies are compared one by one, more of them by index.
MAX_SLICED = 4096
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}


class Arena:
    """One destination rank, and the source ranks that it reads from. Use as a context.

    `plain` is an agent as the in-tree connector makes one, but without a progress thread.
    """

    def __init__(self, src: EngineLayout, dst: EngineLayout, dst_rank: int, src_ranks: Sequence[int]) -> None:
        for key, value in ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        self.src_ranks, self.dst_rank = tuple(src_ranks), dst_rank
        src_bytes = max(total_bytes(src, rank) for rank in src_ranks)
        dst_bytes = total_bytes(dst, dst_rank)
        self._close = contextlib.ExitStack()
        self.sources = self._close.enter_context(ProcessRanks(len(src_ranks), src_bytes, environment=ENVIRONMENT))
        self._map = mmap.mmap(
            -1,
            dst_bytes + STAGING_BYTES,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000),
        )
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        self.address, self.dst_bytes, self.src_bytes = int(self.memory.ctypes.data), dst_bytes, src_bytes
        self.memory[dst_bytes::4096] = 1  # an engine's buffer is resident
        self.transport = NixlTransport("bench")
        self._close.callback(self.transport.close)
        self.transport.register(
            [MemoryRegion(self.address, dst_bytes), MemoryRegion(self.address + dst_bytes, STAGING_BYTES)]
        )
        api = load_nixl()
        config = api.nixl_agent_config(enable_prog_thread=False, num_threads=INTREE_THREADS)
        self.plain: Any = api.nixl_agent(f"plain-{os.getpid()}-{id(self):x}", config)
        self.plain.register_memory(np.array([[self.address, dst_bytes + STAGING_BYTES, 0]], dtype=np.uint64), "DRAM")
        self.metadata = {rank: self.sources.metadata(number) for number, rank in enumerate(src_ranks)}
        self.native = {rank: decode_metadata("nixl", data).native for rank, data in self.metadata.items()}
        self.src = self._relocated(src, {rank: self.sources.address(n) for n, rank in enumerate(src_ranks)})
        self.dst = self._relocated(dst, {dst_rank: self.address})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._close.close()
        self.plain = None

    def _relocated(self, layout: EngineLayout, real: dict[int, int]) -> EngineLayout:
        """Ranks that do not take part keep made-up addresses."""
        addresses = {
            rank.rank: {region.name: real.get(rank.rank, region.address) for region in rank.regions}
            for rank in layout.ranks
        }
        return relocate(layout, addresses)

    def src_address(self, rank: int) -> int:
        """Where a source rank's memory begins, in its own process."""
        return self.sources.address(self.src_ranks.index(rank))

    @property
    def staging_address(self) -> int:
        """Where the staging buffer begins."""
        return self.address + self.dst_bytes

    def mover(self) -> Mover:
        """Ours, knowing every source."""
        names = {rank: f"source {rank}" for rank in self.src_ranks}
        for rank, name in names.items():
            if name not in self.transport._peers:
                self.transport.add_peer(name, self.metadata[rank])
        buffer = Staging(self.staging_address, STAGING_BYTES)
        return Mover(self.transport, HostMemory(), names, buffer)

    def fill(self, request: Request, seed: int = 0) -> None:
        """Random bytes in the pages that a request has at the sources."""
        for number, rank in enumerate(self.src_ranks):
            rng = np.random.default_rng(seed + number)
            memory = self.sources.memory(number)
            for low, high in self._ranges(self.src, rank, request.src_tables):
                words = rng.integers(0, 1 << 64, (high - low) // 8 + 1, dtype=np.uint64)
                memory[low:high] = words.view(np.uint8)[: high - low]

    def wipe(self, request: Request) -> None:
        """Overwrite the pages that a request has here."""
        for low, high in self._ranges(self.dst, self.dst_rank, request.dst_tables):
            self.memory[low:high] = 0xEE

    def snapshot(self, request: Request) -> int:
        """A digest of the pages that a request has here: their bytes in order, folded by position."""
        total = 0
        for low, high in self._ranges(self.dst, self.dst_rank, request.dst_tables):
            part = self.memory[low : low + (high - low) // 8 * 8].view(np.uint64)
            weights = np.arange(1, len(part) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            total = (total * 31 + int((part * weights).sum(dtype=np.uint64))) & (2**64 - 1)
        return total

    def check_arrived(self, route: Route, request: Request) -> int:
        """Compare every byte that the route copies with its source, one by one; how many. Raises AssertionError."""
        checked = 0
        for copies in bind(route, request):
            number = self.src_ranks.index(copies.src_rank)
            src = copies.src_address - self.sources.address(number)
            dst, source, memory = copies.dst_address - self.address, self.sources.memory(number), self.memory
            if len(src) <= MAX_SLICED:
                for low, to, length in zip(src.tolist(), dst.tolist(), copies.length.tolist(), strict=True):
                    assert np.array_equal(source[low : low + length], memory[to : to + length]), (
                        "bytes differ from their source"
                    )
                checked += copies.num_bytes
                continue
            unit = 8 if not ((src | dst | copies.length) & 7).any() else 1
            words = (
                source[: len(source) // unit * unit].view(f"u{unit}"),
                memory[: len(memory) // unit * unit].view(f"u{unit}"),
            )
            for length in np.unique(copies.length).tolist():
                chosen = np.flatnonzero(copies.length == length)
                reach, step = np.arange(length // unit), max(1, (4 << 20) // length)
                for part in (chosen[low : low + step] for low in range(0, len(chosen), step)):
                    there = words[0][(src[part] // unit)[:, None] + reach]
                    here = words[1][(dst[part] // unit)[:, None] + reach]
                    assert np.array_equal(there, here), "bytes differ from their source"
                checked += length * len(chosen)
        return checked

    @staticmethod
    def _ranges(layout: EngineLayout, rank: int, tables: Mapping[str, PageTable]) -> Iterator[tuple[int, int]]:
        """Byte ranges of the rank's memory in which the tables' pages lie, runs of pages joined."""
        pages = np.unique(np.concatenate([table.pages for table in tables.values()]))
        starts = np.flatnonzero(np.concatenate([[True], np.diff(pages) > 1]))
        ends = np.concatenate([starts[1:], [len(pages)]])
        for slab in layout.rank_by_number[rank].slabs:
            for first, last in zip(pages[starts].tolist(), pages[ends - 1].tolist(), strict=True):
                low = slab.offset_bytes + first * slab.page_stride_bytes
                yield low, slab.offset_bytes + last * slab.page_stride_bytes + slab.page_bytes
