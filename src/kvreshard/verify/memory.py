"""How does a digest see memory, given nothing but addresses?

As flat bytes between two addresses, without a copy; the digest makes strided views of them and never writes. `HostBytes` is
memory that the processor reaches. `ArrayBytes` is arrays that stand for memory at made-up addresses.

Refused: by `ArrayBytes`, addresses outside its arrays. `HostBytes` trusts addresses of a checked layout and table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import BindError

Bytes = NDArray[np.uint8]


@runtime_checkable
class Memory(Protocol):
    """Readable memory of one or several ranks."""

    def read(self, low: int, high: int) -> Bytes:
        """The bytes of addresses `[low, high)`, shape (high - low,), not copied. They lie in one region."""


class HostBytes:
    """Memory that the processor reaches by address."""

    def read(self, low: int, high: int) -> Bytes:
        """See `Memory.read`."""
        return np.ndarray(high - low, np.uint8, memoryview((ctypes.c_uint8 * (high - low)).from_address(low)))


class ArrayBytes:
    """Arrays of bytes: address of the first byte -> shape (size_bytes,)."""

    def __init__(self, arrays: Mapping[int, Bytes]) -> None:
        self._addresses = np.array(sorted(arrays), dtype=np.int64)
        self._arrays = [arrays[address] for address in self._addresses.tolist()]

    def read(self, low: int, high: int) -> Bytes:
        """See `Memory.read`."""
        index = int(np.searchsorted(self._addresses, low, side="right")) - 1
        if index < 0 or high > int(self._addresses[index]) + len(self._arrays[index]):
            raise BindError(
                f"addresses [{low}, {high}) lie outside the memory that was given; give every region of the rank"
            )
        start = low - int(self._addresses[index])
        return self._arrays[index][start : start + high - low]
