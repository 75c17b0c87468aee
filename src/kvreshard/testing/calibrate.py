"""What do a copy, a byte read, a run moved and a byte moved cost on this machine?

Between two rank processes of this host, over the transport that is used (`ranks`), and in this process's own memory:

1. Reads: many small pieces and many larger ones, which NIXL's threads share, in turn. Two unknowns (seconds per piece, seconds per byte),
   two medians. Then a few large ones, as a staging batch reads them.
2. Moves: short and long runs from one buffer to another, by the code that permutes staged pages.

Between hosts the reads differ and the moves do not: calibrate with ranks on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from kvreshard.plan.cost import CostModel
from kvreshard.testing.ranks import Ranks
from kvreshard.transport.base import Copies, Direction
from kvreshard.transport.local import HostMemory

# Bytes of a piece, and how many.
SMALL, MEDIUM, LARGE = (1024, 16_384), (32 << 10, 4096), (4 << 20, 32)
MEMORY_BYTES = 256 << 20
ROUNDS = 7
# Neither kind of piece measures to nothing: a model with a constant of zero would choose absurdly.
LEAST_S = 1e-9


def calibrate(ranks: Ranks) -> CostModel:
    """The constants; `ranks` are two connected ranks of at least `MEMORY_BYTES` each."""
    copy_s, read_bytes_per_s, stage_bytes_per_s = _reads(ranks)
    move_run_s, move_bytes_per_s = _moves()
    return CostModel(copy_s, read_bytes_per_s, move_run_s, move_bytes_per_s, stage_bytes_per_s)


def _reads(ranks: Ranks) -> tuple[float, float, float]:
    rng = np.random.default_rng(0)
    for rank in range(2):
        ranks.memory(rank)[:] = 1

    def read(length: int, count: int) -> Callable[[], float]:
        here, there = (rng.permutation(ranks.memory_bytes // length)[:count] * length for _ in range(2))
        copies = Copies.of(ranks.address(0) + here, ranks.address(1) + there, length)
        return lambda: ranks.run(0, 1, Direction.READ, copies).seconds or LEAST_S

    small_s, medium_s, large_s = _in_turn(*(read(*kind) for kind in (SMALL, MEDIUM, LARGE)))
    copy_s, read_bytes_per_s = _solve(
        *((s, count, count * length) for s, (length, count) in ((small_s, SMALL), (medium_s, MEDIUM)))
    )
    length, count = LARGE
    return copy_s, read_bytes_per_s, length * count / large_s


def _moves() -> tuple[float, float]:
    memory, size = HostMemory(), 64 << 20
    source, target = np.ones(size, dtype=np.uint8), np.ones(2 * size, dtype=np.uint8)
    rng = np.random.default_rng(0)

    def move(run: int, page: int) -> Callable[[], float]:
        pages = rng.permutation(size // page).astype(np.int64) * 2 * page
        loops = [(page // run, run, 2 * run)]
        bases = np.array([target.ctypes.data], dtype=np.int64)

        def once() -> float:
            started_s = time.perf_counter()
            memory.move(source.ctypes.data, page, bases, pages, run, loops, 0, 0)
            return time.perf_counter() - started_s

        return once

    short_s, long_s = _in_turn(move(256, 8192), move(8192, 16384))
    return _solve((short_s, size // 256, size), (long_s, size // 8192, size))


def _in_turn(*works: Callable[[], float]) -> list[float]:
    """Medians of all, measured alternately after a run each."""
    found = [[work() for work in works] for _ in range(1 + ROUNDS)]
    return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def _solve(small: tuple[float, int, int], large: tuple[float, int, int]) -> tuple[float, float]:
    """(seconds per piece, bytes per second) from two (seconds, pieces, bytes)."""
    table = np.array([small[1:], large[1:]], dtype=np.float64)
    each_s, byte_s = np.linalg.solve(table, np.array([small[0], large[0]])).tolist()
    return max(each_s, LEAST_S), 1 / max(byte_s, LEAST_S / 1000)
