"""Registered memory into which a rank reads the lease words of its sources, 8 bytes per source rank of a load."""

from __future__ import annotations

import numpy as np

from kvreshard.session.lease import WORD_BYTES
from kvreshard.transport.base import MemoryRegion

SCRATCH_WORDS = 1 << 14
NO_PLACE = 0


class Scratch:
    """First-fit allocator of `num_words` words."""

    def __init__(self, num_words: int = SCRATCH_WORDS) -> None:
        self._words = np.zeros(num_words, dtype=np.uint64)
        # One byte per word: 0 if it is free.
        self._is_taken = bytearray(num_words)
        self._num_words: dict[int, int] = {}

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(int(self._words.ctypes.data), self._words.nbytes)

    def __len__(self) -> int:
        """Places that are taken."""
        return len(self._num_words)

    def take(self, num_words: int) -> int | None:
        """The address of `num_words` free words, None while there are none. A load without sources gets `NO_PLACE`."""
        if not num_words:
            return NO_PLACE
        start = self._is_taken.find(bytes(num_words))
        if start < 0:
            return None
        self._is_taken[start : start + num_words] = b"\1" * num_words
        address = self.region.address + start * WORD_BYTES
        self._num_words[address] = num_words
        return address

    def give(self, address: int | None) -> None:
        """Free a place. An address that is not taken, or None, changes nothing."""
        num_words = 0 if address is None else self._num_words.pop(address, 0)
        if address is not None and num_words:
            start = (address - self.region.address) // WORD_BYTES
            self._is_taken[start : start + num_words] = bytes(num_words)
