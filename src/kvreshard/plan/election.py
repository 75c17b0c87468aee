"""Which source rank gives each destination rank which box, and who reports to whom?

Every destination rank computes the same whole table from the same two layouts:

1. Fields whose shards have equal geometry on all ranks form a family (all layers of a kind in one pipeline stage).
2. The source's ownerships cut each axis into atoms; a product of atoms is a cell of the family, held whole or not at all.
3. Cells with one owner are settled first. A replicated cell goes to an owner that the destination rank reads anyway, else
   to the one with the fewest bytes so far, else the lowest rank; once per destination rank and set of owners.
4. Neighbouring cells of one source rank are joined to boxes.
5. A source rank that nobody reads gets one appointed reporter, so that it learns when its pages are free.

Refused: a cell that a destination rank holds and no source rank does (LayoutMismatch naming field, axis and both sides);
layouts that cut one another into more than `MAX_ATOMS` or `MAX_CELLS` parts, or take more work than a `Budget` has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import NamedTuple

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import Ownership
from kvreshard.plan.budget import OWNER_STEPS, Budget
from kvreshard.plan.cells import Parts, cut_axis
from kvreshard.plan.cover import join
from kvreshard.plan.family import Box, Family, families

# 512 source ranks that share heads, 512 destination ranks, four families.
MAX_ATOMS = 1 << 20
MAX_CELLS = 1 << 18


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


def elect(src: EngineLayout, dst: EngineLayout, names: Sequence[str]) -> Election:
    """The whole table. Raises LayoutMismatch where the source has a hole."""
    found = families(src, dst, tuple(names))
    budget = Budget(src, dst)
    wanted: list[_Cell] = []
    num_atoms = 0
    for index, family in enumerate(found):
        axes = [cut_axis(src, family, number, budget) for number in range(len(family.shape.axes))]
        num_atoms += len(family.dst) * sum(len(axis.owners) for axis in axes)
        _check_number(src, dst, family, "stretches of its axes", num_atoms, MAX_ATOMS)
        parts = Parts(src, dst, family, axes, budget)
        for dst_rank in sorted(family.dst):
            met = parts.met_by(dst_rank)
            _check_number(src, dst, family, "cells", len(wanted) + prod(map(len, met)), MAX_CELLS)
            wanted += [_Cell(index, dst_rank, *cell) for cell in parts.cells(dst_rank, met)]
    chosen = _choose(src, found, wanted, budget)
    boxes = {
        place: tuple(
            (src_rank, box)
            for src_rank in sorted(by_source)
            for box in _join_cells(found[place[1]].shape, by_source[src_rank])
        )
        for place, by_source in chosen.items()
    }
    return Election(found, boxes, tuple(rank.rank for rank in src.ranks), tuple(rank.rank for rank in dst.ranks))


class _Cell(NamedTuple):
    """What destination rank `dst_rank` needs of a family, and the source ranks that hold it, whole."""

    family: int
    dst_rank: int
    box: Box
    num_bytes: int
    owners: frozenset[int]


def _choose(
    src: EngineLayout, found: Sequence[Family], wanted: Sequence[_Cell], budget: Budget
) -> Mapping[tuple[int, int], Mapping[int, list[Box]]]:
    """(destination rank, family) -> source rank -> the cells that it gives. Cells of one owner first."""
    reads: defaultdict[int, set[int]] = defaultdict(set)
    load: dict[int, int] = {rank.rank: 0 for rank in src.ranks}
    settled: dict[tuple[int, frozenset[int]], int] = {}
    chosen: defaultdict[tuple[int, int], dict[int, list[Box]]] = defaultdict(dict)
    for index, dst_rank, cell, num_bytes, owners in sorted(wanted, key=lambda cell: len(cell.owners) > 1):
        src_rank = settled.get((dst_rank, owners))
        if src_rank is None:
            budget.spend(found[index].fields[0], OWNER_STEPS * len(owners), "parts with too many replicas")
            candidates = (owners & reads[dst_rank]) or owners
            src_rank = min(candidates, key=lambda rank: (load[rank], rank))
            settled[dst_rank, owners] = src_rank
        reads[dst_rank].add(src_rank)
        load[src_rank] += num_bytes
        chosen[dst_rank, index].setdefault(src_rank, []).append(cell)
    return chosen


def _check_number(src: EngineLayout, dst: EngineLayout, family: Family, what: str, number: int, limit: int) -> None:
    if number > limit:
        raise LayoutMismatch(
            f"field '{family.fields[0]}': engines '{src.engine}' ({len(src.ranks)} ranks) and '{dst.engine}' "
            f"({len(dst.ranks)} ranks) cut one another into more than {limit} {what}; use fewer ranks, or sizes that divide "
            "one another"
        )


def _join_cells(shape: Field, cells: list[Box]) -> list[Box]:
    """Fewer boxes with the same cells: neighbours that differ on one axis only are joined, axis by axis."""
    if len(cells) == 1:
        return cells
    boxes = list(cells)
    texts: dict[Ownership, str] = {}
    for number, axis in enumerate(shape.axes):
        joined: list[Box] = []
        for box in sorted(boxes, key=partial(_beside, texts, number)):
            last = joined[-1] if joined else None
            if last is not None and last[:number] + last[number + 1 :] == box[:number] + box[number + 1 :]:
                whole = join(axis.extent, last[number], box[number])
                if whole is not None:
                    joined[-1] = (*last[:number], whole, *last[number + 1 :])
                    continue
            joined.append(box)
        boxes = joined
    return boxes


def _beside(texts: dict[Ownership, str], number: int, box: Box) -> tuple[tuple[str, ...], int]:
    """Where to look for a box's neighbours on one axis."""
    others = (owned for index, owned in enumerate(box) if index != number)
    return tuple([texts.get(owned) or texts.setdefault(owned, str(owned)) for owned in others]), box[number].start
