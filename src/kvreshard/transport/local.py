"""Local memory of a rank: zeroes and permutes bytes, given addresses.

`HostMemory` does it for memory that the processor reaches, in whole NumPy operations: a strided move is one assignment per
field, whatever the number of pages, at 0.5 to 1.0 of a plain copy for runs of 256 bytes and more.

Nothing is checked here: addresses come from a proved route and a checked request.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.plan.copies import Int64s
from kvreshard.plan.stage import Move


class LocalMemory(Protocol):
    """Memory of one kind of device: `HostMemory`, or `device.TensorMemory`. The last two methods are for digests (`tools.digest`)."""

    def zero(self, start: Int64s, stop: Int64s) -> None:
        """Zero the address ranges `[start[i], stop[i])`."""

    def move(self, buffer_address: int, move: Move) -> None:
        """Carry out a `Move` out of the buffer at an address."""

    def reaches(self, device: str) -> bool:
        """Whether memory on `device` ('cpu', 'cuda:0', ...) can be read here."""

    def weighted_sums(self, rows: Int64s, runs: Int64s, weights: Int64s, unit_bytes: int) -> Int64s:
        """Per row the sum of its units times their weights, modulo 2^64: shape (n,).

        Row i has runs at `rows[i] + runs[j]`, shapes (n,) and (m,). A run has `k` units of 1 or 2 bytes, read as signed little-endian
        numbers; unit u of run j weighs `weights[j, u]`, shape (m, k). All of it lies in one region.
        """


class HostMemory:
    """Memory that the processor reaches by address."""

    def read(self, low: int, high: int) -> NDArray[np.uint8]:
        """The bytes of addresses `[low, high)`, shape (high - low,), not copied."""
        return np.ndarray(high - low, np.uint8, memoryview((ctypes.c_uint8 * (high - low)).from_address(low)))

    def reaches(self, device: str) -> bool:
        """See `LocalMemory.reaches`."""
        return device == "cpu"

    def weighted_sums(self, rows: Int64s, runs: Int64s, weights: Int64s, unit_bytes: int) -> Int64s:
        """See `LocalMemory.weighted_sums`."""
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

    def move(self, buffer_address: int, move: Move) -> None:
        """See `LocalMemory.move`."""
        # Bytes of a run as one opaque element: NumPy copies it whole, whatever its alignment.
        run = np.dtype(f"V{move.length}")
        src, dst = move_sides(move)
        for src_base, dst_base in zip(move.src_bases.tolist(), move.dst_bases.tolist(), strict=True):
            target = _view(dst_base, run, dst)
            target[dst.places] = _view(buffer_address + src_base, run, src)[src.places]


class MoveSide(msgspec.Struct, frozen=True, eq=False):
    """How one side of a `Move` sees the runs of one field as a strided array: shape and steps in bytes, pieces first, then the loops.

    Pieces lie at `places` along the first axis: a slice where they are evenly spaced, else numbers of shape (pieces,).
    """

    shape: list[int]
    steps: list[int]
    places: slice | Int64s

    @staticmethod
    def of(at: Int64s, loops: list[tuple[int, int]]) -> MoveSide:
        """`at`: where the pieces begin; `loops`: count and step of each."""
        step = int(np.gcd.reduce(at)) or 1
        numbers = at // step
        shape = [int(numbers.max()) + 1, *(count for count, _ in loops)]
        return MoveSide(shape, [step, *(loop_step for _, loop_step in loops)], _as_slice(numbers))


def move_sides(move: Move) -> tuple[MoveSide, MoveSide]:
    """Source and destination of a move."""
    return (
        MoveSide.of(move.src_at, [(loop.count, loop.src_step) for loop in move.loops]),
        MoveSide.of(move.dst_at, [(loop.count, loop.dst_step) for loop in move.loops]),
    )


def _as_slice(numbers: Int64s) -> slice | Int64s:
    """Ascending numbers at a constant distance as a slice, by which NumPy copies nothing first."""
    step = int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    is_even = step > 0 and bool((numbers[1:] - numbers[:-1] == step).all())
    return slice(int(numbers[0]), int(numbers[-1]) + 1, step) if is_even else numbers


def _view(address: int, run: np.dtype[np.void], side: MoveSide) -> NDArray[np.void]:
    """A strided array over raw memory."""
    extent = sum((count - 1) * step for count, step in zip(side.shape, side.steps, strict=True)) + run.itemsize
    buffer = (ctypes.c_uint8 * extent).from_address(address)
    return np.ndarray(side.shape, dtype=run, buffer=memoryview(buffer), strides=side.steps)
