"""How are bytes of this rank's own memory zeroed and permuted, given nothing but addresses?

`HostMemory` does it for memory that the processor reaches, in whole NumPy operations: a strided move is one assignment per
field, whatever the number of pages. Element width is the widest that lengths, steps and addresses allow.

Nothing is checked here: addresses come from a proved route and a checked request.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


class LocalMemory(Protocol):
    """Memory of one kind of device."""

    def zero(self, start: Int64s, stop: Int64s) -> None:
        """Zero the address ranges `[start[i], stop[i])`."""

    def move(
        self,
        slots_address: int,
        slot_bytes: int,
        dst_bases: Int64s,
        dst_pages: Int64s,
        length: int,
        loops: Sequence[tuple[int, int, int]],
        slot_offset: int,
        dst_offset: int,
    ) -> None:
        """Copy `length` bytes per step from slots to pages.

        Slot (f, k) starts at `slots_address + (f * len(dst_pages) + k) * slot_bytes`, its page at
        `dst_bases[f] + dst_pages[k]`. `loops`: (count, step in the slot, step in the page), in bytes.
        """


class HostMemory:
    """Memory that the processor reaches by address. `read` lets `verify` digest it; device memory has none yet."""

    def read(self, low: int, high: int) -> NDArray[np.uint8]:
        """The bytes of addresses `[low, high)`, shape (high - low,), not copied."""
        return np.ndarray(high - low, np.uint8, memoryview((ctypes.c_uint8 * (high - low)).from_address(low)))

    def zero(self, start: Int64s, stop: Int64s) -> None:
        """See `LocalMemory.zero`."""
        for low, high in zip(start.tolist(), stop.tolist(), strict=True):
            ctypes.memset(low, 0, high - low)

    def move(
        self,
        slots_address: int,
        slot_bytes: int,
        dst_bases: Int64s,
        dst_pages: Int64s,
        length: int,
        loops: Sequence[tuple[int, int, int]],
        slot_offset: int,
        dst_offset: int,
    ) -> None:
        """See `LocalMemory.move`."""
        page_step = int(np.gcd.reduce(dst_pages)) or 1
        steps = [step for _, *pair in loops for step in pair]
        odd = int(np.gcd.reduce(np.array([slots_address + slot_offset, slot_bytes, dst_offset, length, *steps])))
        width = next(w for w in (8, 4, 2, 1) if not odd % w and not page_step % w and not (dst_bases % w).any())
        counts = [count for count, _, _ in loops]
        num_pieces, word = len(dst_pages), np.dtype(f"u{width}")
        src_steps = [slot_bytes, *(step for _, step, _ in loops), width]
        dst_steps = [page_step, *(step for _, _, step in loops), width]
        ids = dst_pages // page_step
        for field, base in enumerate(dst_bases.tolist()):
            at = slots_address + field * num_pieces * slot_bytes + slot_offset
            src = _view(at, word, [num_pieces, *counts, length // width], src_steps)
            dst = _view(base + dst_offset, word, [int(ids.max()) + 1, *counts, length // width], dst_steps)
            dst[ids] = src


def _view(
    address: int, word: np.dtype[np.unsignedinteger], shape: list[int], steps: list[int]
) -> NDArray[np.unsignedinteger]:
    """A strided array over raw memory."""
    extent = sum((count - 1) * step for count, step in zip(shape, steps, strict=True)) + word.itemsize
    buffer = (ctypes.c_uint8 * extent).from_address(address)
    return np.ndarray(shape, dtype=word, buffer=memoryview(buffer), strides=steps)
