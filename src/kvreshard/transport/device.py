"""Zeroes, permutes and reads memory of a device, given addresses inside tensors. The only module outside `vllm/` that imports torch.

1. `TensorMemory` sees each storage below its tensors as bytes once. What is zeroed is a slice of one of them.
2. A permute is one kernel (`device_kernel`) on a CUDA device that has Triton, as vLLM's have. Elsewhere it is one indexed copy per field, of
   views with the steps of the loops. Elements are as wide as all addresses and steps allow.
3. A digest is summed on the device, some rows at a time.

All of it runs on a stream of this module's own, and waits for that stream alone: it never waits for the engine's steps, and no step waits for
it. What it writes are pages that no step uses: vLLM gives a page to a load when the steps that may still write it have ended (0.32.0,
`scheduler.py`, `defer_block_free`). When a call returns, its bytes are there for every stream and every peer.

Refused, with TransportError: addresses outside the tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from math import gcd
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.logs import fields, get_logger
from kvreshard.plan.copies import Int64s
from kvreshard.plan.stage import Move
from kvreshard.transport.base import TransportError
from kvreshard.transport.local import move_sides

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

WIDEST_BYTES = 8
# Of `device_kernel`.
MAX_LOOPS = 4
Permute = Callable[..., None]


def enter_device(device: str) -> None:
    """Make the calling thread one of a device's threads; nothing to do for "cpu".

    A new thread has no CUDA context, and UCX leaves `cuda_ipc` out where it finds none.
    """
    if device == "cpu":
        return
    import torch

    torch.accelerator.set_device_index(torch.device(device))
    torch.zeros(1, device=device)  # set_device_index alone makes no context where the device is the current one already


def recorder(devices: Sequence[str]) -> Callable[[], Callable[[], bool]] | None:
    """Leaves an event behind what the calling thread has told its current streams on these devices, "cuda:0", ...; None without a device.

    What is returned says whether the event has happened. It never waits.
    """
    if not devices:
        return None
    import torch

    def record() -> Callable[[], bool]:
        events = []
        for device in devices:
            events.append(torch.Event(device))
            events[-1].record(torch.accelerator.current_stream(device))
        return lambda: all(event.query() for event in events)

    return record


def allocate(num_bytes: int, device: str) -> torch.Tensor:
    """Enter a device and take memory there, zeroed: a tensor of uint8, shape (num_bytes,).

    Raises:
        TransportError: torch is not installed, or the device is not there or has no room.
    """
    try:
        import torch

        enter_device(device)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    except ImportError as error:
        raise TransportError(
            f"memory on {device} needs torch, which cannot be imported ({error}); install it"
        ) from error
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise TransportError(
            f"{num_bytes} bytes of {device} cannot be had: {error}; name a device that torch sees here, or ask for less"
        ) from error


def _load_kernel(device: torch.device) -> Permute | None:
    """`device_kernel.permute`, compiled for a device, or None where that fails: Triton is not there, or has no C compiler."""
    try:
        from kvreshard.transport.device_kernel import permute, warm_up

        warm_up(device)
    except Exception as error:  # noqa: BLE001  whatever it is, torch can do without
        logger.warning(
            "staged pages are permuted by torch, field by field, which is slower: Triton's kernel cannot be used (%s)",
            error,
            extra=fields("staging_by_torch"),
        )
        return None
    return permute


def _extents(move: Move) -> tuple[int, int]:
    """Bytes from the first to the last that one piece's runs have in the buffer, and in the page."""
    src = move.length + sum((loop.count - 1) * loop.src_step for loop in move.loops)
    return src, move.length + sum((loop.count - 1) * loop.dst_step for loop in move.loops)


def _numbers(places: slice | Int64s) -> Int64s:
    return np.arange(places.start, places.stop, places.step) if isinstance(places, slice) else places


def _picked(tensor: torch.Tensor, places: slice | Int64s) -> torch.Tensor:
    """Some places along the first axis."""
    return tensor[places] if isinstance(places, slice) else tensor[_numbers_on(places, tensor.device)]


