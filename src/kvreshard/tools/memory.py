"""The memory that a digest reads, given nothing but addresses: `HostMemory` of `transport.local`, `TensorMemory` of `transport.device`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class Memory(Protocol):
    """Readable memory of a rank."""

    def reaches(self, device: str) -> bool:
        """Whether memory on `device` ('cpu', 'cuda:0', ...) can be read here."""

    def weighted_sums(self, rows: Int64s, runs: Int64s, weights: Int64s, unit_bytes: int) -> Int64s:
        """Per row the sum of its units times their weights, modulo 2^64: shape (n,).

        Row i has runs at `rows[i] + runs[j]`, shapes (n,) and (m,). A run has `k` units of 1 or 2 bytes, read as signed little-endian
        numbers; unit u of run j weighs `weights[j, u]`, shape (m, k). All of it lies in one region.
        """
