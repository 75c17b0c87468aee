"""Which cells of which fields are digested, as one rank holds them?

A `Cells` is congruent fields of one rank cut to a box: per axis the rank's own address map, and ownerships that a coordinate
must satisfy too.

- `of_lane`: the cells that a lane moves, seen from one side: the elected part, and what the other side holds.
- `of_rank`: of the cells that a rank holds, those for which it answers: no rank of a lower number holds them. Over all ranks
  each cell is in exactly one, so digests add up to the engine's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import BindError
from kvreshard.model.field import Axis
from kvreshard.model.layout import EngineLayout, Geometry, Group, Shard
from kvreshard.model.ownership import Ownership
from kvreshard.plan.cover import count_common
from kvreshard.plan.election import cut_axis
from kvreshard.plan.lane import Lane

Int64s = NDArray[np.int64]
Side = Literal["src", "dst"]
Box = tuple[Ownership, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis: where the rank keeps it, and which ownerships a coordinate must be in besides the rank's own."""

    name: str
    extent: int | None
    mapped: AxisMap
    within: tuple[Ownership, ...]

    def bounds(self) -> tuple[int, int]:
        """The half-open range of coordinates of a bounded axis; empty where the ownerships do not meet."""
        owners = (self.mapped.owned, *self.within)
        stops = [stop for stop in (getattr(owned, "stop", None) for owned in owners) if stop is not None]
        return max(owned.start for owned in owners), min(stops)


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Congruent fields of one rank, cut to a box. `bases`: address of each field's first cell in page 0, same order."""

    fields: tuple[str, ...]
    bases: Int64s
    element_bytes: int
    group: Group
    page_stride_bytes: int
    axes: tuple[Cut, ...]
    tokens_per_index: int
    keep_partial: bool

    @property
    def sequence(self) -> Cut | None:
        """The axis without end; None for a state."""
        return next((axis for axis in self.axes if axis.extent is None), None)

    @property
    def bounded(self) -> tuple[Cut, ...]:
        """The axes with an end, in the field's order."""
        return tuple(axis for axis in self.axes if axis.extent is not None)

    def only(self, names: Collection[str] | None) -> Cells:
        """The same cells of the named fields; of all fields for None."""
        if names is None:
            return self
        kept = [index for index, field in enumerate(self.fields) if field in names]
        return replace(self, fields=tuple(self.fields[index] for index in kept), bases=self.bases[kept])


def of_lane(lane: Lane, side: Side) -> Cells:
    """The cells of a lane on one side."""
    at_source = side == "src"
    return Cells(
        lane.fields,
        lane.bases.src if at_source else lane.bases.dst,
        lane.element_bytes,
        lane.src_group if at_source else lane.dst_group,
        lane.src_page_stride_bytes if at_source else lane.dst_page_stride_bytes,
        tuple(
            Cut(
                a.name, a.extent, *((a.src, (a.dst.owned, a.chosen)) if at_source else (a.dst, (a.src.owned, a.chosen)))
            )
            for a in lane.axes
        ),
        lane.tokens_per_index,
        lane.keep_partial,
    )


def of_rank(layout: EngineLayout, rank_number: int, names: Collection[str] | None = None) -> Iterator[Cells]:
    """The cells for which a rank answers, of the named fields (None: of all).

    Raises BindError for a rank or field that the engine does not have.
    """
    rank = layout.rank_by_number.get(rank_number)
    if rank is None:
        raise BindError(
            f"engine '{layout.engine}' has no rank {rank_number}; its ranks are {sorted(layout.rank_by_number)}"
        )
    unknown = sorted(set(names or ()) - set(layout.field_by_name))
    if unknown:
        raise BindError(f"engine '{layout.engine}' has no field '{unknown[0]}'; digest fields that both engines list")
    lower = {r.rank: r.shard_by_field for r in layout.ranks if r.rank < rank_number}
    together: dict[tuple[object, tuple[Box, ...]], list[Shard]] = {}
    for shard in rank.shards:
        if names is not None and shard.field not in names:
            continue
        field = layout.field_by_name[shard.field]
        before = tuple(_owned(held[shard.field].geometry) for held in lower.values() if shard.field in held)
        alike = (field.axes, field.element_bytes, shard.geometry)
        together.setdefault((alike, tuple(dict.fromkeys(before))), []).append(shard)
    for (_, before), shards in together.items():
        field = layout.field_by_name[shards[0].field]
        geometry, sequence = shards[0].geometry, field.sequence
        for box in _unclaimed(field.axes, geometry, before):
            yield Cells(
                tuple(shard.field for shard in shards),
                np.array([rank.base_address(shard) for shard in shards], dtype=np.int64),
                field.element_bytes,
                layout.group_by_name[geometry.group],
                geometry.page_stride_bytes,
                tuple(
                    Cut(axis.name, axis.extent, mapped, (atom,))
                    for axis, mapped, atom in zip(field.axes, geometry.axes, box, strict=True)
                ),
                sequence.tokens_per_index if sequence else 1,
                sequence.keep_partial if sequence else False,
            )


def _owned(geometry: Geometry) -> Box:
    return tuple(mapped.owned for mapped in geometry.axes)


def _unclaimed(axes: tuple[Axis, ...], geometry: Geometry, before: tuple[Box, ...]) -> Iterator[Box]:
    """Boxes of what the geometry holds and none of the boxes `before` does."""
    mine = _owned(geometry)
    parts = [
        [
            atom
            for atom in cut_axis(axis.extent, [mine[number], *(box[number] for box in before)])
            if count_common(axis.extent, atom, mine[number])
        ]
        for number, axis in enumerate(axes)
    ]
    for cell in product(*parts):
        if not any(_inside(axes, cell, box) for box in before):
            yield cell


def _inside(axes: tuple[Axis, ...], cell: Box, box: Box) -> bool:
    """Whether a cell of atoms, each of which a box holds whole or not at all, is in the box."""
    return all(count_common(axis.extent, part, held) for axis, part, held in zip(axes, cell, box, strict=True))
