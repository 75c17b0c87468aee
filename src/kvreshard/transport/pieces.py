"""What is copied, in the terms of a transport: addresses on both sides and lengths, checked once when they are made.

`Copies` lists every piece. `Frame` and `FramedCopies` say the same of whole pages, which are alike: the pieces of page 0, and
which pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Addresses = NDArray[np.uint64]

ADDRESS_SPACE_BYTES = 2**64


class TransportError(Exception):
    """A transport refused or could not finish something; the message names the fact, both sides and the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """Pieces to copy: row i moves `length_bytes[i]` bytes between `local_address[i]` and `remote_address[i]`.

    The arrays are one-dimensional uint64 of equal length n >= 0, read-only, and checked once, here.

    Raises:
        TransportError: if the arrays differ in length, are not whole numbers of one dimension, hold a negative number
            or a zero length, or a piece wraps around the end of the address space.
    """

    local_address: Addresses
    remote_address: Addresses
    length_bytes: Addresses

    def __post_init__(self) -> None:
        for name in ("local_address", "remote_address", "length_bytes"):
            object.__setattr__(self, name, _as_uint64(name, getattr(self, name)))
        sizes = (self.local_address.size, self.remote_address.size, self.length_bytes.size)
        if len(set(sizes)) != 1:
            raise TransportError(
                f"a copy list needs one local address, one remote address and one length per piece; got {sizes}"
            )
        if self.length_bytes.size and not self.length_bytes.all():
            row = int(np.flatnonzero(self.length_bytes == 0)[0])
            raise TransportError(f"piece {row} of {sizes[0]} has length 0; leave empty pieces out of the list")
        for name, address in (("local", self.local_address), ("remote", self.remote_address)):
            # The end address may be exactly 2^64, which is 0 here: compare the last byte instead.
            wraps = np.flatnonzero(address + (self.length_bytes - np.uint64(1)) < address)
            if wraps.size:
                row = int(wraps[0])
                raise TransportError(
                    f"piece {row}: {int(self.length_bytes[row])} bytes at {name} address {int(address[row]):#x} wrap "
                    "around the end of the address space; check how the address was computed"
                )

    @staticmethod
    def of(local_address: ArrayLike, remote_address: ArrayLike, length_bytes: ArrayLike) -> Copies:
        """Build from anything that NumPy reads as three rows of whole numbers; a scalar length serves all pieces."""
        local = _as_uint64("local_address", local_address)
        length = _as_uint64("length_bytes", np.broadcast_to(np.asarray(length_bytes), local.shape))
        return Copies(local, _as_uint64("remote_address", remote_address), length)

    def __len__(self) -> int:
        return int(self.length_bytes.size)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces together."""
        return int(self.length_bytes.sum(dtype=np.uint64))


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
        for name, address, span in (
            ("local", first.local_address, self.local_span_bytes),
            ("remote", first.remote_address, self.remote_span_bytes),
        ):
            if int(address.max()) + span > ADDRESS_SPACE_BYTES:
                raise TransportError(f"the {name} pages of a frame leave the 64-bit address space")

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
        first = Copies.of(local_address, remote_address, length_bytes)
        return Frame(
            first.local_address,
            first.remote_address,
            first.length_bytes,
            local_stride_bytes,
            remote_stride_bytes,
            local_count,
            remote_count,
        )

    @property
    def local_span_bytes(self) -> int:
        """From the first byte of page 0 to the last byte of the last page, over the longest entry."""
        return (self.local_count - 1) * self.local_stride_bytes + int(self.length_bytes.max())

    @property
    def remote_span_bytes(self) -> int:
        """The same on the remote side."""
        return (self.remote_count - 1) * self.remote_stride_bytes + int(self.length_bytes.max())


@dataclass(frozen=True, slots=True, eq=False)
class FramedCopies:
    """All entries of a frame for the pairs of pages `local_page[i]`, `remote_page[i]`, whole numbers of shape (n,).

    Raises:
        TransportError: the arrays differ in length, or a page is not one of the frame's.
    """

    frame: Frame
    local_page: NDArray[np.int64]
    remote_page: NDArray[np.int64]

    def __post_init__(self) -> None:
        sides = (
            ("local", self.local_page, self.frame.local_count),
            ("remote", self.remote_page, self.frame.remote_count),
        )
        if self.local_page.shape != self.remote_page.shape or self.local_page.ndim != 1:
            raise TransportError(f"{self.local_page.shape} local pages for {self.remote_page.shape} remote ones")
        for name, page, count in sides:
            if len(page) and not (int(page.min()) >= 0 and int(page.max()) < count):
                raise TransportError(
                    f"{name} pages from {int(page.min())} to {int(page.max())}, but the frame has [0, {count})"
                )

    def __len__(self) -> int:
        return len(self.frame.length_bytes) * len(self.local_page)

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces together."""
        return int(self.frame.length_bytes.sum(dtype=np.uint64)) * len(self.local_page)

    def flat(self) -> Copies:
        """The same pieces, one by one."""
        frame = self.frame
        local = self.local_page.astype(np.uint64) * np.uint64(frame.local_stride_bytes)
        remote = self.remote_page.astype(np.uint64) * np.uint64(frame.remote_stride_bytes)
        return Copies(
            (frame.local_address[:, None] + local).reshape(-1),
            (frame.remote_address[:, None] + remote).reshape(-1),
            np.repeat(frame.length_bytes, len(local)),
        )


def _as_uint64(name: str, values: ArrayLike) -> Addresses:
    """A read-only uint64 array; copies only when the input is not one already. Empty lists count as whole numbers."""
    array = np.asarray(values)
    if array.size == 0:
        array = array.astype(np.uint64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise TransportError(
            f"{name} has {array.ndim} dimension(s) of {array.dtype}; give one dimension of whole numbers (uint64)"
        )
    if array.dtype.kind == "i" and (array < 0).any():
        raise TransportError(f"{name} holds {int(array.min())}; addresses and lengths are not negative")
    # No number is negative here: eight bytes mean the same in both kinds, and need no copy.
    whole = array.view(np.uint64) if array.dtype == np.int64 else array
    view = np.ascontiguousarray(whole, dtype=np.uint64).view()
    view.flags.writeable = False
    return view
