"""Which fields are planned together?

Fields of equal shape whose shards have equal geometry on all ranks of both engines are a `Family`: all layers of a kind in one
pipeline stage. What is found for one of them holds for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
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
    src_holders, dst_holders = _holders(src), _holders(dst)
    grouped: dict[object, list[str]] = {}
    for name in names:
        grouped.setdefault((dst.shape_numbers[name], src_holders.get(name), dst_holders[name]), []).append(name)
    return tuple(
        Family(
            tuple(members), dst.field_by_name[members[0]], dict(_held(src, members[0])), dict(_held(dst, members[0]))
        )
        for members in grouped.values()
    )


def _holders(layout: EngineLayout) -> dict[str, int]:
    """Field -> a number that fields of equal geometry on every rank share."""
    places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, outline in enumerate(layout.outlines):
        for field, number in zip(outline.fields, outline.geometry_of, strict=True):
            places[field].append((index, number))
    # Fields of one geometry in each outline have one in each rank; what is left to compare are the few kinds of those.
    numbers: dict[object, int] = {}
    known: dict[tuple[tuple[int, int], ...], int] = {}
    found: dict[str, int] = {}
    for field, listed in places.items():
        place = tuple(listed)
        if place not in known:
            held = tuple((rank, layout.geometry_numbers[id(geometry)]) for rank, geometry in _held(layout, field))
            known[place] = numbers.setdefault(held, len(numbers))
        found[field] = known[place]
    return found


def _held(layout: EngineLayout, field: str) -> Iterator[tuple[int, Geometry]]:
    """Each rank that holds a part of the field, with its geometry."""
    for rank in layout.ranks:
        number = rank.outline.number_of_field.get(field)
        if number is not None:
            yield rank.rank, rank.geometries[rank.outline.geometry_of[number]]
