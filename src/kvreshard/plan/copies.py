"""What is copied, as plain numbers: addresses and lengths, ready for a transport.

Geometry stays in the planner: a transport sees where from, where to, how many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.loops import frame_copies

Int64s = NDArray[np.int64]


class CopyList(msgspec.Struct, frozen=True, eq=False):
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

    def part(self, first: int, stop: int) -> CopyList:
        """Copies `[first, stop)`."""
        rows = slice(first, stop)
        return CopyList(self.src_rank, self.dst_rank, self.src_address[rows], self.dst_address[rows], self.length[rows])


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PageFrame:
    """What is copied of every page, without saying of which: all that one overlap of two pages means for a lane.

    Entry e of source page p and destination page q moves `length[e]` bytes from `src_start[e] + p * src_stride_bytes` to
    `dst_start[e] + q * dst_stride_bytes`. Arrays of shape (num_entries,), in bytes. Pages are below `src_count`, `dst_count`.
    A transport may prepare a frame once and use it for every request: it stays the same object as long as its route.
    """

    src_start: Int64s
    dst_start: Int64s
    length: Int64s
    src_stride_bytes: int
    dst_stride_bytes: int
    src_count: int
    dst_count: int


class PageCopies(msgspec.Struct, frozen=True, eq=False):
    """Every entry of a frame for every pair of pages `src_page[i]`, `dst_page[i]`; arrays of shape (num_pairs,).

    `run_pages`: how many pages each pair begins, neighbours on both sides that are one copy together; only where pages lie without
    gaps, or all are 1. They are few then, and listed one by one. None: one page a pair.
    """

    src_rank: int
    dst_rank: int
    frame: PageFrame
    src_page: Int64s
    dst_page: Int64s
    run_pages: Int64s | None = None

    @property
    def num_copies(self) -> int:
        return len(self.frame.length) * len(self.src_page)

    @property
    def num_bytes(self) -> int:
        num_pages = len(self.src_page) if self.run_pages is None else int(self.run_pages.sum())
        return int(self.frame.length.sum()) * num_pages

    def flat(self) -> CopyList:
        """The same copies, one by one."""
        frame = self.frame
        run_pages = np.ones(len(self.src_page), dtype=np.int64) if self.run_pages is None else self.run_pages
        columns = frame_copies(
            (frame.src_start, frame.dst_start, frame.length),
            (frame.src_stride_bytes, frame.dst_stride_bytes),
            (self.src_page, self.dst_page, run_pages),
        )
        return CopyList(self.src_rank, self.dst_rank, *columns)


class ByteRanges(msgspec.Struct, frozen=True, eq=False):
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


def cut(ranges: ByteRanges, at: Int64s) -> ByteRanges:
    """The same bytes; where a range goes on beyond one of the addresses `at`, it ends there and another begins."""
    inside = at[_inside(ranges, at - 1) & _inside(ranges, at)]
    return ByteRanges(*(np.sort(np.concatenate([edges, inside])) for edges in (ranges.start, ranges.stop)))


def _inside(ranges: ByteRanges, points: Int64s) -> NDArray[np.bool_]:
    if not len(ranges.start):
        return np.zeros(len(points), dtype=bool)
    index = np.searchsorted(ranges.start, points, side="right") - 1
    return (index >= 0) & (points < ranges.stop[np.maximum(index, 0)])
