"""What do a copy, a byte read, a run moved and a byte moved cost on this machine?

Between two rank processes of this host, over the transport that is used (`ranks`), and in this process's own memory:

1. Reads: small scattered pieces, and a few large ones, in turn. Two unknowns (seconds per piece, seconds per byte), two medians.
2. Moves: the same with short and with long runs from one buffer to another, by the code that permutes staged pages.

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

SMALL_BYTES = 1024
NUM_SMALL = 16_384
LARGE_BYTES = 4 << 20
MEMORY_BYTES = 256 << 20
ROUNDS = 7
# Neither kind of piece measures to nothing: a model with a constant of zero would choose absurdly.
LEAST_S = 1e-9


def calibrate(ranks: Ranks) -> CostModel:
    """The constants; `ranks` are two connected ranks of at least `MEMORY_BYTES` each."""
    copy_s, read_bytes_per_s = _reads(ranks)
    move_run_s, move_bytes_per_s = _moves()
    return CostModel(copy_s, read_bytes_per_s, move_run_s, move_bytes_per_s)


def _reads(ranks: Ranks) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    size = ranks.memory_bytes
    small = [rng.permutation(size // (2 * SMALL_BYTES))[:NUM_SMALL] * 2 * SMALL_BYTES for _ in range(2)]
    large = np.arange(size // LARGE_BYTES) * LARGE_BYTES
    for rank in range(2):
        ranks.memory(rank)[:] = 1

    def read(places: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]], length: int) -> Callable[[], float]:
        copies = Copies.of(ranks.address(0) + places[0], ranks.address(1) + places[1], length)
        return lambda: ranks.run(0, 1, Direction.READ, copies).seconds or LEAST_S

    small_s, large_s = _in_turn(read(small, SMALL_BYTES), read([large, large], LARGE_BYTES))
    return _solve((small_s, NUM_SMALL, NUM_SMALL * SMALL_BYTES), (large_s, len(large), len(large) * LARGE_BYTES))


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


def _in_turn(first: Callable[[], float], second: Callable[[], float]) -> tuple[float, float]:
    """Medians of both, measured alternately after a run each."""
    first(), second()
    found = [(first(), second()) for _ in range(ROUNDS)]
    return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)


def _solve(small: tuple[float, int, int], large: tuple[float, int, int]) -> tuple[float, float]:
    """(seconds per piece, bytes per second) from two (seconds, pieces, bytes)."""
    table = np.array([small[1:], large[1:]], dtype=np.float64)
    each_s, byte_s = np.linalg.solve(table, np.array([small[0], large[0]])).tolist()
    return max(each_s, LEAST_S), 1 / max(byte_s, LEAST_S / 1000)
