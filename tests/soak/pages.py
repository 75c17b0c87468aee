"""Which pages of an engine are free, and has anybody written to them meanwhile?

1. A page that is given back is filled with one byte at once: its former content is gone, as in a busy engine.
2. A page that is taken must still hold that byte everywhere, or somebody has written to a page that was not theirs.
3. Taken pages are filled with 0xFF, NaN in every float format, so that what nobody writes is seen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np

from kvreshard.testing.oracle import Bytes

FREE_BYTE, NEW_BYTE = 0x5A, 0xFF


class Pool:
    """The pages of one pool on all ranks. `slabs`: their bytes, shape (pages, bytes of a page) each."""

    def __init__(self, slabs: Sequence[Bytes], num_pages: int, rng: random.Random) -> None:
        self._slabs, self.num_pages = slabs, num_pages
        self._free = rng.sample(range(num_pages), num_pages)
        self.num_trespasses = 0
        for slab in slabs:
            slab[:] = FREE_BYTE

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """So many pages, those that were freed longest ago last. There must be as many."""
        taken = [self._free.pop() for _ in range(count)]
        self.num_trespasses += self._count_changed(taken)
        self._fill(taken, NEW_BYTE)
        return taken

    def clear(self, pages: Iterable[int]) -> None:
        """Zero pages, as an engine leaves what it has not computed of a page that it has begun."""
        self._fill(list(pages), 0)

    def give(self, pages: Iterable[int]) -> None:
        """Pages that are free again, to be taken again soon."""
        pages = list(pages)
        self._fill(pages, FREE_BYTE)
        self._free += pages

    def count_changed(self) -> int:
        """Free pages that somebody has written to, those that were taken since among them."""
        return self.num_trespasses + self._count_changed(self._free)

    def _count_changed(self, pages: Sequence[int]) -> int:
        where = np.array(pages, np.int64)
        changed = np.zeros(len(pages), bool)
        for slab in self._slabs:
            changed |= (slab[where] != FREE_BYTE).any(axis=1)
        return int(changed.sum())

    def _fill(self, pages: Sequence[int], value: int) -> None:
        where = np.array(pages, np.int64)
        for slab in self._slabs:
            slab[where] = value
