"""How does a digest see memory, given nothing but addresses?

As words at regular distances, of which it asks for rows (`transport.words`); it never writes. `HostMemory` of `transport.local` is memory
that the processor reaches, `ArrayBytes` arrays that stand for memory at made-up addresses; a device has its own.

Refused by `ArrayBytes`: addresses outside its arrays. `HostMemory` trusts addresses of a checked layout and table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import BindError
from kvreshard.transport.words import ArrayWords, Words, words_of

Bytes = NDArray[np.uint8]


@runtime_checkable
class Memory(Protocol):
    """Readable memory of one or several ranks."""

    def reaches(self, device: str) -> bool:
        """Whether memory on `device` ('cpu', 'cuda:0', ...) can be read here."""

    def words(self, address: int, word_bytes: int, counts: Sequence[int], steps: Sequence[int]) -> Words:
        """Little-endian words of `word_bytes` bytes, shape `counts`; word (i, ...) lies at `address + i * steps[0] + ...`.

        All lie in one region; steps are in bytes, the first not negative.
        """


class ArrayBytes:
    """Arrays of bytes: address of the first byte -> shape (size_bytes,). They stand for memory on any device."""

    def __init__(self, arrays: Mapping[int, Bytes]) -> None:
        self._addresses = np.array(sorted(arrays), dtype=np.int64)
        self._arrays = [arrays[address] for address in self._addresses.tolist()]

    def reaches(self, device: str) -> bool:
        """See `Memory.reaches`."""
        return True

    def words(self, address: int, word_bytes: int, counts: Sequence[int], steps: Sequence[int]) -> ArrayWords:
        """See `Memory.words`. Raises BindError for addresses outside the arrays."""
        return words_of(self._read, address, word_bytes, counts, steps)

    def _read(self, low: int, high: int) -> Bytes:
        index = int(np.searchsorted(self._addresses, low, side="right")) - 1
        if index < 0 or high > int(self._addresses[index]) + len(self._arrays[index]):
            raise BindError(
                f"addresses [{low}, {high}) lie outside the memory that was given; give every region of the rank"
            )
        start = low - int(self._addresses[index])
        return self._arrays[index][start : start + high - low]
