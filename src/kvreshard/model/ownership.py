"""Ownership: the coordinates of one axis that a rank holds.

A half-open `Interval` (heads, channels, all tokens), or a `Cyclic` set (context parallelism: `run` consecutive coordinates
out of every `step`). Both have the same members, on whole NumPy arrays, so that callers need not distinguish them:

1. `contains`: whether a coordinate is held;
2. `to_local`, `to_global`: its index among the held ones, and back;
3. `edges`: where membership changes within a window;
4. `next_held`: the first stretch of held coordinates from one on;
5. `count_below`: held coordinates below a bound.

Empty, negative or overlapping sets raise LayoutError.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import LayoutError

Coordinates = NDArray[np.int64]
N = TypeVar("N", int, Coordinates)
# Coordinates, sizes and their sums stay far from where an int64 wraps around, whatever a peer sends.
MAX_SIZE = 1 << 48
# Above every coordinate.
BEYOND = 1 << 60


class Interval(msgspec.Struct, frozen=True, cache_hash=True):
    """The coordinates `start <= c < stop`; `stop=None` has no end (a sequence)."""

    start: int
    stop: int | None

    def __post_init__(self) -> None:
        if self.start < 0:
            raise LayoutError(f"interval {self}: starts below zero; a coordinate counts from 0")
        if self.stop is not None and self.stop <= self.start:
            raise LayoutError(f"interval {self}: stop {self.stop} is not above start {self.start}; it holds nothing")
        if max(self.start, self.stop or 0) > MAX_SIZE:
            raise LayoutError(f"interval {self}: ends above {MAX_SIZE}")

    @property
    def period(self) -> int:
        """After how many coordinates the pattern of membership repeats."""
        return 1

    @property
    def run(self) -> int:
        """How many consecutive coordinates are held within a period."""
        return 1

    def contains(self, coordinates: Coordinates) -> NDArray[np.bool_]:
        held = coordinates >= self.start
        return held if self.stop is None else held & (coordinates < self.stop)

    def to_local(self, coordinates: N) -> N:
        return coordinates - self.start

    def to_global(self, local: Coordinates) -> Coordinates:
        return local + self.start

    def edges(self, low: int, high: int) -> Coordinates:
        ends = [self.start] if self.stop is None else [self.start, self.stop]
        return np.array([end for end in ends if low <= end <= high], dtype=np.int64)

    def next_held(self, coordinate: int) -> tuple[int, int]:
        """The first stretch `[start, stop)` of held coordinates from this one on; far outside where there is none.

        >>> Interval(2, 6).next_held(0), Interval(2, 6).next_held(4), Cyclic(1, 2, 8).next_held(3)
        ((2, 6), (4, 6), (9, 11))
        """
        stop = BEYOND if self.stop is None else self.stop
        return (max(coordinate, self.start), stop) if coordinate < stop else (BEYOND, BEYOND)

    def count_below(self, bound: int) -> int:
        top = bound if self.stop is None else min(bound, self.stop)
        return max(0, top - self.start)

    def __str__(self) -> str:
        return f"[{self.start}, {'...' if self.stop is None else self.stop})"


class Cyclic(msgspec.Struct, frozen=True, cache_hash=True):
    """The coordinates with `start <= c mod step < start + run`, without end."""

    start: int
    run: int
    step: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.run <= 0 or self.start + self.run > self.step:
            raise LayoutError(
                f"cyclic set start={self.start} run={self.run} step={self.step}: "
                "needs start >= 0, run >= 1 and start + run <= step"
            )
        if self.step > MAX_SIZE:
            raise LayoutError(f"cyclic set of step {self.step}: must not be above {MAX_SIZE}")

    @property
    def period(self) -> int:
        return self.step

    def contains(self, coordinates: Coordinates) -> NDArray[np.bool_]:
        phase = coordinates % self.step
        return (phase >= self.start) & (phase < self.start + self.run)

    def to_local(self, coordinates: N) -> N:
        lap = coordinates // self.step
        return lap * self.run + (coordinates - lap * self.step - self.start)

    def to_global(self, local: Coordinates) -> Coordinates:
        lap, phase = np.divmod(local, self.run)
        return lap * self.step + self.start + phase

    def edges(self, low: int, high: int) -> Coordinates:
        laps = np.arange(low // self.step, high // self.step + 1, dtype=np.int64) * self.step
        ends = np.concatenate([laps + self.start, laps + self.start + self.run])
        return ends[(ends >= low) & (ends <= high)]

    def next_held(self, coordinate: int) -> tuple[int, int]:
        lap, phase = divmod(coordinate, self.step)
        first = (lap + (phase >= self.start + self.run)) * self.step + self.start
        return max(coordinate, first), first + self.run

    def count_below(self, bound: int) -> int:
        lap, phase = divmod(bound, self.step)
        return lap * self.run + min(max(0, phase - self.start), self.run)

    def __str__(self) -> str:
        return f"{self.run} of every {self.step} from {self.start}"


Ownership = Interval | Cyclic


def count_within(owned: Ownership, low: int, high: int) -> int:
    """How many coordinates of `owned` lie in `[low, high)`."""
    return owned.count_below(high) - owned.count_below(low)


def split_evenly(extent: int, parts: int, index: int) -> Interval:
    """The interval of part `index` of `parts` of an axis of `extent` coordinates.

    While there are enough coordinates, part r holds `[floor(r*E/t), floor((r+1)*E/t))`; with more parts than
    coordinates, part r holds coordinate `floor(r*E/t)` alone, so that several parts hold the same one.
    """
    if extent <= 0 or parts <= 0 or not 0 <= index < parts:
        raise LayoutError(f"cannot take part {index} of {parts} of an axis of {extent}: sizes must be positive")
    low = index * extent // parts
    if parts > extent:
        return Interval(low, low + 1)
    return Interval(low, (index + 1) * extent // parts)
