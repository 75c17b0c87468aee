"""Into which cells does the source cut a family, and who holds each?

1. Every axis is cut at every edge of what the source's ranks hold: an atom is held whole or not at all.
2. A destination rank meets some atoms of each axis; every combination is a cell that it needs.
3. The source ranks that hold a cell are those that hold all of its atoms.

Refused: an atom or a cell that no source rank holds (LayoutMismatch naming field, axis and both sides), and what takes more work than
the `Budget` has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, product
from math import prod

import msgspec
import numpy as np

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import Coordinates, Interval, Ownership
from kvreshard.plan.budget import AXIS_STEPS, CELL_STEPS, EDGE_STEPS, HOLDER_STEPS, MEET_STEPS, OWNER_STEPS, Budget
from kvreshard.plan.cover import count_common, count_edges, edges_of, meets, part
from kvreshard.plan.family import Box, Family
from kvreshard.plan.match import SHOWN


class CutAxis(msgspec.Struct, frozen=True, eq=False):
    """One axis as the source cuts it: atom i is `[edges[i], edges[i + 1])` of every period, and `owners[i]` hold it."""

    edges: Coordinates
    owners: tuple[frozenset[int], ...]


def cut_axis(src: EngineLayout, family: Family, number: int, budget: Budget) -> CutAxis:
    """An atom is held whole or not at all, so its first coordinate tells by whom."""
    axis, name = family.shape.axes[number], family.fields[0]
    held: dict[Ownership, list[int]] = {}
    for rank, geometry in family.src.items():
        held.setdefault(geometry.axes[number].owned, []).append(rank)
    why = f"an axis '{axis.name}' that is cut into too many stretches"
    budget.spend(name, AXIS_STEPS + EDGE_STEPS * count_edges(axis.extent, held), why)
    if len(held) == 1 and Interval(0, axis.extent) in held:  # every rank holds all of it
        budget.spend(name, (HOLDER_STEPS + OWNER_STEPS) * (1 + len(family.src)), why)
        return CutAxis(np.array([0, axis.extent or 1], dtype=np.int64), (frozenset(family.src),))
    try:
        edges = edges_of(axis.extent, tuple(held))
    except LayoutMismatch as error:
        raise LayoutMismatch(f"field '{name}', axis '{axis.name}', engine '{src.engine}': {error}") from None
    budget.spend(name, HOLDER_STEPS * len(held) * len(edges), why)
    holds = np.array([owned.contains(edges[:-1]) for owned in held], dtype=bool).reshape(len(held), len(edges) - 1)
    alike: dict[bytes, frozenset[int]] = {}
    owners = []
    for column, packed in enumerate(np.packbits(holds, axis=0).T):
        key = packed.tobytes()
        if key not in alike:
            ranks = [held_by for held_by, here in zip(held.values(), holds[:, column].tolist(), strict=True) if here]
            alike[key] = frozenset(chain.from_iterable(ranks))
            budget.spend(name, OWNER_STEPS * (len(held) + len(alike[key])), why)
        owners.append(alike[key])
    return CutAxis(edges, tuple(owners))


class Parts:
    """The cells into which the source cuts a family, as far as somebody asks for them."""

    def __init__(
        self, src: EngineLayout, dst: EngineLayout, family: Family, axes: Sequence[CutAxis], budget: Budget
    ) -> None:
        self._src, self._dst, self._family, self._axes, self._budget = src, dst, family, axes, budget
        self._atoms: list[dict[int, tuple[Ownership, int]]] = [{} for _ in axes]
        self._met: list[dict[Ownership, list[int]]] = [{} for _ in axes]
        self._common: dict[tuple[frozenset[int], ...], frozenset[int]] = {}

    def met_by(self, dst_rank: int) -> list[list[int]]:
        """Per axis, the numbers of the atoms of which a destination rank holds something."""
        met = []
        steps = sum(MEET_STEPS + len(cut.edges) for cut in self._axes)
        self._budget.spend(self._family.fields[0], steps, "too many ranks and axes to compare")
        for number, (axis, cut) in enumerate(zip(self._family.shape.axes, self._axes, strict=True)):
            mine = self._family.dst[dst_rank].axes[number].owned
            found = self._met[number].get(mine)
            if found is None:
                starts, period = cut.edges[:-1], int(cut.edges[-1])
                found = np.flatnonzero(meets(axis.extent, starts, cut.edges[1:] - starts, period, mine)).tolist()
                self._met[number][mine] = found
            hole = next((atom for atom in found if not cut.owners[atom]), None)
            if hole is not None:
                held = {str(geometry.axes[number].owned) for geometry in self._family.src.values()}
                raise LayoutMismatch(
                    f"field '{self._family.fields[0]}', axis '{axis.name}': rank {dst_rank} of engine '{self._dst.engine}' "
                    f"holds {mine}, but {self._atom(number, hole)[0]} has no source; the ranks of engine "
                    f"'{self._src.engine}' hold {', '.join(sorted(held)[:SHOWN])}: check its parallel sizes"
                )
            met.append(found)
        return met

    def cells(self, dst_rank: int, met: Sequence[Sequence[int]]) -> Iterator[tuple[Box, int, frozenset[int]]]:
        """Every combination of atoms, with its bytes and the source ranks that hold it."""
        family = self._family
        steps = CELL_STEPS * len(met) * prod(map(len, met))
        self._budget.spend(family.fields[0], steps, "too many parts that they share")
        field_bytes = family.shape.element_bytes * len(family.fields)
        for combination in product(*met):
            found = [self._atom(number, atom) for number, atom in enumerate(combination)]
            box = tuple(owned for owned, _ in found)
            owners = self._owners(combination)
            if not owners:
                told = ", ".join(f"{a.name} {owned}" for a, owned in zip(family.shape.axes, box, strict=True))
                raise LayoutMismatch(
                    f"field '{family.fields[0]}': no rank of engine '{self._src.engine}' holds the whole cell ({told}) that rank "
                    f"{dst_rank} of engine '{self._dst.engine}' needs: check its parallel sizes"
                )
            yield box, prod((size for _, size in found), start=field_bytes), owners

    def _owners(self, combination: tuple[int, ...]) -> frozenset[int]:
        key = tuple(axis.owners[atom] for axis, atom in zip(self._axes, combination, strict=True))
        common = self._common.get(key)
        if common is None:
            steps = OWNER_STEPS * len(self._family.src) * len(key)
            self._budget.spend(self._family.fields[0], steps, "parts with too many replicas")
            common = self._common[key] = frozenset(self._family.src).intersection(*key)
        return common

    def _atom(self, number: int, atom: int) -> tuple[Ownership, int]:
        """One atom of an axis, and how many of its coordinates are counted."""
        found = self._atoms[number].get(atom)
        if found is None:
            edges, extent = self._axes[number].edges, self._family.shape.axes[number].extent
            owned = part(extent, int(edges[atom]), int(edges[atom + 1]), int(edges[-1]))
            found = self._atoms[number][atom] = owned, count_common(extent, owned)
        return found
