"""How are words at regular distances in memory read, wherever that memory is?

`Words` say what a digest asks for: some rows of a strided view, in the processor's memory. `ArrayWords` are those of memory that the
processor reaches, without a copy where rows are evenly spaced. Memory of a device has its own, see `transport.device`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Rows = slice | NDArray[np.int64]
Bytes = NDArray[np.uint8]


class Words(Protocol):
    """Unsigned words, shape (n, ...)."""

    def take(self, rows: Rows, rest: Sequence[slice]) -> NDArray[np.unsignedinteger]:
        """Those of `rows` along the first axis and of `rest` along the next ones, all of the last ones; for reading only.

        `rows` are numbers of rows, or a slice without negative numbers; `rest` are slices with a start and a stop.
        """


@dataclass(frozen=True, slots=True, eq=False)
class ArrayWords:
    """Words of an array."""

    array: NDArray[np.unsignedinteger]

    def take(self, rows: Rows, rest: Sequence[slice]) -> NDArray[np.unsignedinteger]:
        """See `Words.take`."""
        found: NDArray[np.unsignedinteger] = self.array[(slice(None), *rest)][rows]
        return found


def reach(counts: Sequence[int], steps: Sequence[int], word_bytes: int) -> tuple[int, int]:
    """From the first byte of word (0, ...) to the first and behind the last byte of all words."""
    spans = [(count - 1) * step for count, step in zip(counts, steps, strict=True)]
    return sum(min(0, span) for span in spans), sum(max(0, span) for span in spans) + word_bytes


def words_of(
    read: Callable[[int, int], Bytes], address: int, word_bytes: int, counts: Sequence[int], steps: Sequence[int]
) -> ArrayWords:
    """Words in bytes that `read(low, high)` gives without a copy. Word (i, ...) lies at `address + i * steps[0] + ...`."""
    low, high = reach(counts, steps, word_bytes)
    flat = read(address + low, address + high)
    return ArrayWords(np.ndarray(tuple(counts), np.dtype(f"<u{word_bytes}"), flat, -low, tuple(steps)))
