"""What is copied when many posts name pages of the same places? The noun beside `base.Copies`.

A `Frame` says where the entries of any page lie, on both sides; `FramedCopies` are all its entries for some pairs of pages. A
transport checks a frame once, with all of its pages, and may keep what it has prepared for it.

Refused, with a `TransportError`: frames that leave the address space, pages that a frame does not have.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvreshard.model.loops import bounds, pieces_extent, run_bounds
from kvreshard.transport.base import ADDRESS_SPACE_BYTES, Addresses, Copies, TransportError


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Frame:
    """Places that many posts share: entry e of local page p and remote page q is `length_bytes[e]` bytes at
    `local_address[e] + p * local_stride_bytes` and `remote_address[e] + q * remote_stride_bytes`.

    Arrays of shape (num_entries,); pages are below `local_count` and `remote_count`. A transport may keep what it has
    prepared for a frame as long as the object lives: post the same object again.

    Raises:
        TransportError: as `Copies`, for the first and for the last page; negative strides, counts that are not positive.
    """

    local_address: Addresses
    remote_address: Addresses
    length_bytes: Addresses
    local_stride_bytes: int
    remote_stride_bytes: int
    local_count: int
    remote_count: int

    page_bytes: int = field(init=False)
    """Bytes of all entries of one page."""
    longest_bytes: int = field(init=False)
    """Bytes of the longest entry."""
    is_dense: bool = field(init=False)
    """Whether neighbouring pages of every entry touch, on both sides."""

    def __post_init__(self) -> None:
        numbers = (self.local_stride_bytes, self.remote_stride_bytes, self.local_count - 1, self.remote_count - 1)
        if min(numbers) < 0 or not len(self.length_bytes):
            raise TransportError(
                f"a frame of {len(self.length_bytes)} entries, {self.local_count} local and {self.remote_count} remote "
                f"pages every {self.local_stride_bytes} and {self.remote_stride_bytes} bytes; sizes are positive"
            )
        first = Copies(self.local_address, self.remote_address, self.length_bytes)
        for name in ("local_address", "remote_address", "length_bytes"):
            object.__setattr__(self, name, getattr(first, name))
        most_local, most_remote, longest_bytes, page_bytes, are_equal = pieces_extent(
            first.local_address, first.remote_address, first.length_bytes
        )
        object.__setattr__(self, "longest_bytes", longest_bytes)
        for name, address, span in (
            ("local", most_local, self.local_span_bytes),
            ("remote", most_remote, self.remote_span_bytes),
        ):
            if address + span > ADDRESS_SPACE_BYTES:
                raise TransportError(f"the {name} pages of a frame leave the 64-bit address space")
        strides = self.local_stride_bytes, self.remote_stride_bytes
        object.__setattr__(self, "page_bytes", page_bytes)
        object.__setattr__(self, "is_dense", are_equal and strides == (longest_bytes, longest_bytes))

    @staticmethod
    def of(
        local_address: ArrayLike,
        remote_address: ArrayLike,
        length_bytes: ArrayLike,
        local_stride_bytes: int,
        remote_stride_bytes: int,
        local_count: int,
        remote_count: int,
    ) -> Frame:
        """Build from anything that NumPy reads as rows of whole numbers."""
        local, remote, length = np.asarray(local_address), np.asarray(remote_address), np.asarray(length_bytes)
        return Frame(
            local,
            remote,
            length if length.ndim else np.broadcast_to(length, local.shape),
            local_stride_bytes,
            remote_stride_bytes,
            local_count,
            remote_count,
        )

    @property
    def local_span_bytes(self) -> int:
        """From the first byte of page 0 to the last byte of the last page, over the longest entry."""
        return (self.local_count - 1) * self.local_stride_bytes + self.longest_bytes

    @property
    def remote_span_bytes(self) -> int:
        """The same on the remote side."""
        return (self.remote_count - 1) * self.remote_stride_bytes + self.longest_bytes


class FramedCopies(msgspec.Struct, frozen=True, eq=False):
    """All entries of a frame for the pairs of pages `local_page[i]`, `remote_page[i]`, whole numbers of shape (n,).

    `run_pages[i]`: how many neighbouring pages of both sides are one piece from there on; None for one each. Pages of which more
    than one are a piece must lie without gaps.

    Raises:
        TransportError: the arrays differ in length, a page is not one of the frame's, or a run is empty or has gaps.
    """

    frame: Frame
    local_page: NDArray[np.int64]
    remote_page: NDArray[np.int64]
    run_pages: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        runs = self.run_pages
        if (
            not self.local_page.shape == self.remote_page.shape == (self.local_page if runs is None else runs).shape
            or self.local_page.ndim != 1
        ):
            also = "" if runs is None else f" in runs of {runs.shape}"
            raise TransportError(f"{self.local_page.shape} local pages for {self.remote_page.shape} remote ones{also}")
        if not len(self.local_page):
            return
        if runs is not None:
            least, most = bounds(runs)
            if least < 1 or most > (self.frame.local_count if self.frame.is_dense else 1):
                raise TransportError(
                    f"runs of {least} to {most} pages, of a frame of {self.frame.local_count}; a run has one page, or more that lie "
                    "without gaps"
                )
        sides = (
            ("local", self.local_page, self.frame.local_count),
            ("remote", self.remote_page, self.frame.remote_count),
        )
        for name, page, count in sides:
            low, high = bounds(page) if runs is None else run_bounds(page, runs)
            if low < 0 or high >= count:
                raise TransportError(f"{name} pages from {low} to {high}, but the frame has [0, {count})")

    def __len__(self) -> int:
        return len(self.frame.length_bytes) * len(self.local_page)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces together."""
        num_pages = len(self.local_page) if self.run_pages is None else int(np.add.reduce(self.run_pages))
        return self.frame.page_bytes * num_pages

    def flat(self) -> Copies:
        """The same pieces, one by one."""
        frame = self.frame
        local = self.local_page.astype(np.uint64) * np.uint64(frame.local_stride_bytes)
        remote = self.remote_page.astype(np.uint64) * np.uint64(frame.remote_stride_bytes)
        return Copies(
            (frame.local_address[:, None] + local).reshape(-1),
            (frame.remote_address[:, None] + remote).reshape(-1),
            (frame.length_bytes[:, None] * self.runs()).reshape(-1),
        )

    def runs(self) -> Addresses:
        """Pages of each pair, shape (n,)."""
        if self.run_pages is None:
            return np.ones(len(self.local_page), dtype=np.uint64)
        return self.run_pages.astype(np.uint64)
