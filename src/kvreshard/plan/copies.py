"""The two types in which copies leave the planner and reach the transport.

    CopyList:    for every i: src_address[i] -> dst_address[i], length[i] bytes
    PagedCopies: for every entry e of `page` and every pair i of page ids:
                 src_start[e] + src_page[i] * src_stride -> dst_start[e] + dst_page[i] * dst_stride, run_bytes bytes

`PagedCopies` makes scattered pages cheap: a transport prepares a `Page` once and then names its copies by index. A transport knows
nothing else of a plan. `coalesce` joins neighbours, `cut_long` cuts what is too long for one copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvreshard.model.errors import UsageError

Int64s = NDArray[np.int64]

# Longer copies are cut: one of them must not be a post of 20 ms by itself. 16 MiB is 2 to 4 ms at a core's 4 to 8 GB/s.
MAX_COPY_BYTES = 16 << 20
# Neighbours are joined up to here whatever else is read: 128 KiB are read in some ten times what a copy costs (docs/design/0020).
MIN_JOINED_BYTES = 128 << 10


def _whole(given: ArrayLike, what: str) -> Int64s:
    """The numbers as an array. Raises UsageError for those that would be rounded, or wrap around."""
    array = np.asarray(given)
    if array.dtype == np.int64:
        return array
    if array.size and (array.dtype.kind not in "iu" or int(array.max()) >= 2**63):
        raise UsageError(f"the {what} of copies are {array.dtype}, and must be whole numbers below 2**63")
    return array.astype(np.int64)


class CopyList(msgspec.Struct, frozen=True, eq=False):
    """Copies from one source rank to one destination rank. Arrays of shape (n,), addresses and lengths in bytes."""

    src_rank: int
    dst_rank: int
    src_address: Int64s
    dst_address: Int64s
    length: Int64s

    @staticmethod
    def of(
        src_address: ArrayLike, dst_address: ArrayLike, length: ArrayLike, src_rank: int = 0, dst_rank: int = 0
    ) -> CopyList:
        """From anything that NumPy reads as rows of whole numbers; a scalar length serves all copies. Raises UsageError."""
        src, dst = _whole(src_address, "source addresses"), _whole(dst_address, "destination addresses")
        each = _whole(length, "lengths")
        return CopyList(src_rank, dst_rank, src, dst, each if each.ndim else np.full(src.shape, each))

    @property
    def num_copies(self) -> int:
        return len(self.length)

    @property
    def num_bytes(self) -> int:
        return int(self.length.sum())

    def flat(self) -> CopyList:
        """Itself: what `PagedCopies.flat` gives is a list already."""
        return self


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Page:
    """What is copied between any source page and any destination page: entries, arrays of shape (num_entries,), at least one.

    `src_start`, `dst_start`: addresses of the entries in page 0, of `run_bytes` each. `region`: equal numbers where the regions of both
    sides are the same. Pages lie every `src_stride` and `dst_stride` bytes, and their ids are below `src_count` and `dst_count`.
    `shape`: equal for pages whose entries lie alike, so that a copy of one may continue a copy of the other. `first_entry`: its addresses in
    page 0, each followed by the stride, and its length, shape (5,). `recurs`: whether other requests have the page too, so that it is worth
    preparing; the page that a request fills in part is its own.

    A transport keeps what it prepares for a page as long as the object lives.
    """

    src_start: Int64s
    dst_start: Int64s
    run_bytes: int
    region: Int64s
    src_stride: int
    dst_stride: int
    src_count: int
    dst_count: int
    recurs: bool = True
    shape: tuple[bytes, ...] = field(init=False)
    first_entry: Int64s = field(init=False)

    def __post_init__(self) -> None:
        columns = self.src_start - self.src_start[0], self.dst_start - self.dst_start[0], self.region
        object.__setattr__(self, "shape", tuple(column.tobytes() for column in columns))
        first = self.src_start[0], self.src_stride, self.dst_start[0], self.dst_stride, self.run_bytes
        object.__setattr__(self, "first_entry", np.array(first, dtype=np.int64))

    @staticmethod
    def of(
        src_start: ArrayLike,
        dst_start: ArrayLike,
        run_bytes: int,
        strides: tuple[int, int],
        counts: tuple[int, int],
    ) -> Page:
        """From anything that NumPy reads as rows of whole numbers, in one region a side."""
        src, dst = np.asarray(src_start, dtype=np.int64), np.asarray(dst_start, dtype=np.int64)
        return Page(src, dst, run_bytes, np.zeros_like(src), *strides, *counts)

    @property
    def num_entries(self) -> int:
        return len(self.src_start)


class PagedCopies(msgspec.Struct, frozen=True, eq=False):
    """Every entry of a page for every pair of page ids `src_page[i]`, `dst_page[i]`, shape (n,)."""

    src_rank: int
    dst_rank: int
    page: Page
    src_page: Int64s
    dst_page: Int64s

    @property
    def num_copies(self) -> int:
        return self.page.num_entries * len(self.src_page)

    @property
    def num_bytes(self) -> int:
        return self.page.run_bytes * self.num_copies

    def flat(self) -> CopyList:
        """The same copies, one by one: entry after entry."""
        return self._listed(slice(None), slice(None))

    def in_lists(self, most: int) -> Iterator[CopyList]:
        """The same copies in the same order, as lists of at most `most` that are made one at a time.

        >>> page = Page.of([0, 500], [0, 700], 8, strides=(10, 10), counts=(4, 4))
        >>> copies = PagedCopies(0, 0, page, np.array([1, 2, 3]), np.array([0, 1, 2]))
        >>> [listed.src_address.tolist() for listed in copies.in_lists(2)]
        [[10, 20], [30], [510, 520], [530]]
        """
        num_pages = len(self.src_page)
        entries_each = max(1, most // max(1, num_pages))
        for entry in range(0, self.page.num_entries, entries_each):
            for low in range(0, num_pages, most):
                yield self._listed(slice(entry, entry + entries_each), slice(low, low + most))

    def _listed(self, entries: slice, pages: slice) -> CopyList:
        page = self.page
        src = (page.src_start[entries, None] + self.src_page[pages] * page.src_stride).reshape(-1)
        dst = (page.dst_start[entries, None] + self.dst_page[pages] * page.dst_stride).reshape(-1)
        length = np.empty(len(src), np.int64)
        length.fill(page.run_bytes)
        return CopyList(self.src_rank, self.dst_rank, src, dst, length)


Copies = CopyList | PagedCopies


def continues(src: Int64s, dst: Int64s, length: Int64s) -> NDArray[np.bool_]:
    """Whether each copy but the first continues the one before on both sides, shape (n - 1,)."""
    found: NDArray[np.bool_] = (src[1:] == src[:-1] + length[:-1]) & (dst[1:] == dst[:-1] + length[:-1])
    return found


def coalesce(
    src: Int64s, dst: Int64s, length: Int64s, *, max_bytes: int, joins: NDArray[np.bool_] | None = None
) -> tuple[Int64s, Int64s, Int64s]:
    """Join neighbours that continue one another on both sides. A joined copy ends with the neighbour that reaches `max_bytes`.

    `joins`: what `continues` says of them, where it is known.

    >>> src, dst, length = np.array([0, 4, 9]), np.array([50, 54, 58]), np.array([4, 4, 2])
    >>> coalesce(src, dst, length, max_bytes=100)
    (array([0, 9]), array([50, 58]), array([8, 2]))
    """
    if len(src) < 2:
        return src, dst, length
    first = first_joined(length, continues(src, dst, length) if joins is None else joins, max_bytes)
    return src[first], dst[first], np.add.reduceat(length, first)


def first_joined(length: Int64s, joins: NDArray[np.bool_], max_bytes: int) -> NDArray[np.intp]:
    """Which copies begin a joined one, as in `coalesce`. `joins`: which but the first continue the one before, shape (n - 1,)."""
    begins = np.ones(len(length), dtype=bool)
    begins[1:] = ~joins
    before = np.add.accumulate(length) - length
    share = (before - np.maximum.accumulate(before * begins)) // max_bytes
    begins[1:] |= share[1:] != share[:-1]
    return np.flatnonzero(begins)


def cut_long(src: Int64s, dst: Int64s, length: Int64s, *, max_bytes: int) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Copies of at most `max_bytes`: addresses, lengths, and the row that each comes from.

    >>> cut_long(np.array([0, 50]), np.array([100, 150]), np.array([4, 10]), max_bytes=6)
    (array([ 0, 50, 56]), array([100, 150, 156]), array([4, 6, 4]), array([0, 1, 1]))
    """
    parts = -(-length // max_bytes)
    row = np.repeat(np.arange(len(length), dtype=np.int64), parts)
    before = max_bytes * (np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(parts) - parts, parts))
    return src[row] + before, dst[row] + before, np.minimum(length[row] - before, max_bytes), row


def joined_lists(lists: Sequence[CopyList]) -> CopyList:
    """Lists of one pair of ranks, one after another, as one."""
    first = lists[0]
    if len(lists) == 1:
        return first
    return CopyList(
        first.src_rank,
        first.dst_rank,
        np.concatenate([one.src_address for one in lists]),
        np.concatenate([one.dst_address for one in lists]),
        np.concatenate([one.length for one in lists]),
    )


def joined(arrays: Sequence[Int64s]) -> Int64s:
    """One array of some, at least one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
