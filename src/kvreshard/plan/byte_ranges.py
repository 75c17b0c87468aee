"""Half-open ranges of addresses, and the set operations on them."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class ByteRanges(msgspec.Struct, frozen=True, eq=False):
    """Half-open address ranges, shape (n,) each."""

    start: Int64s
    stop: Int64s

    def __str__(self) -> str:
        return " ".join(f"[{start}, {stop})" for start, stop in zip(self.start, self.stop, strict=True))


def merged(start: Int64s, stop: Int64s, *, max_gap_bytes: int = 0) -> ByteRanges:
    """The same bytes as sorted ranges that lie more than `max_gap_bytes` apart; gaps up to that are included. Ranges may overlap.

    >>> start, stop = np.array([9, 0, 4]), np.array([10, 3, 8])
    >>> print(merged(start, stop), merged(start, stop, max_gap_bytes=1), sep=" and ")
    [0, 3) [4, 8) [9, 10) and [0, 10)
    """
    if not len(start):
        return ByteRanges(start, stop)
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate(stop[order])
    first = np.concatenate([[True], start[1:] > stop[:-1] + max_gap_bytes])
    last = np.concatenate([first[1:], [True]])
    return ByteRanges(start[first], stop[last])


def subtract(whole: ByteRanges, taken: ByteRanges) -> ByteRanges:
    """The parts of `whole` outside `taken`; both sorted and not touching.

    >>> print(subtract(ByteRanges(np.array([0, 20]), np.array([10, 30])), ByteRanges(np.array([4]), np.array([25]))))
    [0, 4) [25, 30)
    """
    if not len(whole.start):
        return whole
    edges = np.unique(np.concatenate([whole.start, whole.stop, taken.start, taken.stop]))
    low, high = edges[:-1], edges[1:]
    left = _inside(whole, low) & ~_inside(taken, low)
    return merged(low[left], high[left])


def cut(ranges: ByteRanges, at: Int64s) -> ByteRanges:
    """The same bytes; where a range goes on beyond one of the addresses `at`, it ends there and another begins."""
    inside = at[_inside(ranges, at - 1) & _inside(ranges, at)]
    return ByteRanges(*(np.sort(np.concatenate([edges, inside])) for edges in (ranges.start, ranges.stop)))


def _inside(ranges: ByteRanges, points: Int64s) -> NDArray[np.bool_]:
    if not len(ranges.start):
        return np.zeros(len(points), dtype=bool)
    index = np.searchsorted(ranges.start, points, side="right") - 1
    return (index >= 0) & (points < ranges.stop[np.maximum(index, 0)])
