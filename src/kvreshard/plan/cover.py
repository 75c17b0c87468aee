"""How do ownerships of one axis overlap, and into which atoms do they cut it?

An axis is looked at over one period: its extent, or for the sequence the least common multiple of the cyclic steps. An
atom is a maximal part of it that every owner holds whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.ownership import Cyclic, Interval, Ownership, count_within

# One engine's ranks repeat together, two engines after a few hundred laps; without a bound a peer could ask for any memory.
MAX_LAPS = 1 << 16


def common_period(extent: int | None, owners: Iterable[Ownership]) -> int:
    """Coordinates after which membership of all `owners` repeats; the extent of a bounded axis. Raises LayoutMismatch."""
    if extent is not None:
        return extent
    periods = {owned.period for owned in owners}
    period = math.lcm(*periods)
    if period > MAX_LAPS * min(periods - {1}, default=1):
        raise LayoutMismatch(
            f"context parallelism repeats every {', '.join(map(str, sorted(periods - {1})))} coordinates on different ranks, "
            f"together only every {period}: use interleaves of which one is a multiple of the other"
        )
    return period


@lru_cache(maxsize=1 << 14)  # an election asks the same few questions once per pair of ranks
def count_common(extent: int | None, *owners: Ownership) -> int:
    """How many coordinates of one common period all `owners` hold."""
    low, high, cyclic = 0, common_period(extent, owners), dict[Ownership, None]()
    for owned in owners:
        if isinstance(owned, Interval):
            low, high = max(low, owned.start), high if owned.stop is None else min(high, owned.stop)
        else:
            cyclic[owned] = None
    if low >= high:
        return 0
    if len(cyclic) < 2:
        return sum(count_within(owned, low, high) for owned in cyclic) if cyclic else high - low
    edges = np.unique(np.concatenate([np.array([low, high], dtype=np.int64), *(o.edges(low, high) for o in cyclic)]))
    starts, lengths = edges[:-1], np.diff(edges)
    held = np.ones(len(starts), dtype=bool)
    for owned in cyclic:
        held &= owned.contains(starts)
    return int(lengths[held].sum())


def atoms(extent: int | None, owners: Iterable[Ownership]) -> list[Ownership]:
    """The axis cut at every edge of every owner, in order; residues of the common period on the sequence axis."""
    distinct = list(dict.fromkeys(owners))
    period = common_period(extent, distinct)
    edges = np.unique(
        np.concatenate([np.array([0, period], dtype=np.int64), *(owned.edges(0, period) for owned in distinct)])
    ).tolist()
    return [_part(extent, low, high, period) for low, high in pairwise(edges)]


def join(extent: int | None, first: Ownership, second: Ownership) -> Ownership | None:
    """One ownership for two neighbouring atoms of one axis; None if they are not neighbours."""
    if isinstance(first, Interval) and isinstance(second, Interval) and first.stop == second.start:
        return Interval(first.start, second.stop)
    if not (isinstance(first, Cyclic) and isinstance(second, Cyclic)) or first.step != second.step:
        return None
    touching = first.start + first.run == second.start
    return _part(extent, first.start, second.start + second.run, first.step) if touching else None


def _part(extent: int | None, low: int, high: int, period: int) -> Ownership:
    if extent is not None:
        return Interval(low, high)
    return Interval(0, None) if (low, high) == (0, period) else Cyclic(low, high - low, period)
