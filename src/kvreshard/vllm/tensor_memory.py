"""How are bytes of a device's memory zeroed, given addresses inside the tensors that vLLM has registered?

Each storage below the tensors is seen as bytes once; a range is a slice of one of them. A device does its work in its own
time, so `zero` waits for it: afterwards the bytes are there for whoever reads them.

Refused, with TransportError: addresses outside the tensors, and moving (loads are not staged on devices).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvreshard.transport.base import TransportError

if TYPE_CHECKING:
    import torch

Int64s = NDArray[np.int64]


class TensorMemory:
    """The storages below `tensors`, on any device."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        import torch

        found: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        self._starts = np.array(sorted(found), dtype=np.int64)
        self._storages = [found[start] for start in self._starts.tolist()]

    def zero(self, start: Int64s, stop: Int64s) -> None:
        """See `LocalMemory.zero`."""
        place = np.searchsorted(self._starts, start, side="right") - 1
        for index, low, high in zip(place.tolist(), start.tolist(), stop.tolist(), strict=True):
            storage = self._storages[index]
            first = low - int(self._starts[index])
            if index < 0 or first + high - low > storage.numel():
                raise TransportError(f"addresses [{low:#x}, {high:#x}) are in none of the registered caches")
            storage[first : first + high - low].zero_()
        self._settle()

    def move(self, *arguments: object, **named: object) -> None:
        """Refused: a device's loads have no staging buffer."""
        raise TransportError("loads are not staged on devices")

    def _settle(self) -> None:
        import torch

        for device in {storage.device for storage in self._storages if storage.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
