"""Into which cells does the source cut a family, and who holds each?

1. Every axis is cut at every edge of what the source's ranks hold: an atom is held whole or not at all.
2. A destination rank meets some atoms of each axis; every combination is a cell that it needs.
3. The source ranks that hold a cell are those that hold all of its atoms.

Refused: an atom or a cell that no source rank holds (LayoutMismatch naming field, axis and both sides), and what takes more work than
the `Budget` has.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import Coordinates, Interval, Ownership
from kvreshard.plan.budget import AXIS_STEPS, CELL_STEPS, EDGE_STEPS, HOLDER_STEPS, MEET_STEPS, OWNER_STEPS, Budget
from kvreshard.plan.cover import count_common, count_edges, edges_of, meets, part
from kvreshard.plan.family import Box, Family
from kvreshard.plan.match import SHOWN


class CutAxis(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One axis as the source cuts it: atom i is `[edges[i], edges[i + 1])` of every period, and `owners[i]` hold it."""

    edges: list[int]
    owners: tuple[frozenset[int], ...]

    @cached_property
    def turns(self) -> tuple[Coordinates, Coordinates]:
        """First coordinate and number of coordinates of every atom, shape (atoms,)."""
        edges = np.array(self.edges, dtype=np.int64)
        return edges[:-1], np.diff(edges)

    def met_by(self, extent: int | None, mine: Ownership) -> Sequence[int]:
        """The numbers of the atoms of which an ownership has something."""
        if len(self.owners) == 1:
            return (0,)
        if extent is not None and isinstance(mine, Interval):
            stop = extent if mine.stop is None else mine.stop
            return range(bisect_right(self.edges, mine.start) - 1, bisect_left(self.edges, stop))
        found: list[int] = np.flatnonzero(meets(extent, *self.turns, self.edges[-1], mine)).tolist()
        return found


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
        return CutAxis([0, axis.extent or 1], (frozenset(family.src),))
    try:
        edges = edges_of(axis.extent, tuple(held))
    except LayoutMismatch as error:
        raise LayoutMismatch(f"field '{name}', axis '{axis.name}', engine '{src.engine}': {error}") from None
    budget.spend(name, HOLDER_STEPS * len(held) * len(edges), why)
    is_swept = all(isinstance(owned, Interval) for owned in held)
    owners, seen = [], set[frozenset[int]]()
    for holders in (swept if is_swept else looked_up)(held, edges):
        if holders not in seen:
            budget.spend(name, OWNER_STEPS * (len(held) + len(holders)), why)
            seen.add(holders)
        owners.append(holders)
    return CutAxis(edges.tolist(), tuple(owners))


def swept(held: Mapping[Ownership, Sequence[int]], edges: Coordinates) -> Iterator[frozenset[int]]:
    """Who holds each atom of intervals, found from edge to edge. `held`: the ranks of each ownership, no rank twice."""
    begin, end = defaultdict[int, list[int]](list), defaultdict[int | None, list[int]](list)
    for owned, ranks in held.items():
        begin[owned.start] += ranks
        end[getattr(owned, "stop", None)] += ranks
    here = frozenset[int]()
    for edge in edges[:-1].tolist():
        here = here.difference(end[edge]).union(begin[edge])
        yield here


def looked_up(held: Mapping[Ownership, Sequence[int]], edges: Coordinates) -> Iterator[frozenset[int]]:
    """Who holds each atom, found for all of them at once. `held` as in `swept`."""
    holds = np.array([owned.contains(edges[:-1]) for owned in held], dtype=bool).reshape(len(held), len(edges) - 1)
    alike: dict[bytes, frozenset[int]] = {}
    for column, packed in enumerate(np.packbits(holds, axis=0).T):
        key = packed.tobytes()
        if key not in alike:
            ranks = [held_by for held_by, here in zip(held.values(), holds[:, column].tolist(), strict=True) if here]
            alike[key] = frozenset(chain.from_iterable(ranks))
        yield alike[key]


