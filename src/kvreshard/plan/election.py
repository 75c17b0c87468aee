"""Election: which source rank gives which boxes to each destination rank, and who reports to whom.

Every destination rank computes the same whole table from the same two layouts:

1. Fields of equal shape and of equal geometry on every rank of both engines are a `FieldSet` (all layers of a kind in one pipeline stage).
   What is found for one of them holds for all.
2. Every axis is cut at each edge of what the source's ranks hold: an interval is held whole or not at all. A destination rank needs each
   box, one interval per axis, of which it holds something; the source ranks that hold the box are those that hold all its intervals.
3. Boxes with one owner are settled first. A replica is read from an owner that the destination rank reads anyway, else from the one
   with the fewest bytes so far, else from the lowest rank; once per destination rank and set of owners.
4. Neighbouring boxes of one source rank are joined.
5. A source rank that nobody reads gets one appointed reporter, so that it learns when its pages are free.

Refused (LayoutMismatch): a box that a destination rank needs and no source rank holds, naming field, axis and both sides; layouts that
take more work than a `Budget` has.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.field import Field
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import MAX_SIZE, Coordinates, Cyclic, Interval, Ownership
from kvreshard.model.rank import Geometry
from kvreshard.plan.budget import Budget
from kvreshard.plan.cover import turn
from kvreshard.plan.match import SHOWN

# One engine's ranks repeat together, or after a few hundred laps; without a bound a peer could ask for any memory.
MAX_LAPS = 1 << 16
# Steps of an axis of a field set, and each rank of either engine; of an edge, each ownership that may hold what is behind it, and each
# destination rank that may need it.
AXIS_STEPS, RANK_STEPS = 10_000, 100
EDGE_STEPS, HOLDER_STEPS, READER_STEPS = 100, 4, 32
# Of a box and each of its axes; of each of its owners.
BOX_STEPS, OWNER_STEPS = 200, 16

Box = tuple[Ownership, ...]
"""One ownership per axis of the field, in the field's order."""


@dataclass(frozen=True)
class FieldSet:
    """Fields of equal shape, as `shape` but for their names, and equal geometry on every rank of both engines."""

    fields: tuple[str, ...]
    shape: Field
    src: Mapping[int, Geometry]
    dst: Mapping[int, Geometry]


@dataclass(frozen=True)
class Election:
    """Per destination rank: the field sets it holds and, per field set, (source rank, box) pairs that cover its shard."""

    field_sets: tuple[FieldSet, ...]
    boxes: Mapping[tuple[int, int], tuple[tuple[int, Box], ...]]
    """(destination rank, index of field set) -> sources."""
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
    field_sets = group_fields(src, dst, names)
    budget = Budget(src, dst)
    axes_of = [cut_axes(src, field_set, budget) for field_set in field_sets]
    needed: list[_NeededBox] = []
    for number, (field_set, axes) in enumerate(zip(field_sets, axes_of, strict=True)):
        needed += _find_needed(src, dst, number, field_set, axes, budget)
    boxes = {
        (dst_rank, number): tuple(
            (src_rank, tuple([axis.ownership(*ends) for axis, ends in zip(axes_of[number], box, strict=True)]))
            for src_rank in sorted(boxes_of)
            for box in join_boxes(boxes_of[src_rank])
        )
        for (dst_rank, number), boxes_of in _choose(needed).items()
    }
    return Election(field_sets, boxes, tuple(rank.rank for rank in src.ranks), tuple(rank.rank for rank in dst.ranks))


def group_fields(src: EngineLayout, dst: EngineLayout, names: Iterable[str]) -> tuple[FieldSet, ...]:
    """The named fields as field sets, in the order of `names`. The destination holds a part of each."""
    kinds, src_holding, dst_holding = dst.kind_of, src.holding_of, dst.holding_of
    members: dict[object, list[str]] = {}
    for name in names:
        members.setdefault((kinds[name], src_holding.get(name), dst_holding[name]), []).append(name)
    return tuple(
        FieldSet(tuple(fields), dst.field_by_name[fields[0]], src.holders(fields[0]), dst.holders(fields[0]))
        for fields in members.values()
    )


