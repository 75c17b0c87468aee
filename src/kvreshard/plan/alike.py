"""What the lanes of a route have in common, so that the proof looks at it once.

The lanes of one family have equal names, and are read from a few ranks. What is said of every name is found once for each:

1. `Seen.differences`: in what the two engines' fields differ, once for each pair of shapes.
2. `Seen.named`: where the fields are on a rank, and of which kinds; each kind is then looked at once.
3. `Seen.drawn`: those of a lane's fields that have its axes.

It takes nothing from how the route was made: names and layouts only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout, Geometry, Rank
from kvreshard.plan.lane import Lane
from kvreshard.plan.match import differences, shape_pairs

Int64s = NDArray[np.int64]


def shape_of(field: Field) -> list[tuple[str, int | None]]:
    """The axes of a field, each with its extent."""
    return [(axis.name, axis.extent) for axis in field.axes]


class Named(msgspec.Struct, frozen=True, eq=False):
    """Some fields on a rank: those of `lacking` have no shard there, `held` are the others, in their order.

    `bases`, shape (held,): address of the first cell of each. `room_bytes`, same shape: from there to the end of its region. `kinds`: their
    distinct geometries and shapes, each with the first field that has them.
    """

    lacking: tuple[str, ...]
    held: tuple[str, ...]
    bases: Int64s
    room_bytes: Int64s
    kinds: tuple[tuple[Geometry, Field], ...]

    @staticmethod
    def of(names: tuple[str, ...], rank: Rank, layout: EngineLayout) -> Named:
        """Found once for all lanes of one family."""
        place_of, kind_of, base_of = rank.place_of, layout.kind_of, rank.bases
        size_of = dict(zip(rank.template.regions, rank.template.region_bytes, strict=True))
        held = names if all(name in place_of for name in names) else tuple(name for name in names if name in place_of)
        places = [place_of[name] for name in held]
        kinds: dict[tuple[int, int], str] = {}
        for place in places:
            kinds.setdefault((place.geometry, kind_of[place.field]), place.field)
        return Named(
            tuple(name for name in names if name not in place_of) if held is not names else (),
            held,
            np.array([base_of[name] for name in held], dtype=np.int64),
            np.array([size_of[place.region] - place.offset_bytes for place in places], dtype=np.int64),
            tuple([(rank.geometries[number], layout.field_by_name[name]) for (number, _), name in kinds.items()]),
        )


class Seen:
    """What lanes of the same fields have in common, looked at once."""

    def __init__(self, src: EngineLayout, dst: EngineLayout) -> None:
        self._src, self._dst = src, dst
        self._shapes: dict[tuple[str, ...], Mapping[tuple[int, int], tuple[Field, Field]]] = {}
        self._named: dict[tuple[tuple[str, ...], bool, int], Named] = {}
        self._compared: set[tuple[int, int]] = set()

    def shapes(self, names: tuple[str, ...]) -> Mapping[tuple[int, int], tuple[Field, Field]]:
        """Every pair of shapes that these fields have on both sides, with a field."""
        found = self._shapes.get(names)
        if found is None:
            found = self._shapes[names] = shape_pairs(self._src, self._dst, names)
        return found

    def differences(self, names: tuple[str, ...]) -> Iterator[str]:
        """In what the two engines' fields differ, once for each pair of shapes."""
        for pair, (src, dst) in self.shapes(names).items():
            if pair not in self._compared:
                self._compared.add(pair)
                found = differences(self._src.engine, src, self._dst.engine, dst)
                yield from (f"field '{src.name}'{finding}" for finding in found)

    def drawn(self, lane: Lane) -> tuple[str, ...]:
        """Those of a lane's fields that have its axes."""
        axes = [(axis.name, axis.extent) for axis in lane.axes]
        drawn = {kind for (_, kind), (_, field) in self.shapes(lane.fields).items() if shape_of(field) == axes}
        if len(drawn) == len({kind for _, kind in self.shapes(lane.fields)}):
            return lane.fields
        return tuple(name for name in lane.fields if self._dst.kind_of[name] in drawn)

    def named(self, names: tuple[str, ...], rank: Rank, layout: EngineLayout) -> Named:
        """These fields on a rank of one of the two engines."""
        key = names, layout is self._src, rank.rank
        found = self._named.get(key)
        if found is None:
            found = self._named[key] = Named.of(names, rank, layout)
        return found
