"""What is copied, as plain numbers: addresses and lengths, ready for a transport.

Geometry stays in the planner: a transport sees where from, where to, how many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class CopyList:
    """Copies from one source rank to one destination rank. Arrays of shape (n,), addresses and lengths in bytes."""

    src_rank: int
    dst_rank: int
    src_address: Int64s
    dst_address: Int64s
    length: Int64s

    @property
    def num_copies(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True, slots=True, eq=False)
class ByteRanges:
    """Half-open address ranges, shape (n,) each."""

    start: Int64s
    stop: Int64s


def merged(start: Int64s, stop: Int64s) -> ByteRanges:
    """The same bytes as sorted ranges that do not touch. Ranges may overlap."""
    if not len(start):
        return ByteRanges(start, stop)
    order = np.argsort(start, kind="stable")
    start, stop = start[order], np.maximum.accumulate(stop[order])
    first = np.concatenate([[True], start[1:] > stop[:-1]])
    last = np.concatenate([first[1:], [True]])
    return ByteRanges(start[first], stop[last])


def subtract(whole: ByteRanges, taken: ByteRanges) -> ByteRanges:
    """The parts of `whole` outside `taken`; both sorted and not touching."""
    if not len(whole.start):
        return whole
    edges = np.unique(np.concatenate([whole.start, whole.stop, taken.start, taken.stop]))
    low, high = edges[:-1], edges[1:]
    left = _inside(whole, low) & ~_inside(taken, low)
    return merged(low[left], high[left])


def _inside(ranges: ByteRanges, points: Int64s) -> NDArray[np.bool_]:
    if not len(ranges.start):
        return np.zeros(len(points), dtype=bool)
    index = np.searchsorted(ranges.start, points, side="right") - 1
    return (index >= 0) & (points < ranges.stop[np.maximum(index, 0)])