class CutAxis:
    """One axis of a field set, cut wherever something that a source rank holds begins or ends.

    Interval i has the coordinates from `edges[i]` to before `edges[i + 1]` of every period. The ranks `owners[i]` hold all of it, other
    source ranks nothing.
    """

    def __init__(self, extent: int | None, held: Mapping[Ownership, Sequence[int]]) -> None:
        """`held`: the source ranks of each ownership, no rank twice. Raises LayoutMismatch."""
        edges = find_edges(extent, held)
        self.extent, self.edges = extent, edges.tolist()
        self._starts, self._sizes = edges[:-1], np.diff(edges)
        holds = np.zeros((len(held), len(self._starts)), dtype=bool)
        for row, owned in zip(holds, held, strict=True):
            row[:] = owned.contains(self._starts)
        distinct: dict[bytes, frozenset[int]] = {}
        self.owners: list[frozenset[int]] = []
        for column in holds.T:
            key = column.tobytes()
            if key not in distinct:
                having = [ranks for ranks, has in zip(held.values(), column.tolist(), strict=True) if has]
                distinct[key] = frozenset(chain.from_iterable(having))
            self.owners.append(distinct[key])
        self._met: dict[Ownership, list[int]] = {}

    def met_by(self, owned: Ownership) -> list[int]:
        """The numbers of the intervals of which an ownership holds something."""
        if owned not in self._met:
            start, size, period = turn(self.extent, owned)
            shared = math.gcd(self.edges[-1], period)
            ahead = (start - self._starts) % shared
            self._met[owned] = np.flatnonzero((ahead < self._sizes) | (ahead + size > shared)).tolist()
        return self._met[owned]

    def ownership(self, first: int, stop: int) -> Ownership:
        """The intervals `[first, stop)` as one ownership."""
        low, high, period = self.edges[first], self.edges[stop], self.edges[-1]
        if self.extent is not None:
            return Interval(low, high)
        return Interval(0, None) if high - low == period else Cyclic(low, high - low, period)


def cut_axes(src: EngineLayout, field_set: FieldSet, budget: Budget) -> list[CutAxis]:
    """The axes of a field set, in the field's order. Raises LayoutMismatch."""
    axes = []
    for number, axis in enumerate(field_set.shape.axes):
        held: dict[Ownership, list[int]] = {}
        for rank, geometry in field_set.src.items():
            held.setdefault(geometry.axes[number].owned, []).append(rank)
        try:
            num_edges = count_edges(axis.extent, held)
        except LayoutMismatch as error:
            raise LayoutMismatch(
                f"field '{field_set.fields[0]}', axis '{axis.name}', engine '{src.engine}': {error}"
            ) from None
        each_edge = EDGE_STEPS + HOLDER_STEPS * len(held) + READER_STEPS * len(field_set.dst)
        steps = AXIS_STEPS + RANK_STEPS * (len(field_set.src) + len(field_set.dst)) + num_edges * each_edge
        budget.spend(field_set.fields[0], steps, f"an axis '{axis.name}' that is cut into too many intervals")
        axes.append(CutAxis(axis.extent, held))
    return axes


def spend_on_boxes(field_set: FieldSet, axes: Sequence[CutAxis], num_boxes: int, budget: Budget) -> None:
    """Raises LayoutMismatch where so many boxes are too many to look at, each with its owners."""
    most_owners = min([max(map(len, axis.owners)) for axis in axes])
    steps = num_boxes * (BOX_STEPS * (2 + len(axes)) + OWNER_STEPS * most_owners)
    budget.spend(field_set.fields[0], steps, "too many boxes, or boxes with too many replicas")


def owners_of(axes: Sequence[CutAxis], box: Sequence[int]) -> frozenset[int]:
    """The source ranks that hold a box, one interval of each axis."""
    fewest, *others = sorted([axis.owners[index] for axis, index in zip(axes, box, strict=True)], key=len)
    return fewest.intersection(*others)


class _NeededBox(NamedTuple):
    """A box, one interval per axis, that a destination rank needs of a field set, and the source ranks that hold it, whole."""

    field_set: int
    dst_rank: int
    box: tuple[int, ...]
    num_bytes: int
    owners: frozenset[int]


def _find_needed(
    src: EngineLayout, dst: EngineLayout, number: int, field_set: FieldSet, axes: Sequence[CutAxis], budget: Budget
) -> Iterator[_NeededBox]:
    """Every box of a field set that a destination rank needs, by rank. Raises LayoutMismatch for one that nobody holds."""
    met_by = {
        rank: [axis.met_by(mapped.owned) for axis, mapped in zip(axes, geometry.axes, strict=True)]
        for rank, geometry in sorted(field_set.dst.items())
    }
    spend_on_boxes(field_set, axes, sum([math.prod(map(len, met)) for met in met_by.values()]), budget)
    field_bytes = field_set.shape.element_bytes * len(field_set.fields)
    for dst_rank, met in met_by.items():
        for box in product(*met):
            owners = owners_of(axes, box)
            if not owners:
                raise _hole(src, dst, field_set, axes, box, dst_rank)
            size = math.prod([axis.edges[i + 1] - axis.edges[i] for axis, i in zip(axes, box, strict=True)])
            yield _NeededBox(number, dst_rank, box, size * field_bytes, owners)


