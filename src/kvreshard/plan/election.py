"""Which source rank gives each destination rank which box, and who reports to whom?

Every destination rank computes the same whole table from the same two layouts:

1. Fields whose shards have equal geometry on all ranks form a family (all layers of a kind in one pipeline stage).
2. The source's ownerships cut each axis into atoms; a product of atoms is a cell of the family, held whole or not at all.
3. Cells with one owner are settled first. A replicated cell goes to an owner that the destination rank reads anyway, else
   to the one with the fewest bytes so far, else the lowest rank; once per destination rank and set of owners.
4. Neighbouring cells of one source rank are joined to boxes.
5. A source rank that nobody reads gets one appointed reporter, so that it learns when its pages are free.

Refused: a cell that a destination rank holds and no source rank does (LayoutMismatch naming field, axis and both sides);
layouts that cut one another into more than `MAX_ATOMS` or `MAX_CELLS` parts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout, Geometry
from kvreshard.model.ownership import Ownership
from kvreshard.plan.cover import atoms, count_common, join
from kvreshard.plan.match import SHOWN

# 512 source ranks that share heads, 512 destination ranks, four families. At some 10 us each this is what a peer can cost us.
MAX_ATOMS = 1 << 20
MAX_CELLS = 1 << 18

Box = tuple[Ownership, ...]
"""One ownership per axis of the field, in the field's order."""


@dataclass(frozen=True)
class Family:
    """Fields of equal shape and equal geometry on every rank of both engines."""

    fields: tuple[str, ...]
    shape: Field
    src: Mapping[int, Geometry]
    dst: Mapping[int, Geometry]


@dataclass(frozen=True)
class Election:
    """Per destination rank: the families it holds and, per family, (source rank, box) pairs that cover its shard."""

    families: tuple[Family, ...]
    boxes: Mapping[tuple[int, int], tuple[tuple[int, Box], ...]]
    """(destination rank, index of family) -> sources."""
    src_ranks: tuple[int, ...]
    dst_ranks: tuple[int, ...]

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """Source rank -> destination ranks that read from it, ascending."""
        found: dict[int, set[int]] = {rank: set() for rank in self.src_ranks}
        for (dst_rank, _), sources in self.boxes.items():
            for src_rank, _ in sources:
                found[src_rank].add(dst_rank)
        return {rank: tuple(sorted(readers)) for rank, readers in found.items()}

    @cached_property
    def reporters(self) -> Mapping[int, tuple[int, ...]]:
        """Source rank -> destination ranks that report to it: its readers, or one appointed rank if it has none."""
        unread = [rank for rank in self.src_ranks if not self.readers[rank]]
        appointed = {rank: (self.dst_ranks[i % len(self.dst_ranks)],) for i, rank in enumerate(unread)}
        return {rank: appointed.get(rank, self.readers[rank]) for rank in self.src_ranks}


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


def elect(src: EngineLayout, dst: EngineLayout, names: list[str]) -> Election:
    """The whole table. Raises LayoutMismatch where the source has a hole."""
    found = families(src, dst, names)
    reads: defaultdict[int, set[int]] = defaultdict(set)
    load: dict[int, int] = {rank.rank: 0 for rank in src.ranks}
    wanted: list[tuple[int, int, Box, frozenset[int]]] = []
    num_atoms = 0
    for index, family in enumerate(found):
        per_axis = _owned_atoms(family)
        num_atoms += len(family.dst) * sum(len(options) for options in per_axis)
        _check_number(src, dst, family, "stretches of its axes", num_atoms, MAX_ATOMS)
        for dst_rank in sorted(family.dst):
            cells = _cells(src, dst, family, dst_rank, per_axis, MAX_CELLS - len(wanted))
            wanted += [(index, dst_rank, cell, owners) for cell, owners in cells]
    settled: dict[tuple[int, frozenset[int]], int] = {}
    chosen: defaultdict[tuple[int, int], dict[int, list[Box]]] = defaultdict(dict)
    for index, dst_rank, cell, owners in sorted(wanted, key=lambda item: len(item[3]) > 1):
        src_rank = settled.get((dst_rank, owners))
        if src_rank is None:
            candidates = (owners & reads[dst_rank]) or owners
            src_rank = min(candidates, key=lambda rank: (load[rank], rank))
            settled[dst_rank, owners] = src_rank
        reads[dst_rank].add(src_rank)
        load[src_rank] += _cell_bytes(found[index], cell)
        chosen[dst_rank, index].setdefault(src_rank, []).append(cell)
    boxes = {
        place: tuple(
            (src_rank, box)
            for src_rank in sorted(by_source)
            for box in _join_cells(found[place[1]].shape, by_source[src_rank])
        )
        for place, by_source in chosen.items()
    }
    return Election(found, boxes, tuple(rank.rank for rank in src.ranks), tuple(rank.rank for rank in dst.ranks))


