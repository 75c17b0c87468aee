"""The fields of an engine: what do its hundreds of layers have in common?

Most fields of a model differ in their name only. `Fields` says every shape (axes, element size, encoding, whether it is optional) once,
as the first field that has it, and which shape each has; a `Field` is made when somebody asks for it.

Refused, as LayoutError: columns of different length, names that are empty, numbers of shapes that are not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.column import Column
from kvreshard.model.errors import LayoutError
from kvreshard.model.field import Field
from kvreshard.model.loops import bounds
from kvreshard.model.names import Names

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class Fields(Sequence[Field]):
    """Field i is called `names[i]`, and is like `shapes[shape_of[i]]` otherwise; shapes differ, in the order of their first fields."""

    names: Names
    shape_of: Column
    shapes: tuple[Field, ...]

    @staticmethod
    def of(fields: Iterable[Field]) -> Fields:
        """These fields, in order."""
        if isinstance(fields, Fields):
            return fields
        listed = tuple(fields)
        # Axes are dear to hash, and layers mostly share the object.
        known: dict[object, int] = {}
        numbers: dict[object, int] = {}
        shapes: list[Field] = []
        shape_of = []
        for field in listed:
            key = id(field.axes), field.element_bytes, field.encoding, field.optional
            if key not in known:
                known[key] = numbers.setdefault(_shape(field), len(numbers))
                if known[key] == len(shapes):
                    shapes.append(field)
            shape_of.append(known[key])
        return Fields(Names(tuple(field.name for field in listed)), Column.of(shape_of), tuple(shapes))

    @staticmethod
    def numbered(names: Names, shapes: Sequence[Field], which: Int64s) -> Fields:
        """Field i is like `shapes[which[i]]`; shapes are the first fields of their numbers, in order, and may be equal. Raises LayoutError."""
        if len({_shape(shape) for shape in shapes}) == len(shapes):
            return Fields(names, Column(which.tobytes()), tuple(shapes))
        return Fields.of(shapes[number].named(name) for number, name in zip(which.tolist(), names, strict=True))

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shape_of):
            raise LayoutError(
                f"{len(self.names)} fields and {len(self.shape_of)} numbers of shapes; each field has one"
            )
        if "" in self.names.all:
            raise LayoutError("a field has no name")
        low, high = bounds(self.shape_of.array) if len(self.shape_of) else (0, -1)
        if low < 0 or high >= len(self.shapes):
            raise LayoutError(f"fields of shapes {low} to {high}, of {len(self.shapes)}; numbers begin at 0")

    @cached_property
    def kinds(self) -> Int64s:
        """A number that fields of equal axes, element size and encoding share, shape (fields,)."""
        numbers: dict[object, int] = {}
        told = [
            numbers.setdefault((shape.axes, shape.element_bytes, shape.encoding), len(numbers)) for shape in self.shapes
        ]
        return np.array(told, dtype=np.int64)[self.shape_of.array]

    def kind_of(self, name: str) -> int:
        """The kind of one field. Raises KeyError."""
        return int(self.kinds[self.names.number_of[name]])

    def kinds_of(self, names: tuple[str, ...]) -> Int64s:
        """The kinds of some fields, shape (names,). Raises KeyError."""
        return self.kinds[self.names.numbers(names)]

    @cached_property
    def _all(self) -> tuple[Field, ...]:
        return tuple(map(self._make, range(len(self))))

    def _make(self, index: int) -> Field:
        like, name = self.shapes[self.shape_of[index]], self.names[index]
        return like if like.name == name else like.named(name)

    def like(self, name: str) -> Field:
        """What the field of this name is like, itself or the first of its shape. Raises KeyError."""
        return self.shapes[self.shape_of[self.names.number_of[name]]]

    def called(self, name: str) -> Field:
        """The field of this name. Raises KeyError."""
        return self._make(self.names.number_of[name])

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Field]:
        return iter(self._all)

    @overload
    def __getitem__(self, index: int) -> Field: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Field, ...]: ...
    def __getitem__(self, index: int | slice) -> Field | tuple[Field, ...]:
        return self._all[index]


def _shape(field: Field) -> tuple[object, ...]:
    return field.axes, field.element_bytes, field.encoding, field.optional
