"""How do ownerships of one axis overlap, and into which atoms do they cut it?

An axis is looked at over one period: its extent, or for the sequence the least common multiple of the cyclic steps. An
atom is a maximal part of it that every owner holds whole or not at all.

Two sets of turns are never laid out over their common period, which is a product where their steps share no divisor: turns of
steps P and Q meet wherever their phases agree modulo gcd(P, Q), each such pair of phases once in lcm(P, Q). So it is counted, and seen
for whole arrays of turns, from the remainders alone. Only what one engine's ranks share is laid out, to find its atoms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.ownership import MAX_SIZE, Coordinates, Cyclic, Interval, Ownership

# One engine's ranks repeat together, or after a few hundred laps; without a bound a peer could ask for any memory.
MAX_LAPS = 1 << 16

Turn = tuple[int, int]
"""First coordinate and number of coordinates, every period."""


def exact_period(extent: int | None, owners: Iterable[Ownership]) -> int:
    """Coordinates after which membership of all `owners` repeats, however many; the extent of a bounded axis."""
    return extent if extent is not None else math.lcm(*(owned.period for owned in owners))


def common_period(extent: int | None, owners: Iterable[Ownership]) -> int:
    """`exact_period` where it can be laid out; raises LayoutMismatch where it cannot."""
    if extent is not None:
        return extent
    periods = {owned.period for owned in owners}
    period = math.lcm(*periods)
    if period > min(MAX_SIZE, MAX_LAPS * min(periods - {1}, default=1)):
        raise LayoutMismatch(
            f"context parallelism repeats every {', '.join(map(str, sorted(periods - {1})))} coordinates on different ranks, "
            f"together only every {period}: use interleaves of which one is a multiple of the other"
        )
    return period


@lru_cache(maxsize=1 << 14)
def _turns(extent: int | None, owners: tuple[Ownership, ...]) -> tuple[int, tuple[Turn, ...]]:
    """The common period of some ownerships, and what all of them hold of it, laid out."""
    intervals = [owned for owned in owners if isinstance(owned, Interval)]
    if len(intervals) == len(owners):
        period = common_period(extent, owners)
        low = max((owned.start for owned in intervals), default=0)
        high = min([period, *(owned.stop for owned in intervals if owned.stop is not None)])
        return period, ((low, high - low),) if low < high else ()
    edges = edges_of(extent, owners)
    held = np.ones(len(edges) - 1, dtype=bool)
    for owned in owners:
        held &= owned.contains(edges[:-1])
    turns = zip(edges[:-1][held].tolist(), np.diff(edges)[held].tolist(), strict=True)
    return int(edges[-1]), tuple(turns)


@lru_cache(maxsize=1 << 14)  # a proof asks the same few questions once per lane
def count_common(extent: int | None, *owners: Ownership) -> int:
    """How many coordinates of one `exact_period` all `owners` hold."""
    # The one that repeats apart from the others is counted; these are laid out.
    distinct = list(dict.fromkeys(owners))
    splits = [(tuple(distinct[:index] + distinct[index + 1 :]), one) for index, one in enumerate(distinct)]
    others, apart = min(splits, key=lambda split: exact_period(extent, split[0]))
    (period, turns), (other_period, other_turns) = _turns(extent, others), _turns(extent, (apart,))
    shared = math.gcd(period, other_period)
    return sum(_count_pair(one, other, shared) for one in turns for other in other_turns)


def _count_pair(first: Turn, second: Turn, shared: int) -> int:
    """Pairs of a coordinate of either turn that are equal modulo `shared`."""
    (laps, rest), (other_laps, other_rest) = divmod(first[1], shared), divmod(second[1], shared)
    ahead = (second[0] - first[0]) % shared
    both = max(0, min(rest, ahead + other_rest) - ahead) + max(0, min(rest, ahead + other_rest - shared))
    return laps * other_laps * shared + laps * other_rest + other_laps * rest + both


def meets(
    extent: int | None, starts: Coordinates, sizes: Coordinates, periods: int | Coordinates, owned: Ownership
) -> NDArray[np.bool_]:
    """Whether `owned` holds a coordinate of each of many turns: `sizes` coordinates from `starts`, every `periods`."""
    if extent is not None and isinstance(owned, Interval):  # nothing comes again on an axis with an end
        stop = extent if owned.stop is None else owned.stop
        return (starts < stop) & (starts + sizes > owned.start)
    period, turns = _turns(extent, (owned,))
    found = np.zeros(np.broadcast(starts, sizes).shape, dtype=bool)
    shared = np.gcd(periods, period)
    for start, size in turns:
        ahead = (start - starts) % shared
        found |= (ahead < sizes) | (ahead + size > shared)
    return found


def overlaps(extent: int | None, owners: Sequence[Ownership]) -> NDArray[np.bool_]:
    """Which of some ownerships have coordinates in common, shape (n, n)."""
    held = [_turns(extent, (owned,)) for owned in owners]
    table = [(start, size, period, row) for row, (period, turns) in enumerate(held) for start, size in turns]
    starts, sizes, periods, rows = np.array(table, dtype=np.int64).reshape(-1, 4).T
    found = np.zeros((len(owners), len(owners)), dtype=bool)
    for row, owned in enumerate(owners):
        np.logical_or.at(found[row], rows, meets(extent, starts, sizes, periods, owned))
    return found


def count_in_windows(first: Ownership, second: Ownership, low: Coordinates, high: Coordinates) -> Coordinates:
    """How many coordinates of the sequence both hold within each window `[low, high)`, shape (n,)."""
    if first.period == second.period == 1:
        return high - low  # an interval of the sequence is all of it
    # The turns of the longer period are looked at one by one, of the other it is known how many lie below.
    (period, ((start, size),)), (other_period, ((other_start, other_size),)) = sorted(
        (_turns(None, (owned,)) for owned in (first, second)), key=lambda turns: -turns[0]
    )
    first_lap = (low - start - size) // period + 1
    laps = np.maximum(0, -((start - high) // period) - first_lap)
    window = np.repeat(np.arange(len(low)), laps)
    begins = start + period * (np.arange(len(window)) - np.repeat(np.cumsum(laps) - laps - first_lap, laps))
    ends = np.stack([np.maximum(begins, low[window]), np.minimum(begins + size, high[window])])
    whole, phase = np.divmod(ends, other_period)
    below = whole * other_size + np.clip(phase - other_start, 0, other_size)
    counts = np.zeros(len(low), dtype=np.int64)
    np.add.at(counts, window, below[1] - below[0])
    return counts


def edges_of(extent: int | None, owners: Sequence[Ownership]) -> Coordinates:
    """Where the axis is cut by every edge of every owner, over one common period, its ends included."""
    period = common_period(extent, owners)
    intervals = [owned for owned in owners if isinstance(owned, Interval)]
    if len(intervals) == len(owners):
        ends = {
            0,
            period,
            *(owned.start for owned in intervals),
            *(owned.stop for owned in intervals if owned.stop is not None),
        }
        return np.array(sorted(end for end in ends if end <= period), dtype=np.int64)
    return np.unique(
        np.concatenate([np.array([0, period], dtype=np.int64), *(owned.edges(0, period) for owned in owners)])
    )


def count_edges(extent: int | None, owners: Iterable[Ownership]) -> int:
    """How many edges `edges_of` would have to sort, at most; found without laying them out."""
    held = tuple(owners)
    period = exact_period(extent, held)
    return sum(2 * (period // owned.period if isinstance(owned, Cyclic) else 1) for owned in held)


def atoms(extent: int | None, owners: Iterable[Ownership]) -> list[Ownership]:
    """The axis cut at every edge of every owner, in order; residues of the common period on the sequence axis."""
    edges = edges_of(extent, list(dict.fromkeys(owners))).tolist()
    return [part(extent, low, high, edges[-1]) for low, high in pairwise(edges)]


def join(extent: int | None, first: Ownership, second: Ownership) -> Ownership | None:
    """One ownership for two neighbouring atoms of one axis; None if they are not neighbours."""
    if isinstance(first, Interval) and isinstance(second, Interval) and first.stop == second.start:
        return Interval(first.start, second.stop)
    if not (isinstance(first, Cyclic) and isinstance(second, Cyclic)) or first.step != second.step:
        return None
    touching = first.start + first.run == second.start
    return part(extent, first.start, second.start + second.run, first.step) if touching else None


def part(extent: int | None, low: int, high: int, period: int) -> Ownership:
    """The coordinates `[low, high)` of every period."""
    if extent is not None:
        return Interval(low, high)
    return Interval(0, None) if (low, high) == (0, period) else Cyclic(low, high - low, period)
