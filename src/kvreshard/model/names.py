"""Which number does a name have among others that are in order?

A layout lists fields by name, an outline those that it holds; most ask for all of them, in the same order. `Names.numbers` answers for
many names at once, and remembers what it has found, since every lane of a family asks for the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.loops import int64s

Int64s = NDArray[np.int64]
# Families of fields; a route has a few.
MAX_KEPT = 64


class Names(Sequence[str]):
    """Names in order, equal and hashed by what they are."""

    def __init__(self, all: tuple[str, ...]) -> None:  # noqa: A002 (what it is called here)
        self.all = all
        # Every lane of a family asks for the same fields, on both sides, and so does the proof: by one object, which is kept here, and
        # so is known by its id.
        self._found: dict[int, tuple[tuple[str, ...], Int64s]] = {}

    @cached_property
    def number_of(self) -> Mapping[str, int]:
        """Name -> its number; where a name is there twice, the later one."""
        return dict(zip(self.all, range(len(self.all)), strict=True))

    @cached_property
    def are_unique(self) -> bool:
        """Whether no name is there twice."""
        return len(set(self.all)) == len(self.all)

    def numbers(self, names: tuple[str, ...]) -> Int64s:
        """The numbers of these names, shape (names,), not to be written. Raises KeyError for one that is not there."""
        known = self._found.get(id(names))
        if known is None:
            if names == self.all and self.are_unique:
                found = np.arange(len(names), dtype=np.int64)
            else:
                found = int64s(list(map(self.number_of.__getitem__, names)))
            found.flags.writeable = False
            if len(self._found) >= MAX_KEPT:
                self._found.clear()
            known = self._found[id(names)] = names, found
        return known[1]

    def have_all(self, names: tuple[str, ...]) -> bool:
        """Whether every one of these names is there."""
        return names == self.all or all(map(self.number_of.__contains__, names))

    def __len__(self) -> int:
        return len(self.all)

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __contains__(self, name: object) -> bool:
        return name in self.number_of

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return self.all[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Names) and self.all == other.all

    def __hash__(self) -> int:
        return hash(self.all)

    def __repr__(self) -> str:
        return f"Names({self.all})"
