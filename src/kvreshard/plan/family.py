"""Which fields are planned together?

Fields of equal shape whose shards have equal geometry on all ranks of both engines are a `Family`: all layers of a kind in one
pipeline stage. What is found for one of them holds for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout, Geometry
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
    """The named fields, grouped by equal geometry on all ranks, in the order of `names`. The destination holds a part of each."""
    members: defaultdict[tuple[int, int | None, int], list[str]] = defaultdict(list)
    for name in names:
        members[dst.kind_of[name], src.holding_of.get(name), dst.holding_of[name]].append(name)
    return tuple(
        Family(tuple(fields), dst.field_by_name[fields[0]], src.holders(fields[0]), dst.holders(fields[0]))
        for fields in members.values()
    )
