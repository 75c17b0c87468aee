"""How are bytes of this rank's own memory zeroed and permuted, given nothing but addresses?

`HostMemory` does it for memory that the processor reaches, in whole NumPy operations: a strided move is one assignment per
field, whatever the number of pages, at 0.5 to 1.0 of a plain copy for runs of 256 bytes and more.

Nothing is checked here: addresses come from a proved route and a checked request.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import msgspec
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
        `dst_bases[f] + dst_pages[k]`. `loops`: (count, step in the slot, step in the page), in bytes, none
        negative.
        """


class HostMemory:
    """Memory that the processor reaches by address. `reaches` and `weighted_sums` let `tools` digest it."""

    def read(self, low: int, high: int) -> NDArray[np.uint8]:
        """The bytes of addresses `[low, high)`, shape (high - low,), not copied."""
        return np.ndarray(high - low, np.uint8, memoryview((ctypes.c_uint8 * (high - low)).from_address(low)))

    def reaches(self, device: str) -> bool:
        """Whether memory on `device` ('cpu', 'cuda:0', ...) can be read here."""
        return device == "cpu"

    def weighted_sums(self, rows: Int64s, runs: Int64s, weights: Int64s, unit_bytes: int) -> Int64s:
        """See `tools.memory.Memory.weighted_sums`."""
        low, run_bytes = int(rows.min() + runs.min()), weights.shape[1] * unit_bytes
        rows, runs = rows - rows.min(), runs - runs.min()
        content = self.read(low, low + int(rows.max() + runs.max()) + run_bytes)
        # A run as one opaque element, of which one begins at every byte: NumPy copies it whole, whatever its alignment. Short runs are read as
        # numbers where they are aligned, which is several times as fast.
        is_number = run_bytes in (1, 2, 4, 8) and not ((rows % run_bytes).any() or (runs % run_bytes).any())
        element, step = (f"<i{run_bytes}", run_bytes) if is_number else (f"V{run_bytes}", 1)
        every = np.ndarray((content.size - run_bytes) // step + 1, element, content, strides=step)
        units = every[(rows // step)[:, None] + runs // step].view(f"<i{unit_bytes}").reshape(len(rows), -1)
        sums: Int64s = np.einsum("ru,u->r", units, weights.reshape(-1))
        return sums

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
        # Bytes of a run as one opaque element: NumPy copies it whole, whatever its alignment.
        run = np.dtype(f"V{length}")
        seen = MoveViews.of(slot_bytes, dst_pages, loops)
        for field, base in enumerate(dst_bases.tolist()):
            at = slots_address + field * len(dst_pages) * slot_bytes + slot_offset
            src = _view(at, run, seen.src_shape, seen.src_steps)
            dst = _view(base + dst_offset, run, seen.dst_shape, seen.dst_steps)
            dst[seen.page_numbers] = src


class MoveViews(msgspec.Struct, frozen=True, eq=False):
    """How a `move` sees slots and pages of one field as strided arrays: shapes and steps in bytes, pieces first, then the loops.

    Pages lie at `page_numbers` along the first axis of theirs, shape (n,).
    """

    src_shape: list[int]
    src_steps: list[int]
    dst_shape: list[int]
    dst_steps: list[int]
    page_numbers: Int64s

    @staticmethod
    def of(slot_bytes: int, dst_pages: Int64s, loops: Sequence[tuple[int, int, int]]) -> MoveViews:
        """From some of the arguments of `LocalMemory.move`."""
        page_step = int(np.gcd.reduce(dst_pages)) or 1
        page_numbers = dst_pages // page_step
        counts = [count for count, _, _ in loops]
        return MoveViews(
            [len(dst_pages), *counts],
            [slot_bytes, *(step for _, step, _ in loops)],
            [int(page_numbers.max()) + 1, *counts],
            [page_step, *(step for _, _, step in loops)],
            page_numbers,
        )


def _view(address: int, run: np.dtype[np.void], shape: list[int], steps: list[int]) -> NDArray[np.void]:
    """A strided array over raw memory."""
    extent = sum((count - 1) * step for count, step in zip(shape, steps, strict=True)) + run.itemsize
    buffer = (ctypes.c_uint8 * extent).from_address(address)
    return np.ndarray(shape, dtype=run, buffer=memoryview(buffer), strides=steps)
