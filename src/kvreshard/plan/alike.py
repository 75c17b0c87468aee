"""What do the lanes of a route have in common, so that a proof looks at it once?

The lanes of one family have one tuple of names, and mostly two outlines to find them in, one a side. What is said of every name is found
once for each of these objects:

1. `Seen.differences`: in what the two engines' fields differ, once for each pair of shapes.
2. `Seen.named`: where the fields are in an outline, and of which kinds; each kind is then looked at once.
3. `Seen.drawn`: those of a lane's fields that have its axes.

It takes nothing from how the route was made: names and layouts only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from kvreshard.model.field import Field
from kvreshard.model.fields import Fields
from kvreshard.model.layout import EngineLayout, Rank
from kvreshard.model.loops import bounds, row_kinds
from kvreshard.model.outline import Int64s, Outline
from kvreshard.plan.lane import Lane
from kvreshard.plan.match import differences, shape_pairs


def shape_of(field: Field) -> list[tuple[str, int | None]]:
    """The axes of a field, each with its extent."""
    return [(axis.name, axis.extent) for axis in field.axes]


class Named(msgspec.Struct, frozen=True, eq=False):
    """Some fields in an outline: those that `lacking` has have no shard there, of the others `shards` has the numbers, in their order.

    `room_bytes`: from the first byte of each of them to the end of its region, and the least of these. `kinds`: the numbers of their
    geometries, and a field of each, one for every shape.
    """

    lacking: tuple[str, ...]
    shards: Int64s
    room_bytes: Int64s
    least_room_bytes: int
    kinds: tuple[tuple[int, Field], ...]

    @staticmethod
    def of(names: tuple[str, ...], outline: Outline, fields: Fields) -> Named:
        """Found once for all lanes of one family: they have one tuple of names."""
        lacking, held = tuple[str, ...](), names
        if not outline.fields.have_all(names):
            lacking = tuple(name for name in names if name not in outline.fields)
            held = tuple(name for name in names if name in outline.fields)
        shards = outline.fields.numbers(held)
        geometries = outline.geometry_of.array[shards]
        _, rows = row_kinds((geometries, fields.kinds_of(held)))
        room_bytes = outline.region_bytes.array[outline.region_of.array[shards]] - outline.offsets_bytes.array[shards]
        least_room_bytes = bounds(room_bytes)[0] if held else 0
        kinds = tuple([(int(geometries[row]), fields.called(held[row])) for row in rows])
        return Named(lacking, shards, room_bytes, least_room_bytes, kinds)


class Seen:
    """What lanes of the same fields have in common, looked at once."""

    def __init__(self, src: EngineLayout, dst: EngineLayout) -> None:
        self._src, self._dst = src, dst
        self._shapes: dict[int, Mapping[tuple[int, int], tuple[Field, Field]]] = {}
        self._named: dict[tuple[int, int, int], Named] = {}
        self._compared: set[tuple[int, int]] = set()
        self._drawn: defaultdict[tuple[tuple[str, int | None], ...], set[int]] = defaultdict(set)
        for field in dst.fields.shapes:
            self._drawn[tuple(shape_of(field))].add(dst.fields.kind_of(field.name))

    def shapes(self, names: tuple[str, ...]) -> Mapping[tuple[int, int], tuple[Field, Field]]:
        """Every pair of shapes that these fields have on both sides, with a field."""
        found = self._shapes.get(id(names))
        if found is None:
            found = self._shapes[id(names)] = shape_pairs(self._src, self._dst, names)
        return found

    def differences(self, names: tuple[str, ...]) -> Iterator[str]:
        """In what the two engines' fields differ, once for each pair of shapes."""
        for pair, (src, dst) in self.shapes(names).items():
            if pair not in self._compared:
                self._compared.add(pair)
                found = differences(self._src.engine, src, self._dst.engine, dst)
                yield from (f"field '{src.name}'{finding}" for finding in found)

    def drawn(self, lane: Lane) -> tuple[str, ...]:
        """Those of a lane's fields that have its axes: the same tuple if all have."""
        drawn = self._drawn[tuple((axis.name, axis.extent) for axis in lane.axes)]
        if all(shape in drawn for _, shape in self.shapes(lane.fields)):
            return lane.fields
        return tuple(name for name in lane.fields if self._dst.fields.kind_of(name) in drawn)

    def named(self, names: tuple[str, ...], rank: Rank, layout: EngineLayout) -> Named:
        """These fields in a rank's outline."""
        key = id(names), id(rank.outline), id(layout)
        found = self._named.get(key)
        if found is None:
            found = self._named[key] = Named.of(names, rank.outline, layout.fields)
        return found
