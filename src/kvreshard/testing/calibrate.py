"""The constants of the cost model, measured on this machine: seconds per copy, per byte read, per run moved, per byte moved.

Reads go between two rank processes of this host, over the transport that is used (`ranks`); moves within this process, on the same device.

1. Reads: many small pieces and many larger ones, in turn. Two unknowns (seconds per piece, seconds per byte), two medians. Then a few large
   ones, as a staging batch reads them.
2. Moves: short and long runs from one buffer to another, by the code that permutes staged pages.
3. Both at once: a few large reads while as many bytes are moved, as a staging batch is moved on while the next is read. The time saved over
   one after the other was hidden; `COUNTED` of it counts.
4. On a device, a tiny read and a tiny move: what each batch takes beside its bytes.

Between hosts the reads differ and the moves do not: calibrate with ranks on both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from kvreshard.plan.copies import CopyList
from kvreshard.plan.cost import MEASURED_SPEEDUP, CostModel
from kvreshard.plan.refine import Loop
from kvreshard.plan.stage import Move
from kvreshard.testing.rank_memory import make_block
from kvreshard.testing.ranks import Ranks
from kvreshard.transport.base import Direction

# Bytes of a piece, and number of pieces.
SMALL, MEDIUM, LARGE = (1024, 16_384), (32 << 10, 4096), (4 << 20, 32)
# Bytes of a moved run, and of its page.
SHORT, LONG = (256, 8192), (8192, 16_384)
MEMORY_BYTES, MOVED_BYTES = 256 << 20, 64 << 20
ROUNDS = 7
# Here two processes read and move independently. A rank's two threads pass each batch on in one buffer, and hide a third to a half of what
# is hidden here, in the median (docs/design/0032).
COUNTED = 0.5
# A cost model with a constant of zero would choose absurdly.
LEAST_S = 1e-9


def calibrate(ranks: Ranks) -> CostModel:
    """The constants; `ranks` are two connected ranks of at least `MEMORY_BYTES` each."""
    copy_s, read_bytes_per_s, stage_bytes_per_s = _reads(ranks)
    move_run_s, move_bytes_per_s = _moves(ranks.device(0))
    return CostModel(
        copy_s,
        read_bytes_per_s,
        move_run_s,
        move_bytes_per_s,
        stage_bytes_per_s,
        _hidden(ranks),
        _batch_s(ranks),
        MEASURED_SPEEDUP,
    )


def _reads(ranks: Ranks) -> tuple[float, float, float]:
    rng = np.random.default_rng(0)
    for rank in range(2):
        ranks.memory(rank)[:] = 1
        ranks.give(rank)

    def read(length: int, count: int) -> Callable[[], float]:
        here, there = (rng.permutation(ranks.memory_bytes // length)[:count] * length for _ in range(2))
        copies = CopyList.of(ranks.address(1) + there, ranks.address(0) + here, length)
        return lambda: ranks.run(0, 1, Direction.READ, copies).seconds or LEAST_S

    small_s, medium_s, large_s = _in_turn(*(read(*kind) for kind in (SMALL, MEDIUM, LARGE)))
    copy_s, read_bytes_per_s = _solve(
        *((s, count, count * length) for s, (length, count) in ((small_s, SMALL), (medium_s, MEDIUM)))
    )
    length, count = LARGE
    return copy_s, read_bytes_per_s, length * count / large_s


def _moves(device: str) -> tuple[float, float]:
    buffers = _Buffers(device)
    short_s, long_s = _in_turn(buffers.move(*SHORT), buffers.move(*LONG))
    return _solve(*((s, MOVED_BYTES // run, MOVED_BYTES) for s, (run, _) in ((short_s, SHORT), (long_s, LONG))))


def _hidden(ranks: Ranks) -> float:
    length, count = LARGE[0], MOVED_BYTES // LARGE[0]
    at = np.arange(count, dtype=np.int64) * length
    copies = CopyList.of(ranks.address(1) + at, ranks.address(0) + at, length)
    move = _Buffers(ranks.device(0)).move(*LONG)

    def read(meanwhile: Callable[[], object] = lambda: None) -> float:
        started_s = time.perf_counter()
        job = ranks.post(0, 1, Direction.READ, copies)
        meanwhile()
        ranks.wait(0, job)
        return time.perf_counter() - started_s

    read_s, move_s, both_s = _in_turn(read, move, lambda: read(move))
    return COUNTED * min(1.0, max(0.0, (read_s + move_s - both_s) / min(read_s, move_s)))


def _batch_s(ranks: Ranks) -> float:
    """Seconds of a tiny read and a tiny move, one after the other; zero on the processor, where the next batch hides them (docs/design/0032)."""
    if ranks.device(0) == "cpu":
        return 0.0
    copies = CopyList.of([ranks.address(1)], [ranks.address(0)], SHORT[0])
    return sum(
        _in_turn(
            lambda: ranks.run(0, 1, Direction.READ, copies).seconds or LEAST_S,
            _Buffers(ranks.device(0)).move(*SHORT, 1),
        )
    )


class _Buffers:
    """Two buffers of this process, side by side on one device, and moves from the first to the second."""

    def __init__(self, device: str) -> None:
        self._array, self._block = make_block(3 * MOVED_BYTES, device)
        self._array[:] = 1
        self._block.upload()
        self._rng = np.random.default_rng(0)

    def move(self, run: int, page: int, num_pages: int | None = None) -> Callable[[], float]:
        """Measures the seconds of moving `num_pages` scattered pages (all by default) of `page` bytes in runs of `run` bytes."""
        pages = self._rng.permutation(MOVED_BYTES // page)[:num_pages].astype(np.int64) * 2 * page
        source = self._block.region.address
        at = np.arange(len(pages), dtype=np.int64) * page
        first, bases = np.zeros(1, dtype=np.int64), np.array([source + MOVED_BYTES], dtype=np.int64)
        move = Move(run, (Loop(page // run, run, 2 * run),), first, at, bases, pages)

        def once() -> float:
            started_s = time.perf_counter()
            self._block.memory.move(source, move)
            return time.perf_counter() - started_s

        return once


def _in_turn(*works: Callable[[], float]) -> list[float]:
    """The median of each, measured in turn after one round that does not count."""
    found = [[work() for work in works] for _ in range(1 + ROUNDS)]
    return [statistics.median(column) for column in zip(*found[1:], strict=True)]


def _solve(small: tuple[float, int, int], large: tuple[float, int, int]) -> tuple[float, float]:
    """(seconds per piece, bytes per second) from two (seconds, pieces, bytes)."""
    table = np.array([small[1:], large[1:]], dtype=np.float64)
    each_s, byte_s = np.linalg.solve(table, np.array([small[0], large[0]])).tolist()
    return max(each_s, LEAST_S), 1 / max(byte_s, LEAST_S / 1000)
