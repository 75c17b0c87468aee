"""Which nests of constant steps make up a list of byte offsets?

Offsets of consecutive coordinates come from an address map: a few digits, cut anywhere. A strip is what a strided view can
hold.

1. Take the longest run of constant step from the front.
2. If the whole list is that run repeated, describe the repetitions the same way and nest the run inside.
3. Otherwise the run is a strip, and the rest is described after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Strip:
    """Items `[first, first + size)` of a list: `counts` and `steps` of a nest of loops, outermost first."""

    first: int
    counts: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.counts)


def strips(offsets: Int64s) -> list[Strip]:
    """Strips that hold every offset once and in order.

    >>> strips(np.array([0, 2, 4, 100, 102, 104, 7]))
    [Strip(first=0, counts=(3,), steps=(2,)), Strip(first=3, counts=(3,), steps=(2,)), Strip(first=6, counts=(1,), steps=(0,))]
    >>> strips(np.array([0, 2, 100, 102, 200, 202]))
    [Strip(first=0, counts=(3, 2), steps=(100, 2))]
    """
    found: list[Strip] = []
    first = 0
    while first < len(offsets):
        rest = offsets[first:]
        counts, steps = _leading(rest)
        found.append(Strip(first, counts, steps))
        first += prod(counts)
    return found


def _leading(offsets: Int64s) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The nest that the list starts with: all of it where it repeats, else its first run."""
    if len(offsets) == 1:
        return (1,), (0,)
    distances = np.diff(offsets)
    breaks = np.flatnonzero(distances != distances[0])
    step = int(distances[0])
    if not len(breaks):
        return (len(offsets),), (step,)
    run = int(breaks[0]) + 1
    if len(offsets) % run == 0:
        blocks = offsets.reshape(-1, run)
        if run > 1 and (np.diff(blocks, axis=1) == step).all():
            outer = strips(np.ascontiguousarray(blocks[:, 0]))
            if len(outer) == 1:
                return (*outer[0].counts, run), (*outer[0].steps, step)
    return (run,), (step if run > 1 else 0,)