def _hole(
    src: EngineLayout,
    dst: EngineLayout,
    field_set: FieldSet,
    axes: Sequence[CutAxis],
    box: Sequence[int],
    dst_rank: int,
) -> LayoutMismatch:
    """What is to be said of a box that a destination rank needs and no source rank holds."""
    needed = [axis.ownership(index, index + 1) for axis, index in zip(axes, box, strict=True)]
    for number, (axis, cut) in enumerate(zip(field_set.shape.axes, axes, strict=True)):
        if not cut.owners[box[number]]:
            held = sorted({str(geometry.axes[number].owned) for geometry in field_set.src.values()})
            return LayoutMismatch(
                f"field '{field_set.fields[0]}', axis '{axis.name}': rank {dst_rank} of engine '{dst.engine}' holds "
                f"{field_set.dst[dst_rank].axes[number].owned}, but {needed[number]} has no source; the ranks of engine '{src.engine}' hold "
                f"{', '.join(held[:SHOWN])}: check its parallel sizes"
            )
    box_text = ", ".join(f"{axis.name} {owned}" for axis, owned in zip(field_set.shape.axes, needed, strict=True))
    return LayoutMismatch(
        f"field '{field_set.fields[0]}': no rank of engine '{src.engine}' holds the whole box ({box_text}) that rank {dst_rank} of engine "
        f"'{dst.engine}' needs: check its parallel sizes"
    )


def _choose(needed: Sequence[_NeededBox]) -> Mapping[tuple[int, int], Mapping[int, list[tuple[int, ...]]]]:
    """(destination rank, field set) -> source rank -> the boxes that it gives. Boxes of one owner first."""
    reads = defaultdict[int, set[int]](set)
    load = defaultdict[int, int](int)
    settled: dict[tuple[int, frozenset[int]], int] = {}
    chosen = defaultdict[tuple[int, int], dict[int, list[tuple[int, ...]]]](dict)
    for field_set, dst_rank, box, num_bytes, owners in sorted(needed, key=lambda one: len(one.owners) > 1):
        src_rank = settled.get((dst_rank, owners))
        if src_rank is None:
            candidates = (owners & reads[dst_rank]) or owners
            src_rank = settled[dst_rank, owners] = min(candidates, key=lambda rank: (load[rank], rank))
        reads[dst_rank].add(src_rank)
        load[src_rank] += num_bytes
        chosen[dst_rank, field_set].setdefault(src_rank, []).append(box)
    return chosen


def join_boxes(boxes: Iterable[tuple[int, ...]]) -> list[tuple[tuple[int, int], ...]]:
    """Fewer and larger boxes with the same intervals, each a half-open range per axis: neighbours along one axis are joined.

    >>> join_boxes([(0, 2), (0, 3), (1, 2), (1, 3), (4, 3)])
    [((0, 2), (2, 4)), ((4, 5), (3, 4))]
    """
    ranges = [tuple([(index, index + 1) for index in box]) for box in boxes]
    for axis in range(len(ranges[0])):
        joined: list[tuple[tuple[int, int], ...]] = []
        for box in sorted(ranges, key=lambda box: (box[:axis], box[axis + 1 :], box[axis])):
            last = joined[-1] if joined else box
            is_beside = last[axis][1] == box[axis][0]
            if is_beside and (last[:axis], last[axis + 1 :]) == (box[:axis], box[axis + 1 :]):
                joined[-1] = (*box[:axis], (last[axis][0], box[axis][1]), *box[axis + 1 :])
            else:
                joined.append(box)
        ranges = joined
    return ranges


def common_period(extent: int | None, owners: Iterable[Ownership]) -> int:
    """Coordinates after which all that the owners hold repeats. Raises LayoutMismatch where they are too many to lay out."""
    if extent is not None:
        return extent
    periods = {owned.period for owned in owners} - {1}
    period = math.lcm(*periods)
    if period > min(MAX_SIZE, MAX_LAPS * min(periods, default=1)):
        raise LayoutMismatch(
            f"context parallelism repeats every {', '.join(map(str, sorted(periods)))} coordinates on different ranks, "
            f"together only every {period}: use interleaves of which one is a multiple of the other"
        )
    return period


def count_edges(extent: int | None, owners: Iterable[Ownership]) -> int:
    """How many edges `find_edges` has to sort, at most; found without laying them out. Raises LayoutMismatch."""
    held = tuple(owners)
    period = common_period(extent, held)
    return 2 + sum([2 * (period // owned.period if isinstance(owned, Cyclic) else 1) for owned in held])


def find_edges(extent: int | None, owners: Iterable[Ownership]) -> Coordinates:
    """Where anything that one of the owners holds begins or ends, over one common period, with its ends. Raises LayoutMismatch."""
    held = tuple(owners)
    period = common_period(extent, held)
    ends = np.array([0, period], dtype=np.int64)
    return np.unique(np.concatenate([ends, *(owned.edges(0, period) for owned in held)]))
