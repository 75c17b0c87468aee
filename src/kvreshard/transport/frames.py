"""How are framed copies posted without listing them one by one?

A frame says where the entries of a page lie; NIXL prepares such a list once, in a few numbers per entry, and a post then picks
from it by index. Measured per copy: 13 ns, against 20 to 25 ns for a listed one and its check.

1. `place` looks up each entry's region on both sides, from its first page's first byte to its last page's last.
2. `FrameCursor` hands out as many pieces as a cost allows, entry after entry, like `slices.SliceCursor`.
3. A `FrameSlice` are those as indices: entry * pages of the pool + page.
4. Runs of pages are few and as long as they are: those are listed (`PlacedFrame.listed`), without a look at the regions.

Returned as None, to be posted one by one: frames whose entries lie on several devices, whose pieces must be cut, or that have
more pieces than a 32-bit index can tell apart.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model import loops
from kvreshard.model.loops import bounds, frame_indices, frame_rows
from kvreshard.transport.framed import Frame, FramedCopies
from kvreshard.transport.regions import RegionTable
from kvreshard.transport.slices import (
    DESCRIPTOR_COST_BYTES,
    MAX_PIECE_BYTES,
    PlacedCopies,
    in_shares,
)

MAX_INDEX = 1 << 31


class FramePlace(msgspec.Struct, frozen=True):
    """Where a frame lies: memory kind ("cpu" or "cuda") and device number of each side."""

    local_kind: str
    remote_kind: str
    local_device: int
    remote_device: int


class FrameSlice(msgspec.Struct, frozen=True, eq=False):
    """Some pieces of a frame for one post: indices in what is prepared of each side, shape (n,), int32."""

    frame: Frame
    place: FramePlace
    local_index: NDArray[np.int32]
    remote_index: NDArray[np.int32]
    cost_bytes: int

    def __len__(self) -> int:
        return len(self.local_index)


def strided_rows(frame: Frame, place: FramePlace, local: bool) -> NDArray[np.uint64]:
    """NIXL's form of one side: rows of (address, bytes, device number, stride, count), shape (entries, 5)."""
    length = frame.length_bytes
    if local:
        return loops.strided_rows(
            frame.local_address, length, place.local_device, frame.local_stride_bytes, frame.local_count
        )
    return loops.strided_rows(
        frame.remote_address, length, place.remote_device, frame.remote_stride_bytes, frame.remote_count
    )


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
        device = table.device_of(name, address, whole)
        if device is None or len(frame.length_bytes) * count >= MAX_INDEX:
            return None
        kind, _, number = device.partition(":")
        devices.append((kind, int(number or 0)))
    if frame.longest_bytes > MAX_PIECE_BYTES:
        return None
    return FramePlace(devices[0][0], devices[1][0], devices[0][1], devices[1][1])


class PlacedFrame(msgspec.Struct, frozen=True, eq=False):
    """What every post of a frame needs beside it: its place, the cost of one page of all entries before each and of all of them, and
    the longest entry. It does not keep the frame alive, by which it is kept.
    """

    place: FramePlace
    cost_bytes: list[int]
    longest_bytes: int

    @staticmethod
    def of(frame: Frame, place: FramePlace) -> PlacedFrame:
        """Found once per frame."""
        cost = np.add.accumulate(frame.length_bytes + np.uint64(DESCRIPTOR_COST_BYTES))
        return PlacedFrame(place, [0, *cost.tolist()], frame.longest_bytes)

    def listed(self, copies: FramedCopies) -> PlacedCopies | None:
        """The same pieces as rows; None where there are none, or one must be cut."""
        frame, place, run_pages = copies.frame, self.place, copies.run_pages
        if run_pages is None:
            run_pages = np.ones(len(copies.local_page), dtype=np.int64)
        if not len(run_pages) or bounds(run_pages)[1] * self.longest_bytes > MAX_PIECE_BYTES:
            return None
        local, remote, cost_bytes = frame_rows(
            (frame.local_address, frame.remote_address, frame.length_bytes),
            (frame.local_stride_bytes, frame.remote_stride_bytes),
            (place.local_device, place.remote_device),
            (copies.local_page, copies.remote_page, run_pages),
            DESCRIPTOR_COST_BYTES,
        )
        return PlacedCopies(local, remote, place.local_kind, place.remote_kind, cost_bytes)


def place_frame(frame: Frame, local: RegionTable, remote: RegionTable, remote_side: str) -> PlacedFrame | None:
    """`place`, and what follows from it."""
    found = place(frame, local, remote, remote_side)
    return None if found is None else PlacedFrame.of(frame, found)


class FrameCursor:
    """Hands out framed copies slice by slice, one page a pair, entry after entry. `placed`: what is known of their frame."""

    __slots__ = ("_copies", "_next", "_placed", "_stop")

    def __init__(self, copies: FramedCopies, placed: PlacedFrame) -> None:
        self._copies, self._placed = copies, placed
        self._next, self._stop = 0, len(copies)

    @property
    def exhausted(self) -> bool:
        """Whether all pieces were handed out or dropped."""
        return self._next == self._stop

    def drop(self) -> None:
        """Hand out no more."""
        self._next = self._stop

    def take(self, budget_bytes: int) -> FrameSlice:
        """The next pieces whose cost together stays within the budget, at least one. Not when exhausted."""
        first, copies, frame = self._next, self._copies, self._copies.frame
        before = self._cost_before(first)
        self._next = stop = in_shares(first, max(first + 1, self._reach(before + budget_bytes)), self._stop)
        counts = frame.local_count, frame.remote_count
        local_index, remote_index = frame_indices(copies.local_page, copies.remote_page, counts, first, stop)
        return FrameSlice(frame, self._placed.place, local_index, remote_index, self._cost_before(stop) - before)

    def _cost_before(self, piece: int) -> int:
        """What all pieces before this one cost."""
        num_pages, cost = len(self._copies.local_page), self._placed.cost_bytes
        entry, page = divmod(piece, num_pages)
        return cost[entry] * num_pages + ((cost[entry + 1] - cost[entry]) * page if page else 0)

    def _reach(self, cost_bytes: int) -> int:
        """Before which piece all cost no more than so much together."""
        num_pages, cost = len(self._copies.local_page), self._placed.cost_bytes
        entry = bisect_right(cost, cost_bytes // num_pages) - 1
        if entry >= len(cost) - 1:
            return self._stop
        return entry * num_pages + (cost_bytes - cost[entry] * num_pages) // (cost[entry + 1] - cost[entry])