def _numbers_on(column: Int64s, device: torch.device) -> torch.Tensor:
    """Numbers on a device."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(column)).to(device)


class TensorMemory:
    """The storages below `tensors`, on any device. `has_kernel`: whether a permute is one kernel; None: if it can be on this device."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, has_kernel: bool | None = None) -> None:
        import torch

        found: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._starts = np.array(sorted(found), dtype=np.int64)
        self._storages = [found[start] for start in self._starts.tolist()]
        self._aligned_bytes = gcd(WIDEST_BYTES, *self._starts.tolist())
        devices = {storage.device for storage in self._storages}
        self._devices = {str(device) for device in devices}
        self._streams = {device: torch.cuda.Stream(device) for device in devices if device.type == "cuda"}
        if has_kernel is None:
            has_kernel = len(self._streams) == len(devices) == 1
        self._permute = _load_kernel(self._storages[0].device) if has_kernel else None

    def zero(self, start: Int64s, stop: Int64s) -> None:
        """See `LocalMemory.zero`."""
        with self._settled():
            for low, high in zip(start.tolist(), stop.tolist(), strict=True):
                storage, first = self._find(low, high)
                storage[first : first + high - low].zero_()

    def move(self, buffer_address: int, move: Move) -> None:
        """See `LocalMemory.move`."""
        src_bases, dst_bases, length = buffer_address + move.src_bases, move.dst_bases, move.length
        # Widths are powers of two: the lowest bit that any of the numbers has.
        bits = WIDEST_BYTES | self._aligned_bytes | length
        for column in (src_bases, move.src_at, dst_bases, move.dst_at):
            bits |= int(np.bitwise_or.reduce(column))
        for loop in move.loops:
            bits |= loop.src_step | loop.dst_step
        width = bits & -bits
        if self._permute is None or len(move.loops) > MAX_LOOPS:
            self._move_by_fields(src_bases, move, width)
            return
        for bases, at, extent in zip((src_bases, dst_bases), (move.src_at, move.dst_at), _extents(move), strict=True):
            for first in (bases + at.min()).tolist():
                self._find(first, first + int(at.max() - at.min()) + extent)
        loops = [(loop.count, loop.src_step, loop.dst_step) for loop in move.loops]
        with self._settled():
            columns = (src_bases, move.src_at, dst_bases, move.dst_at)
            self._permute(*(_numbers_on(column, self._storages[0].device) for column in columns), length, loops, width)

    def _move_by_fields(self, src_bases: Int64s, move: Move, width: int) -> None:
        src_side, dst_side = move_sides(move)
        with self._settled():
            for src_base, dst_base in zip(src_bases.tolist(), move.dst_bases.tolist(), strict=True):
                src = _picked(self._view(src_base, src_side.shape, src_side.steps, move.length, width), src_side.places)
                dst = self._view(dst_base, dst_side.shape, dst_side.steps, move.length, width)
                dst.index_copy_(0, _numbers_on(_numbers(dst_side.places), dst.device), src.to(dst.device))

    def read(self, address: int, into: NDArray[np.uint8]) -> None:
        """Copy as many bytes from `address` on as `into` has, shape (n,). Raises TransportError for addresses outside the tensors."""
        import torch

        storage, first = self._find(address, address + into.nbytes)
        with self._settled():
            torch.from_numpy(into).copy_(storage[first : first + into.nbytes])

    def write(self, address: int, content: NDArray[np.uint8]) -> None:
        """Copy `content`, shape (n,), to `address`. Raises TransportError for addresses outside the tensors."""
        import torch

        storage, first = self._find(address, address + content.nbytes)
        with self._settled():
            storage[first : first + content.nbytes].copy_(torch.from_numpy(content))

    def reaches(self, device: str) -> bool:
        """See `LocalMemory.reaches`."""
        return device in self._devices

    def weighted_sums(self, rows: Int64s, runs: Int64s, weights: Int64s, unit_bytes: int) -> Int64s:
        """See `LocalMemory.weighted_sums`. The device gathers, weighs and sums; only the sums are copied from it."""
        import torch

        low, run_bytes = int(rows.min() + runs.min()), weights.shape[1] * unit_bytes
        rows, runs = rows - rows.min(), runs - runs.min()
        num_starts = int(rows.max() + runs.max()) + 1
        storage, first = self._find(low, low + num_starts - 1 + run_bytes)
        unit = torch.int16 if unit_bytes == 2 else torch.int8
        with self._on_stream(storage.device):
            every = storage.as_strided([num_starts, run_bytes], [1, 1], first)
            there = [_numbers_on(numbers, storage.device) for numbers in (rows, runs, weights.reshape(-1))]
            units = every[(there[0][:, None] + there[1]).reshape(-1)].view(unit).reshape(len(rows), -1)
            sums: Int64s = (units * there[2]).sum(1).cpu().numpy()
        return sums

    def _find(self, low: int, high: int) -> tuple[torch.Tensor, int]:
        """The storage of addresses `[low, high)`, as bytes, and where in it they begin."""
        index = int(np.searchsorted(self._starts, low, side="right")) - 1
        if index >= 0:
            storage, first = self._storages[index], low - int(self._starts[index])
            if first + high - low <= storage.numel():
                return storage, first
        raise TransportError(f"addresses [{low:#x}, {high:#x}) are in none of the registered caches")

    def _view(self, address: int, shape: list[int], steps: list[int], length: int, width: int) -> torch.Tensor:
        """Runs of `length` bytes from `address` on, shape (*shape, length / width); all sizes are multiples of `width`."""
        import torch

        extent = sum((count - 1) * step for count, step in zip(shape, steps, strict=True)) + length
        storage, first = self._find(address, address + extent)
        element = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width]
        elements = storage[: storage.numel() // width * width].view(element)
        return elements.as_strided([*shape, length // width], [*(step // width for step in steps), 1], first // width)

    def _on_stream(self, device: torch.device) -> AbstractContextManager[Any]:
        import torch

        stream = self._streams.get(device)
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Queue work on the streams of this memory, and wait until it is done, also if not all of it could be queued."""
        try:
            with contextlib.ExitStack() as entered:
                for device in self._streams:
                    entered.enter_context(self._on_stream(device))
                yield
        finally:
            for stream in self._streams.values():
                stream.synchronize()
