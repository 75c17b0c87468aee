"""Arithmetic of ownerships along one axis: how many coordinates two of them have in common.

Every ownership is an interval that repeats, a *turn*: `size` coordinates from `start` on, every `period`. An axis with an end repeats
after its extent, a sequence that is held whole after one coordinate.

Turns are never laid out over their common period, which is a product where their steps share no divisor: turns of periods P and Q meet
wherever their phases agree modulo gcd(P, Q), and each such pair of phases once in lcm(P, Q). So the remainders alone are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvreshard.model.ownership import Coordinates, Cyclic, Ownership


class Turn(NamedTuple):
    """`size` coordinates from `start` on, every `period`."""

    start: int
    size: int
    period: int


def turn(extent: int | None, owned: Ownership) -> Turn:
    """An ownership of an axis of `extent` coordinates, an interval inside it; None for the sequence, of which an interval is all.

    >>> from kvreshard.model.ownership import Cyclic, Interval
    >>> turn(8, Interval(2, 4)), turn(None, Cyclic(16, 16, 32))
    (Turn(start=2, size=2, period=8), Turn(start=16, size=16, period=32))
    """
    if isinstance(owned, Cyclic):
        return Turn(owned.start, owned.run, owned.step)
    if extent is None:
        return Turn(0, 1, 1)
    return Turn(owned.start, (owned.stop or extent) - owned.start, extent)


def exact_period(extent: int | None, owners: Iterable[Ownership]) -> int:
    """Coordinates after which membership of all `owners` repeats, however many; the extent of an axis with an end."""
    return extent if extent is not None else math.lcm(*(owned.period for owned in owners))


def count_common(extent: int | None, first: Ownership, second: Ownership) -> int:
    """How many coordinates of one `exact_period` both hold.

    >>> from kvreshard.model.ownership import Cyclic, Interval
    >>> count_common(8, Interval(0, 4), Interval(3, 8)), count_common(None, Cyclic(0, 1, 2), Cyclic(0, 2, 3))
    (1, 2)
    """
    (start, size, period), (other_start, other_size, other_period) = turn(extent, first), turn(extent, second)
    shared = math.gcd(period, other_period)
    # Pairs of a coordinate of either turn that are equal modulo `shared`: whole laps of it, and what is left of both.
    (laps, rest), (other_laps, other_rest) = divmod(size, shared), divmod(other_size, shared)
    ahead = (other_start - start) % shared
    both = max(0, min(rest, ahead + other_rest) - ahead) + max(0, min(rest, ahead + other_rest - shared))
    return laps * other_laps * shared + laps * other_rest + other_laps * rest + both


def count_in_windows(first: Ownership, second: Ownership, low: Coordinates, high: Coordinates) -> Coordinates:
    """How many coordinates of the sequence both hold within each window `[low, high)`, shape (n,)."""
    longer, other = sorted((turn(None, first), turn(None, second)), key=lambda held: -held.period)
    if longer.period == 1:
        return high - low  # both hold all of it
    # The turns of the longer period are looked at one by one, of the other it is known how many coordinates lie below.
    start, size, period = longer
    first_lap = (low - start - size) // period + 1
    laps = np.maximum(0, -((start - high) // period) - first_lap)
    window = np.repeat(np.arange(len(low)), laps)
    begins = start + period * (np.arange(len(window)) - np.repeat(np.cumsum(laps) - laps - first_lap, laps))
    ends = np.stack([np.maximum(begins, low[window]), np.minimum(begins + size, high[window])])
    whole, phase = np.divmod(ends, other.period)
    below = whole * other.size + np.clip(phase - other.start, 0, other.size)
    counts = np.zeros(len(low), dtype=np.int64)
    np.add.at(counts, window, below[1] - below[0])
    return counts
