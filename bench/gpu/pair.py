"""One destination rank, here, and the source ranks that it reads from, as processes, with their memory on a device.

1. Sources are ranks of `testing.ranks`. The destination has memory of the same kind, a staging buffer behind it, and a transport.
2. `fill` gives the sources random bytes. `load` reads one request the way that a route says.
3. `content` are the destination's bytes, for a comparison of two ways.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from bench.shapes import Shape, pages_per_request, request, total_bytes
from kvreshard.kinds.assemble import relocate
from kvreshard.model import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.compile import compile_route
from kvreshard.plan.cost import CostModel, Way
from kvreshard.plan.route import Route
from kvreshard.session.mover import Mover, Staging
from kvreshard.session.transfer import pull
from kvreshard.testing.rank_memory import make_block
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.transport.nixl import NixlTransport

STAGING_BYTES = 64 << 20
# More pages than the request has, so that random ones have gaps.
SPARE = 1.25
TILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Spent:
    """Medians of some runs: seconds by the clock, and of this process's processor time."""

    wall_s: float
    cpu_s: float


class Pair:
    """Engines of a shape, the first `dst_rank` of the second one here. Use as a context."""

    def __init__(self, shape: Shape, num_tokens: int, device: str, dst_rank: int = 0) -> None:
        needed = max(
            sum(count for _, count in pages_per_request(layout, num_tokens).values()) for layout in shape.layouts(2)
        )
        src, dst = shape.layouts(int(needed * SPARE) + 2)
        self.src_ranks, self.dst_rank, self.device = compile_route(src, dst, dst_rank).src_ranks, dst_rank, device
        src_bytes, dst_bytes = max(total_bytes(src, rank) for rank in self.src_ranks), total_bytes(dst, dst_rank)
        self._close = contextlib.ExitStack()
        sources = ProcessRanks(len(self.src_ranks), src_bytes, devices=[device] * len(self.src_ranks))
        self.sources = self._close.enter_context(sources)
        for number in range(len(self.src_ranks)):
            sources.attend(number, True)
        self._mirror, self.block = make_block(dst_bytes + STAGING_BYTES, device)
        self.transport = NixlTransport("pair", enter=self.block.enter)
        self._close.callback(self.transport.close)
        self.transport.register([self.block.region])
        self.names = {rank: f"source {rank}" for rank in self.src_ranks}
        for number, rank in enumerate(self.src_ranks):
            self.transport.add_peer(self.names[rank], sources.metadata(number))
        self.dst_bytes = dst_bytes
        self.src = self._placed(src, {rank: sources.address(number) for number, rank in enumerate(self.src_ranks)})
        self.dst = self._placed(dst, {dst_rank: self.block.region.address})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._close.close()

    def _placed(self, layout: EngineLayout, real: dict[int, int]) -> EngineLayout:
        addresses = {
            rank.rank: {region.name: real.get(rank.rank, region.address) for region in rank.regions}
            for rank in layout.ranks
        }
        return relocate(layout, addresses, self.device)

    def fill(self, seed: int = 0) -> None:
        """Random bytes in the sources' memory, a tile of them over and over."""
        for number in range(len(self.src_ranks)):
            tile = np.random.default_rng(seed + number).integers(0, 256, TILE_BYTES, dtype=np.uint8)
            memory = self.sources.memory(number)
            for start in range(0, len(memory), TILE_BYTES):
                memory[start : start + TILE_BYTES] = tile[: len(memory) - start]
            self.sources.give(number)

    def request(self, num_tokens: int, table: str) -> Request:
        """One request with pages of one kind of table on both sides."""
        return request(self.src, self.dst, num_tokens, table)

    def route(self, way: Way | None = None, cost: CostModel = CostModel()) -> Route:  # noqa: B008 (frozen)
        """The destination's."""
        return compile_route(self.src, self.dst, self.dst_rank, way=way, cost=cost)

    def mover(self, staging: bool = True) -> Mover:
        """What a rank carries requests out with."""
        address = self.block.region.address + self.dst_bytes
        return Mover(
            self.transport, self.block.memory, self.names, Staging(address, STAGING_BYTES) if staging else None
        )

    def load(self, mover: Mover, route: Route, wanted: Request) -> int:
        """Read a request; returns its bytes of cache."""
        return pull(mover, route, wanted, self.dst).num_bytes

    def wipe(self) -> None:
        """Zero all pages here."""
        start = np.array([self.block.region.address], dtype=np.int64)
        self.block.memory.zero(start, start + self.dst_bytes)

    def content(self) -> NDArray[np.uint8]:
        """All bytes of the pages here, as a copy."""
        self.block.download()
        return self._mirror[: self.dst_bytes].copy()


def spend(work: Callable[[], object], times: int = 5, budget_s: float = 8.0) -> Spent:
    """Run some work, once before anything counts, then until it has been run `times` times or the budget is spent."""
    work()
    walls, cpus, until_s = [], [], time.monotonic() + budget_s
    while len(walls) < times and (not walls or time.monotonic() < until_s):
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        work()
        walls.append(time.perf_counter() - wall_s)
        cpus.append(time.process_time() - cpu_s)
    return Spent(statistics.median(walls), statistics.median(cpus))


def in_turn(works: Sequence[Callable[[], object]], times: int = 7, budget_s: float = 4.0) -> list[float]:
    """Medians by the clock of some works, measured alternately after a run each; once at least, and not much longer than the budget."""
    spent: list[list[float]] = [[] for _ in works]
    until_s = time.monotonic() + budget_s
    for number in range(times + 1):
        if number > 1 and time.monotonic() > until_s:
            break
        for index, work in enumerate(works):
            started_s = time.perf_counter()
            work()
            if number:
                spent[index].append(time.perf_counter() - started_s)
    return [statistics.median(column) for column in spent]
