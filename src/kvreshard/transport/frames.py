"""How are framed copies posted without listing them one by one?

A frame says where the entries of a page lie; NIXL prepares such a list once, in a few numbers per entry, and a post then picks
from it by index. Measured per copy: 13 ns, against 20 to 25 ns for a listed one and its check.

1. `place` looks up each entry's region on both sides, from its first page's first byte to its last page's last.
2. `FrameCursor` hands out rectangles of entries and pages up to a cost, like `slices.SliceCursor`.
3. `FrameSlice` turns a rectangle into indices: entry * pages of the pool + page.

Returned as None, to be posted one by one: frames whose entries lie on several devices, whose pieces must be cut, or that have
more pieces than a 32-bit index can tell apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.transport.framed import Frame, FramedCopies
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import DESCRIPTOR_COST_BYTES, MAX_PIECE_BYTES

MAX_INDEX = 1 << 31


@dataclass(frozen=True, slots=True)
class FramePlace:
    """Where a frame lies: memory kind ("cpu" or "cuda") and device number of each side."""

    local_kind: str
    remote_kind: str
    local_device: int
    remote_device: int


@dataclass(frozen=True, slots=True, eq=False)
class FrameSlice:
    """Entries `[first_entry, last_entry)` for the given pages: one post. Pages have shape (n,), int32."""

    frame: Frame
    place: FramePlace
    first_entry: int
    last_entry: int
    local_page: NDArray[np.int32]
    remote_page: NDArray[np.int32]
    cost_bytes: int

    def __len__(self) -> int:
        return (self.last_entry - self.first_entry) * len(self.local_page)

    @property
    def local_index(self) -> NDArray[np.int32]:
        """Index of each piece in the frame's prepared list of the local side."""
        return self._index(self.frame.local_count, self.local_page)

    @property
    def remote_index(self) -> NDArray[np.int32]:
        """The same for the remote side."""
        return self._index(self.frame.remote_count, self.remote_page)

    def _index(self, count: int, page: NDArray[np.int32]) -> NDArray[np.int32]:
        entries = np.arange(self.first_entry, self.last_entry, dtype=np.int32) * np.int32(count)
        return (entries[:, None] + page).reshape(-1)


def strided_rows(frame: Frame, place: FramePlace, local: bool) -> NDArray[np.uint64]:
    """NIXL's form of one side: rows of (address, bytes, device number, stride, count), shape (entries, 5)."""
    rows = np.empty((len(frame.length_bytes), 5), dtype=np.uint64)
    rows[:, 0] = frame.local_address if local else frame.remote_address
    rows[:, 1] = frame.length_bytes
    rows[:, 2] = place.local_device if local else place.remote_device
    rows[:, 3] = frame.local_stride_bytes if local else frame.remote_stride_bytes
    rows[:, 4] = frame.local_count if local else frame.remote_count
    return rows


def place(frame: Frame, local: RegionTable, remote: RegionTable, remote_side: str) -> FramePlace | None:
    """Where a frame lies, or None if it must be posted one by one.

    Raises:
        TransportError: an entry's pages are not inside one registered region.
    """
    sides = (
        ("local", local, frame.local_address, frame.local_stride_bytes, frame.local_count),
        (remote_side, remote, frame.remote_address, frame.remote_stride_bytes, frame.remote_count),
    )
    devices = []
    for name, table, address, stride, count in sides:
        whole = frame.length_bytes + np.uint64((count - 1) * stride)
        index = table.locate(name, address, whole)
        found = {table.regions[region].device for region in np.unique(index).tolist()}
        if len(found) != 1 or len(frame.length_bytes) * count >= MAX_INDEX:
            return None
        kind, _, number = found.pop().partition(":")
        devices.append((kind, int(number or 0)))
    if int(frame.length_bytes.max()) > MAX_PIECE_BYTES:
        return None
    return FramePlace(devices[0][0], devices[1][0], devices[0][1], devices[1][1])


class FrameCursor:
    """Hands out framed copies slice by slice."""

    __slots__ = ("_cost", "_entry", "_frame", "_local", "_page", "_place", "_remote")

    def __init__(self, copies: FramedCopies, place: FramePlace) -> None:
        self._frame, self._place = copies.frame, place
        self._local, self._remote = copies.local_page.astype(np.int32), copies.remote_page.astype(np.int32)
        # Cost of all entries before each one, for one page.
        each = copies.frame.length_bytes.astype(np.int64) + DESCRIPTOR_COST_BYTES
        self._cost = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(each)])
        self._entry = 0 if len(self._local) else len(each)
        self._page = 0

    @property
    def exhausted(self) -> bool:
        """Whether all pieces were handed out or dropped."""
        return self._entry == len(self._cost) - 1

    def drop(self) -> None:
        """Hand out no more."""
        self._entry = len(self._cost) - 1

    def take(self, budget_bytes: int) -> FrameSlice:
        """The next pieces whose cost together stays within the budget, at least one. Not when exhausted."""
        num_pages, first = len(self._local), self._entry
        per_page = budget_bytes // num_pages
        last = int(np.searchsorted(self._cost, self._cost[first] + per_page, side="right")) - 1
        if self._page == 0 and last > first:
            self._entry = last
            return self._slice(first, last, 0, num_pages)
        each = int(self._cost[first + 1] - self._cost[first])
        start, stop = self._page, min(num_pages, self._page + max(1, budget_bytes // each))
        self._page = stop % num_pages
        self._entry += stop == num_pages
        return self._slice(first, first + 1, start, stop)

    def _slice(self, first: int, last: int, start: int, stop: int) -> FrameSlice:
        cost = int(self._cost[last] - self._cost[first]) * (stop - start)
        pages = slice(start, stop)
        return FrameSlice(self._frame, self._place, first, last, self._local[pages], self._remote[pages], cost)
