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
    """Registered local memory for lease words: the places of `num_words` words. Gaps are known by both of their ends."""

    def __init__(self, num_words: int = SCRATCH_WORDS) -> None:
        self._words = np.zeros(num_words, dtype=np.uint64)
        self._taken: dict[int, int] = {}
        self._gaps: dict[int, int] = {0: num_words}
        self._gap_by_end: dict[int, int] = {num_words: 0}

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(int(self._words.ctypes.data), self._words.nbytes)

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, num_words: int) -> int | None:
        """The address of so many words, or None while there is no place. A load without sources has no place, and gives none back."""
        if not num_words:
            return NO_PLACE
        found = next(((start, count) for start, count in self._gaps.items() if count >= num_words), None)
        if found is None:
            return None
        start, count = found
        self._drop_gap(start)
        if count > num_words:
            self._add_gap(start + num_words, start + count)
        self._taken[start] = num_words
        return self.region.address + start * WORD_BYTES

    def give(self, address: int) -> None:
        """Give a place back."""
        start = (address - self.region.address) // WORD_BYTES
        num_words = self._taken.pop(start, None)
        if num_words is None:
            return
        stop = start + num_words
        if start in self._gap_by_end:
            start = self._drop_gap(self._gap_by_end[start])[0]
        if stop in self._gaps:
            stop = self._drop_gap(stop)[1]
        self._add_gap(start, stop)

    def _add_gap(self, start: int, stop: int) -> None:
        self._gaps[start], self._gap_by_end[stop] = stop - start, start

    def _drop_gap(self, start: int) -> tuple[int, int]:
        stop = start + self._gaps.pop(start)
        del self._gap_by_end[stop]
        return start, stop
