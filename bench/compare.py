"""Two ways of doing the same thing in turn: which is faster, and how sure that is.

1. Both run once unmeasured, then take turns: a busy machine slows a pair, not one side of it.
2. Of every pair the ratio theirs / ours is kept, above 1 where ours is faster, and so are wall and processor time.
3. Who comes second finds the other's work in the caches, which is a tenth of a short work's time or more: both orders take turns, and
   the result is the geometric mean of the medians of either, with a 95 % interval from 4,000 bootstrap samples of the pairs of either.

Processor time is that of this process with all of its threads.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NUM_SAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one run."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians in seconds, and the ratio theirs / ours with its interval, in wall and in processor time."""

    ours: Spent
    theirs: Spent
    wall_ratio: tuple[float, float, float]
    cpu_ratio: tuple[float, float, float]
    pairs: int


def spend(work: Callable[[], object]) -> Spent:
    """What one run takes. The collector of garbage waits, as it would for either side alike."""
    gc.collect(0)
    gc.disable()
    try:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        work()
        return Spent(time.perf_counter() - wall_s, time.process_time() - cpu_s)
    finally:
        gc.enable()


def compare(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    *,
    pairs: int = 15,
    budget_s: float = 20.0,
    between: Callable[[], object] = lambda: None,
) -> Comparison:
    """At least six pairs, at most `pairs`, none begun after `budget_s`. `between` runs before each side, unmeasured."""
    between()
    ours()
    between()
    theirs()
    found: list[tuple[Spent, Spent]] = []
    started_s = time.perf_counter()
    while len(found) < 6 or (len(found) < pairs and time.perf_counter() - started_s < budget_s):
        sides: dict[bool, Spent] = {}
        for is_ours in (True, False) if len(found) % 2 else (False, True):
            between()
            sides[is_ours] = spend(ours if is_ours else theirs)
        found.append((sides[True], sides[False]))
    table = np.array([[o.wall_s, o.cpu_s, t.wall_s, t.cpu_s] for o, t in found])
    middle = np.median(table, axis=0)
    return Comparison(
        Spent(float(middle[0]), float(middle[1])),
        Spent(float(middle[2]), float(middle[3])),
        balanced(table[:, 2] / table[:, 0]),
        balanced(table[:, 3] / np.maximum(table[:, 1], 1e-9)),
        len(found),
    )


def interval(values: NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """Median, and the bounds of its 95 % bootstrap interval."""
    low, high = np.quantile(_medians(values, np.random.default_rng(seed)), [0.025, 0.975])
    return float(np.median(values)), float(low), float(high)


def balanced(ratios: NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """Of ratios whose orders take turns: the geometric mean of the medians of both orders, and the bounds of its 95 % bootstrap interval."""
    rng = np.random.default_rng(seed)
    orders = ratios[0::2], ratios[1::2]
    first, second = (_medians(one, rng) for one in orders)
    low, high = np.quantile(np.sqrt(first * second), [0.025, 0.975])
    return float(np.sqrt(np.median(orders[0]) * np.median(orders[1]))), float(low), float(high)


def _medians(values: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Of so many bootstrap samples."""
    medians: NDArray[np.float64] = np.median(values[rng.integers(0, len(values), (NUM_SAMPLES, len(values)))], axis=1)
    return medians


def median_s(work: Callable[[], object], times: int = 5, cpu: bool = True) -> float:
    """Median seconds of one side alone, after a run to warm up."""
    work()
    found = [spend(work) for _ in range(times)]
    return float(np.median([spent.cpu_s if cpu else spent.wall_s for spent in found]))
