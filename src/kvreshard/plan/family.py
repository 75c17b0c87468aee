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
    """Fields of equal shape and equal geometry on every rank of both engines."""

    fields: tuple[str, ...]
    shape: Field
    src: Mapping[int, Geometry]
    dst: Mapping[int, Geometry]


def families(src: EngineLayout, dst: EngineLayout, names: list[str]) -> tuple[Family, ...]:
    """The named fields, grouped by equal geometry on all ranks, in the order of `names`."""
    src_holders, dst_holders = src.holder_numbers, dst.holder_numbers
    grouped: defaultdict[object, list[str]] = defaultdict(list)
    kinds = (
        map(dst.shape_numbers.__getitem__, names),
        map(src_holders.get, names),
        map(dst_holders.__getitem__, names),
    )
    for name, kind in zip(names, zip(*kinds, strict=True), strict=True):
        grouped[kind].append(name)
    return tuple(
        Family(
            tuple(members), dst.field_by_name[members[0]], dict(src.holders(members[0])), dict(dst.holders(members[0]))
        )
        for members in grouped.values()
    )