class _Atom(NamedTuple):
    """One atom of an axis, how many of its coordinates are counted, and who holds it."""

    owned: Ownership
    size: int
    owners: frozenset[int]


class Parts:
    """The cells into which the source cuts a family, as far as somebody asks for them."""

    def __init__(
        self, src: EngineLayout, dst: EngineLayout, family: Family, axes: Sequence[CutAxis], budget: Budget
    ) -> None:
        self._src, self._dst, self._family, self._axes, self._budget = src, dst, family, axes, budget
        self._atoms: list[dict[int, _Atom]] = [{} for _ in axes]
        self._met: list[dict[Ownership, Sequence[int]]] = [{} for _ in axes]
        self._common: dict[tuple[frozenset[int], ...], frozenset[int]] = {}
        self._meet_steps = sum([MEET_STEPS + len(cut.edges) for cut in axes])

    def met_by(self, dst_rank: int) -> list[Sequence[int]]:
        """Per axis, the numbers of the atoms of which a destination rank holds something."""
        self._budget.spend(self._family.fields[0], self._meet_steps, "too many ranks and axes to compare")
        return [
            self._met_along(number, mapped.owned, dst_rank)
            for number, mapped in enumerate(self._family.dst[dst_rank].axes)
        ]

    def _met_along(self, number: int, mine: Ownership, dst_rank: int) -> Sequence[int]:
        found = self._met[number].get(mine)
        if found is not None:
            return found
        axis, cut = self._family.shape.axes[number], self._axes[number]
        found = cut.met_by(axis.extent, mine)
        hole = next((atom for atom in found if not cut.owners[atom]), None)
        if hole is not None:
            held = {str(geometry.axes[number].owned) for geometry in self._family.src.values()}
            raise LayoutMismatch(
                f"field '{self._family.fields[0]}', axis '{axis.name}': rank {dst_rank} of engine '{self._dst.engine}' "
                f"holds {mine}, but {self._atom(number, hole).owned} has no source; the ranks of engine "
                f"'{self._src.engine}' hold {', '.join(sorted(held)[:SHOWN])}: check its parallel sizes"
            )
        self._met[number][mine] = found
        return found

    def cells(self, dst_rank: int, met: Sequence[Sequence[int]]) -> Iterator[tuple[Box, int, frozenset[int]]]:
        """Every combination of atoms, with its bytes and the source ranks that hold it."""
        family = self._family
        steps = CELL_STEPS * len(met) * prod(map(len, met))
        self._budget.spend(family.fields[0], steps, "too many parts that they share")
        field_bytes = family.shape.element_bytes * len(family.fields)
        atoms = [[self._atom(number, atom) for atom in found] for number, found in enumerate(met)]
        for combination in product(*atoms):
            box = tuple([atom.owned for atom in combination])
            owners = self._owners(tuple([atom.owners for atom in combination]))
            if not owners:
                told = ", ".join(f"{a.name} {owned}" for a, owned in zip(family.shape.axes, box, strict=True))
                raise LayoutMismatch(
                    f"field '{family.fields[0]}': no rank of engine '{self._src.engine}' holds the whole cell ({told}) that rank "
                    f"{dst_rank} of engine '{self._dst.engine}' needs: check its parallel sizes"
                )
            yield box, prod([atom.size for atom in combination], start=field_bytes), owners

    def _owners(self, holders: tuple[frozenset[int], ...]) -> frozenset[int]:
        common = self._common.get(holders)
        if common is None:
            steps = OWNER_STEPS * len(self._family.src) * len(holders)
            self._budget.spend(self._family.fields[0], steps, "parts with too many replicas")
            common = self._common[holders] = frozenset(self._family.src).intersection(*holders)
        return common

    def _atom(self, number: int, atom: int) -> _Atom:
        found = self._atoms[number].get(atom)
        if found is None:
            cut, extent = self._axes[number], self._family.shape.axes[number].extent
            owned = part(extent, cut.edges[atom], cut.edges[atom + 1], cut.edges[-1])
            found = self._atoms[number][atom] = _Atom(owned, count_common(extent, owned), cut.owners[atom])
        return found
