"""Whole numbers as a value: how are a thousand of them read, compared and hashed at once?

`Column` holds them as bytes, eight for each, the least significant first, as they travel and as NumPy looks at them on every machine that
NIXL runs on. Refused, as LayoutError: numbers of more than 64 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import LayoutError
from kvreshard.model.loops import int64s

Int64s = NDArray[np.int64]
NUMBER_BYTES = 8


class Column(Sequence[int]):
    """Whole numbers that do not change, equal and hashed by what they are. `data`: a whole number of them, as the top of this file says."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.array: Int64s = np.frombuffer(data, dtype=np.int64)
        """Shape (n,), not to be written."""

    @staticmethod
    def of(numbers: Iterable[int]) -> Column:
        """Raises LayoutError for a number of more than 64 bits."""
        if isinstance(numbers, Column):
            return numbers
        try:
            return Column(int64s(tuple(numbers)).tobytes())
        except OverflowError:
            raise LayoutError("a number that has more than 64 bits; those of a layout are below 2**63") from None

    def __len__(self) -> int:
        return len(self.data) // NUMBER_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        """One number, or a list of some."""
        found: int | list[int] = self.array[index].tolist()
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Column) and self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __repr__(self) -> str:
        return f"Column.of({list(self)})"
