"""The memory that a digest reads, given nothing but addresses.

`HostMemory` of `transport.local` is memory that the processor reaches, `TensorMemory` of `transport.device` that of a device, and
`ArrayBytes` arrays that stand for memory at made-up addresses. None of them is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import BindError
from kvreshard.transport.local import sum_weighted

Bytes = NDArray[np.uint8]
Int64s = NDArray[np.int64]


@runtime_checkable
class Memory(Protocol):
    """Readable memory of one or several ranks."""

    def reaches(self, device: str) -> bool:
        """Whether memory on `device` ('cpu', 'cuda:0', ...) can be read here."""

    def weighted_sums(self, rows: Int64s, runs: Int64s, weights: Int64s, unit_bytes: int) -> Int64s:
        """Per row the sum of its units times their weights, modulo 2^64: shape (n,).

        Row i has runs at `rows[i] + runs[j]`, shapes (n,) and (m,). A run has `k` units of 1 or 2 bytes, read as signed little-endian
        numbers; unit u of run j weighs `weights[j, u]`, shape (m, k). All of it lies in one region.
        """


class ArrayBytes:
    """Arrays of bytes: address of the first byte -> shape (size_bytes,). They stand for memory on any device."""

    def __init__(self, arrays: Mapping[int, Bytes]) -> None:
        self._addresses = np.array(sorted(arrays), dtype=np.int64)
        self._arrays = [arrays[address] for address in self._addresses.tolist()]

    def reaches(self, device: str) -> bool:
        """See `Memory.reaches`."""
        return True

    def weighted_sums(self, rows: Int64s, runs: Int64s, weights: Int64s, unit_bytes: int) -> Int64s:
        """See `Memory.weighted_sums`. Raises BindError for addresses outside the arrays."""
        return sum_weighted(self._read, rows, runs, weights, unit_bytes)

    def _read(self, low: int, high: int) -> Bytes:
        index = int(np.searchsorted(self._addresses, low, side="right")) - 1
        if index < 0 or high > int(self._addresses[index]) + len(self._arrays[index]):
            raise BindError(
                f"addresses [{low}, {high}) lie outside the memory that was given; give every region of the rank"
            )
        start = low - int(self._addresses[index])
        return self._arrays[index][start : start + high - low]
