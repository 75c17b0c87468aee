"""Copies as NIXL takes them, cut into slices that take about 20 ms to post.

Posting to NIXL blocks for the whole copy when the peer is on the same host (measured: 302 ms for 160 x 4 MiB), unless its own
threads share it, and a thread that posts answers nobody. So:

1. `make_rows` looks up where copies lie in the regions of both sides: one `RowSet` per pair of memory kinds, since a NIXL list has one kind.
2. A `Cursor` hands out the next copies up to a cost as a `Slice`, without a loop over copies. Copies of a list are its rows; those of
   pages go entry by entry.
3. Both sides of a slice have NIXL's form: rows of (address, bytes, device), or indices into what is prepared of a page once.
4. `SliceBudget` corrects the cost from the time that each post took.

Raises TransportError for copies that are malformed or lie outside the regions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.expect import expect
from kvreshard.plan.copies import MAX_COPY_BYTES, CopyList, Int64s, Page, PagedCopies, cut_long
from kvreshard.transport.base import ADDRESS_SPACE_BYTES, Direction, TransportError
from kvreshard.transport.regions import RegionTable

# A descriptor costs 2 to 3 us beside its bytes (NIXL 1.5.1, CMA), the time of 16 KiB at 6.5 GB/s.
DESCRIPTOR_COST_BYTES = 16 * 1024

# So many copies of one post are shared by NIXL's threads, whose own bound is 1024. A staged batch has fewer, and is read faster by the thread
# that posts it (docs/design/0020).
SPLIT_COPIES = 64
# Two, four and eight threads divide what they share without a rest.
SHARES = 8

# Slower links shrink to the lower bound in a few posts; above the upper one there is nothing left to amortise.
FIRST_BUDGET_BYTES = 32 * 1024 * 1024
MIN_BUDGET_BYTES = 256 * 1024
MAX_BUDGET_BYTES = 1024 * 1024 * 1024

# NIXL's indices have 32 bits.
MAX_INDEX = 1 << 31
# So many copies of pages get their indices, or are listed, at a time: some slices.
PLACED_AT_ONCE = 1 << 16

KINDS = ("cpu", "cuda")

Rows = NDArray[np.uint64]


class RowSet(msgspec.Struct, frozen=True, eq=False):
    """Copies between one memory kind a side, as the side that posts sees them.

    `local`, `remote`: rows of (address, bytes, device number), shape (n, 3); of a page (address, bytes, device number, stride, count),
    shape (entries, 5). `kinds`: "cpu" or "cuda", local and remote.
    """

    kinds: tuple[str, str]
    local: Rows
    remote: Rows


PickedRows = Rows | NDArray[np.int32]
"""One side of some copies: rows, shape (n, 3), or indices into a page, shape (n,): number of the entry * pages of the pool + page id."""


class Slice(msgspec.Struct, frozen=True, eq=False):
    """Copies of a row set for one post."""

    row_set: RowSet
    local: PickedRows
    remote: PickedRows
    cost_bytes: int

    def __len__(self) -> int:
        return len(self.local)

    @property
    def is_indexed(self) -> bool:
        """Whether the copies are picked from a page."""
        return self.local.ndim == 1


class PostRows(msgspec.Struct, frozen=True, eq=False):
    """Copies of a row set for some posts. `costs`: of all copies before each, and of all, shape (n + 1,)."""

    row_set: RowSet
    local: PickedRows
    remote: PickedRows
    costs: Int64s


class Cursor:
    """What is left to post of some copies. `pages`: local and remote page ids, where a page is copied for them.

    Row sets are taken one at a time, so that they may be made as they are posted.
    """

    __slots__ = ("_current", "_left", "_next")

    def __init__(self, row_sets: Iterable[RowSet], pages: tuple[Int64s, Int64s] | None = None) -> None:
        self._left = map(_rows_of_list, row_sets) if pages is None else _rows_of_pages(row_sets, pages)
        self._current = next(self._left, None)
        self._next = 0

    @property
    def exhausted(self) -> bool:
        """Whether all copies were handed out or dropped."""
        return self._current is None

    def drop(self) -> None:
        """Hand out no more."""
        self._left, self._current = iter(()), None

    def take(self, budget_bytes: int) -> Slice:
        """The next copies whose cost together stays within the budget, at least one. Raises IndexError when exhausted."""
        rows, first = self._current, self._next
        if rows is None:
            raise IndexError("no copies are left")
        before, end = int(rows.costs[first]), len(rows.local)
        stop = int(rows.costs.searchsorted(before + budget_bytes, side="right")) - 1
        self._next = stop = _in_shares(first, max(first + 1, stop), end)
        if stop == end:
            self._current, self._next = next(self._left, None), 0
        return Slice(rows.row_set, rows.local[first:stop], rows.remote[first:stop], int(rows.costs[stop]) - before)


def _rows_of_list(rows: RowSet) -> PostRows:
    """All rows of a list."""
    costs = np.zeros(len(rows.local) + 1, dtype=np.int64)
    np.add.accumulate(rows.local[:, 1].astype(np.int64) + DESCRIPTOR_COST_BYTES, out=costs[1:])
    return PostRows(rows, rows.local, rows.remote, costs)


def _rows_of_pages(row_sets: Iterable[RowSet], pages: tuple[Int64s, Int64s]) -> Iterator[PostRows]:
    """Entry after entry for every pair of page ids, some at a time. All entries of a page are equally long."""
    local_ids, remote_ids = np.array(pages, dtype=np.int32)
    entries_each = max(1, PLACED_AT_ONCE // max(1, len(local_ids)))
    for rows in row_sets if len(local_ids) else ():
        cost = int(rows.local[0, 1]) + DESCRIPTOR_COST_BYTES
        for low in range(0, len(rows.local), entries_each):
            entry = np.arange(low, min(low + entries_each, len(rows.local)), dtype=np.int32)[:, None]
            local = (entry * int(rows.local[0, 4]) + local_ids).reshape(-1)
            remote = (entry * int(rows.remote[0, 4]) + remote_ids).reshape(-1)
            yield PostRows(rows, local, remote, np.arange(0, (len(local) + 1) * cost, cost))


def _in_shares(first: int, stop: int, end: int) -> int:
    """Where a slice ends that may end at `stop` of `end` copies: where NIXL's threads share it and others follow, in `SHARES` equal parts.

    NIXL makes what is left over a share of its own. It is a copy or two, but the thread that posts waits for it: with 5,461 copies instead of
    5,460 the 99th percentile of its answers to peers was 28 to 42 ms instead of 21 to 25.
    """
    is_shared = stop - first >= SPLIT_COPIES and stop < end
    return stop - (stop - first) % SHARES if is_shared else stop


def make_rows(
    copies: CopyList | Page, direction: Direction, local: RegionTable, remote: RegionTable, side: str
) -> list[RowSet]:
    """Where copies lie, or all that a page may copy. `side`: how to call the remote side in a refusal. Raises TransportError."""
    if isinstance(copies, Page):
        starts, length = (copies.src_start, copies.dst_start), np.full(copies.num_entries, copies.run_bytes)
        pages = (copies.src_stride, copies.src_count), (copies.dst_stride, copies.dst_count)
    else:
        starts, length, pages = (copies.src_address, copies.dst_address), copies.length, ((0, 1), (0, 1))
    least, longest = _check_copies(*starts, length, pages)
    if not longest:
        return []
    here, there = (1, 0) if direction is Direction.READ else (0, 1)
    for name, table, at in (("local", local, here), (side, remote, there)):
        stride, count = pages[at]
        beyond = (count - 1) * stride
        if not table.has(least[at], int(np.maximum.reduce(starts[at])) + longest + beyond):
            table.locate(name, starts[at], length + beyond)
    if isinstance(copies, CopyList) and longest > MAX_COPY_BYTES:
        # Cut after the check, since a refusal names the copy, and one that crosses into another region is none that may be cut.
        src, dst, length, _ = cut_long(*starts, length, max_bytes=MAX_COPY_BYTES)
        starts = src, dst
    is_page = isinstance(copies, Page)
    local_rows, local_kind = _rows(local, starts[here], length, pages[here] if is_page else None)
    remote_rows, remote_kind = _rows(remote, starts[there], length, pages[there] if is_page else None)
    kinds = 2 * local_kind + remote_kind
    if isinstance(kinds, int):
        return [RowSet(_kinds(kinds), local_rows, remote_rows)]
    chosen = [(int(kind), kinds == kind) for kind in np.unique(kinds)]
    return [RowSet(_kinds(kind), local_rows[rows], remote_rows[rows]) for kind, rows in chosen]


def is_indexed(page: Page) -> bool:
    """Whether a post can pick copies from a prepared page, by indices of 32 bits and without a copy that must be cut."""
    return page.num_entries * max(page.src_count, page.dst_count) < MAX_INDEX and page.run_bytes <= MAX_COPY_BYTES


def listed_rows(
    copies: PagedCopies, direction: Direction, local: RegionTable, remote: RegionTable, side: str
) -> Iterator[RowSet]:
    """Copies of a page that cannot be indexed, some at a time: together they may be more than memory holds. The page has been checked."""
    for listed in copies.in_lists(PLACED_AT_ONCE):
        yield from make_rows(listed, direction, local, remote, side)


def check_pages(copies: PagedCopies) -> None:
    """Raises TransportError for what are no page ids, and for those that the page does not have."""
    page = copies.page
    if copies.src_page.shape != copies.dst_page.shape or copies.src_page.ndim != 1:
        raise TransportError(f"{copies.src_page.shape} source pages for {copies.dst_page.shape} destination pages")
    for name, ids, count in (
        ("source", copies.src_page, page.src_count),
        ("destination", copies.dst_page, page.dst_count),
    ):
        if ids.dtype != np.int64:
            raise TransportError(
                f"{name} pages are {ids.dtype}, and page ids must be int64, as addresses are; convert them first"
            )
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
            raise TransportError(f"{name} pages from {int(ids.min())} to {int(ids.max())}, but there are [0, {count})")


def _check_copies(
    src: Int64s, dst: Int64s, length: Int64s, pages: tuple[tuple[int, int], tuple[int, int]]
) -> tuple[tuple[int, int], int]:
    """The lowest address of either side, and the bytes of the longest copy, 0 without any.

    Raises TransportError unless these are copies: one number a side and copy, all in the address space.
    """
    columns = (("source", src), ("destination", dst), ("length", length))
    for name, column in columns:
        if not isinstance(column, np.ndarray):
            expect(
                column, np.ndarray, f"the {name} column of copies", "an array of int64, as `CopyList.of` makes of lists"
            )
    if any(column.ndim != 1 or column.dtype != np.int64 or len(column) != len(length) for _, column in columns):
        shapes = ", ".join(f"{name} {column.dtype} {column.shape}" for name, column in columns)
        raise TransportError(f"copies need one source, one destination and one length each, as int64; got {shapes}")
    for stride, count in pages:
        if stride < 0 or count < 1 or stride * (count - 1) >= ADDRESS_SPACE_BYTES // 2:
            raise TransportError(f"{count} pages every {stride} bytes do not lie in the address space")
    most = ADDRESS_SPACE_BYTES // 2
    if not len(length):
        return (0, 0), 0
    least_src, least_dst, least = [int(np.minimum.reduce(column)) for column in (src, dst, length)]
    longest = int(np.maximum.reduce(length))
    if least <= 0 or min(least_src, least_dst) < 0 or longest >= most:
        wrong = (length <= 0) | (length >= most) | (src < 0) | (dst < 0)
        row = int(np.flatnonzero(wrong)[0])
        raise TransportError(
            f"copy {row} of {len(length)}: {int(length[row])} bytes from {int(src[row])} to {int(dst[row])}; a length is above 0 and "
            f"below {most}, and an address is not negative"
        )
    return (least_src, least_dst), longest


def _rows(
    table: RegionTable, start: Int64s, length: Int64s, pages: tuple[int, int] | None
) -> tuple[Rows, int | NDArray[np.intp]]:
    """NIXL's rows of one side, which lie inside its regions, and the memory kind of each, one where all are alike. `pages`: stride and count."""
    rows = np.empty((len(length), 5 if pages else 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = start, length
    if pages:
        rows[:, 3], rows[:, 4] = pages
    if table.device is not None:
        kind, rows[:, 2] = _device(table.device)
        return rows, kind
    index = table.locate("", start, length)
    devices = [_device(device) for device in table.devices]
    rows[:, 2] = np.array([number for _, number in devices], dtype=np.uint64)[index]
    return rows, np.array([kind for kind, _ in devices], dtype=np.intp)[index]


def _device(name: str) -> tuple[int, int]:
    """Index into `KINDS` and number of a device."""
    kind, _, number = name.partition(":")
    return KINDS.index(kind), int(number or 0)


def _kinds(number: int) -> tuple[str, str]:
    """Local and remote."""
    return KINDS[number // 2], KINDS[number % 2]


class SliceBudget:
    """The cost that makes a post take about `target_s` seconds, learnt from the posts so far."""

    __slots__ = ("_target_s", "budget_bytes")

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self.budget_bytes = FIRST_BUDGET_BYTES

    def learn(self, cost_bytes: int, seconds: float) -> None:
        """Correct the budget by one post. A post well below the budget says nothing unless it was too slow."""
        if cost_bytes < self.budget_bytes // 2 and seconds <= self._target_s:
            return
        # At most halved or doubled per post, since one post may have been slow for reasons of its own.
        factor = min(2.0, max(0.5, self._target_s / max(seconds, 1e-9)))
        self.budget_bytes = min(MAX_BUDGET_BYTES, max(MIN_BUDGET_BYTES, int(cost_bytes * factor)))
