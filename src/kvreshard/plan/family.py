"""Which fields are planned together?

Fields of equal shape whose shards have equal geometry on all ranks of both engines are a `Family`: all layers of a kind in one
pipeline stage. What is found for one of them holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout, Geometry
from kvreshard.model.loops import row_kinds
from kvreshard.model.ownership import Ownership

Box = tuple[Ownership, ...]
"""One ownership per axis of the field, in the field's order."""


@dataclass(frozen=True)
class Family:
    """Fields of equal shape, as `shape` but for their names, and equal geometry on every rank of both engines."""

    fields: tuple[str, ...]
    shape: Field
    src: Mapping[int, Geometry]
    dst: Mapping[int, Geometry]


def families(src: EngineLayout, dst: EngineLayout, names: tuple[str, ...]) -> tuple[Family, ...]:
    """The named fields, grouped by equal geometry on all ranks, in the order of `names`."""
    holders = (layout.holder_numbers[layout.fields.names.numbers(names)] for layout in (src, dst))
    which, firsts = row_kinds((dst.fields.kinds_of(names), *holders))
    members: list[tuple[str, ...]] = [names]
    if len(firsts) != 1:
        grouped: list[list[str]] = [[] for _ in firsts]
        for name, kind in zip(names, which.tolist(), strict=True):
            grouped[kind].append(name)
        members = list(map(tuple, grouped))
    return tuple(
        Family(fields, dst.fields.like(fields[0]), dict(src.holders(fields[0])), dict(dst.holders(fields[0])))
        for fields in members
    )
