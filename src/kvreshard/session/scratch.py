"""Where do the lease words go that a rank reads from its sources?

Into registered memory of its own: every load that has been read takes as many words as it has sources and gives them back.
"""

from __future__ import annotations

import numpy as np

from kvreshard.session.lease import WORD_BYTES
from kvreshard.transport.base import MemoryRegion

SCRATCH_WORDS = 1 << 14
NO_PLACE = 0


class Scratch:
    """Registered local memory for lease words: the places of `num_words` words, first fit."""

    def __init__(self, num_words: int = SCRATCH_WORDS) -> None:
        self._words = np.zeros(num_words, dtype=np.uint64)
        self._taken: dict[int, int] = {}

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(int(self._words.ctypes.data), self._words.nbytes)

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, num_words: int) -> int | None:
        """The address of so many words, or None while there is no place. A load without sources has no place, and gives none back."""
        if not num_words:
            return NO_PLACE
        start = 0
        for first, count in sorted(self._taken.items()):
            if first - start >= num_words:
                break
            start = first + count
        if start + num_words > len(self._words):
            return None
        self._taken[start] = num_words
        return self.region.address + start * WORD_BYTES

    def give(self, address: int) -> None:
        """Give a place back."""
        self._taken.pop((address - self.region.address) // WORD_BYTES, None)
