"""The memory of one rank of a test, on the processor or on a device, and the controller's view of it.

1. `Block` is memory of this process. The controller has the same bytes.
2. `DeviceBlock` is a tensor of a device. The controller has a copy in host memory: `download` updates the copy, `upload` the device.

Raises TransportError: a device that does not exist, or has too little memory.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
from numpy.typing import NDArray

from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.device import TensorMemory, allocate, enter_device
from kvreshard.transport.local import HostMemory, LocalMemory

# More than fits any processor's cache.
PLAIN_COPY_BYTES = 512 << 20


class Block:
    """`size_bytes` of this process's memory from `address`, as one region. `memory`: zeroes and permutes it."""

    def __init__(self, address: int, size_bytes: int, device: str = "cpu", memory: LocalMemory | None = None) -> None:
        self.region = MemoryRegion(address, size_bytes, device)
        self.memory = memory or HostMemory()

    def enter(self) -> None:
        """Make the calling thread one of its device's threads."""

    def upload(self) -> None:
        """Copy the controller's bytes to it."""

    def download(self) -> None:
        """Copy its bytes to the controller."""

    def make_resident(self, address: int, num_bytes: int) -> None:
        """Touch every page of a part, as a running engine has, so that no transfer pays for page faults."""
        pages = np.ndarray(
            -(-num_bytes // 4096), np.uint8, memoryview((ctypes.c_uint8 * num_bytes).from_address(address)), 0, 4096
        )
        pages[:] = pages.copy()


class DeviceBlock(Block):
    """Memory of a device. `mirror`: the controller's copy, of the same size. It is resident from the start."""

    def __init__(self, mirror: NDArray[np.uint8], device: str) -> None:
        self._device, self._mirror = device, mirror
        self.tensor = allocate(mirror.nbytes, device)
        self._tensors = TensorMemory([self.tensor])
        super().__init__(self.tensor.data_ptr(), mirror.nbytes, device, self._tensors)

    def enter(self) -> None:
        enter_device(self._device)

    def upload(self) -> None:
        self._tensors.write(self.region.address, self._mirror)

    def download(self) -> None:
        self._tensors.read(self.region.address, self._mirror)

    def make_resident(self, address: int, num_bytes: int) -> None:
        return


def block_of(array: NDArray[np.uint8], device: str) -> Block:
    """The block behind a controller's array, shape (num_bytes,): the same memory, or a device's. Raises TransportError."""
    return Block(int(array.ctypes.data), array.nbytes) if device == "cpu" else DeviceBlock(array, device)


def make_block(num_bytes: int, device: str) -> tuple[NDArray[np.uint8], Block]:
    """A new array of zeros and its block. Raises TransportError."""
    array = np.zeros(num_bytes, dtype=np.uint8)
    return array, block_of(array, device)


def time_plain_copy(num_bytes: int, device: str = "cpu") -> float:
    """Seconds of a copy of so many bytes within a device's memory, or by one core, in pieces of at most `PLAIN_COPY_BYTES`."""
    size = min(num_bytes, PLAIN_COPY_BYTES)
    if not size:
        return 0.0
    parts = range(0, num_bytes, size)
    if device == "cpu":
        source, target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)  # ones: touched, unlike zeros
        started_s = time.perf_counter()
        for done in parts:
            np.copyto(target[: num_bytes - done], source[: num_bytes - done])
        return time.perf_counter() - started_s
    here, there = allocate(size, device), allocate(size, device)
    there.copy_(here)
    there[-1].item()  # waits for what was queued
    started_s = time.perf_counter()
    for done in parts:
        there[: num_bytes - done].copy_(here[: num_bytes - done])
    there[-1].item()
    return time.perf_counter() - started_s