def _check_number(src: EngineLayout, dst: EngineLayout, family: Family, what: str, number: int, limit: int) -> None:
    if number > limit:
        raise LayoutMismatch(
            f"field '{family.fields[0]}': engines '{src.engine}' ({len(src.ranks)} ranks) and '{dst.engine}' "
            f"({len(dst.ranks)} ranks) cut one another into more than {limit} {what}; use fewer ranks, or sizes that divide "
            "one another"
        )


def _owned_atoms(family: Family) -> list[list[tuple[Ownership, frozenset[int]]]]:
    """Per axis, the atoms into which the source cuts it, each with the ranks that hold it: whole, so its start tells."""
    found = []
    for number, axis in enumerate(family.shape.axes):
        held: dict[Ownership, list[int]] = {}
        for rank, geometry in family.src.items():
            held.setdefault(geometry.axes[number].owned, []).append(rank)
        cut = atoms(axis.extent, held)
        starts = np.array([atom.start for atom in cut], dtype=np.int64)
        owners: list[set[int]] = [set() for _ in cut]
        for owned, ranks in held.items():
            for index in np.flatnonzero(owned.contains(starts)).tolist():
                owners[index].update(ranks)
        found.append([(atom, frozenset(ranks)) for atom, ranks in zip(cut, owners, strict=True)])
    return found


def _cells(
    src: EngineLayout,
    dst: EngineLayout,
    family: Family,
    dst_rank: int,
    atoms_per_axis: list[list[tuple[Ownership, frozenset[int]]]],
    limit: int,
) -> list[tuple[Box, frozenset[int]]]:
    """The cells that a destination rank needs, each with the source ranks that hold it."""
    everyone = frozenset(family.src)
    per_axis: list[list[tuple[Ownership, frozenset[int]]]] = []
    for number, axis in enumerate(family.shape.axes):
        mine = family.dst[dst_rank].axes[number].owned
        options = []
        for atom, owners in atoms_per_axis[number]:
            if not count_common(axis.extent, atom, mine):
                continue
            if not owners:
                held = {str(geometry.axes[number].owned) for geometry in family.src.values()}
                raise LayoutMismatch(
                    f"field '{family.fields[0]}', axis '{axis.name}': rank {dst_rank} of engine '{dst.engine}' holds "
                    f"{mine}, but {atom} has no source; the ranks of engine '{src.engine}' hold "
                    f"{', '.join(sorted(held)[:SHOWN])}: check its parallel sizes"
                )
            options.append((atom, owners))
        per_axis.append(options)
    _check_number(src, dst, family, "cells", prod(len(options) for options in per_axis), limit)
    cells = []
    for combination in product(*per_axis):
        owners = everyone.intersection(*(owners for _, owners in combination))
        if not owners:
            box = ", ".join(f"{a.name} {o}" for a, (o, _) in zip(family.shape.axes, combination, strict=True))
            raise LayoutMismatch(
                f"field '{family.fields[0]}': no rank of engine '{src.engine}' holds the whole cell ({box}) that rank "
                f"{dst_rank} of engine '{dst.engine}' needs: check its parallel sizes"
            )
        cells.append((tuple(owned for owned, _ in combination), owners))
    return cells


def _cell_bytes(family: Family, cell: Box) -> int:
    volume = family.shape.element_bytes * len(family.fields)
    for axis, owned in zip(family.shape.axes, cell, strict=True):
        volume *= count_common(axis.extent, owned)
    return volume


def _join_cells(shape: Field, cells: list[Box]) -> list[Box]:
    """Fewer boxes with the same cells: neighbours that differ on one axis only are joined, axis by axis."""
    boxes = list(cells)
    for number, axis in enumerate(shape.axes):
        joined: list[Box] = []
        for box in sorted(
            boxes, key=lambda b: (tuple(str(o) for i, o in enumerate(b) if i != number), b[number].start)
        ):
            last = joined[-1] if joined else None
            if last is not None and last[:number] + last[number + 1 :] == box[:number] + box[number + 1 :]:
                whole = join(axis.extent, last[number], box[number])
                if whole is not None:
                    joined[-1] = (*last[:number], whole, *last[number + 1 :])
                    continue
            joined.append(box)
        boxes = joined
    return boxes
