"""From a pair of engines to everything that a destination rank needs to know about its sources.

`compile_route`:
1. match fields by name (`match`), 2. elect sources (`election`), 3. make a `Lane` per source and box (`lane`), 4. prove that
the lanes cover the destination exactly once and stay in bounds (`check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.layout import EngineLayout, Group, Rank
from kvreshard.model.ownership import MAX_SIZE, Interval, Ownership
from kvreshard.plan.budget import (
    CUT_STEPS,
    FIELD_STEPS,
    KEPT_STEPS,
    LANE_STEPS,
    NEST_STEPS,
    RUN_STEPS,
    TURN_STEPS,
    Budget,
)
from kvreshard.plan.cost import CostModel, Way, choose
from kvreshard.plan.election import Election, elect
from kvreshard.plan.family import Box, Family
from kvreshard.plan.kept import Kept
from kvreshard.plan.lane import OVERLAPS_LOOKED_AT, Lane, LaneAxis, Span
from kvreshard.plan.match import match_fields
from kvreshard.plan.pattern import Bases
from kvreshard.plan.stream import Stream, make_streams, quick_streams

# The proof compares the lanes of a field with one another: 512 source ranks of eight kinds of fields make that many pairs.
MAX_LANE_PAIRS = 1 << 20

if TYPE_CHECKING:
    from kvreshard.model._loops import Streams


@dataclass(frozen=True)
class Route:
    """All lanes of one destination rank from one source engine, and who reports to which source rank."""

    src_engine: str
    dst_engine: str
    dst_rank: int
    lanes: tuple[Lane, ...]
    reporters: Mapping[int, tuple[int, ...]]
    warnings: tuple[str, ...]
    dst_groups: tuple[Group, ...]
    """All groups of the destination engine, those without lanes to this rank included."""

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """The source ranks that this destination rank reads from, ascending."""
        return tuple(sorted({lane.src_rank for lane in self.lanes}))

    @cached_property
    def streams(self) -> tuple[Stream, ...]:
        """The lanes, together where they share both block tables and cut the sequence alike."""
        return make_streams(self.lanes)

    @cached_property
    def quick(self) -> Streams | None:
        """What says at once that a plain request is right, where all streams are plain and it was compiled."""
        return quick_streams(self.streams, self.dst_groups)

    def drop_kept(self) -> None:
        """Keep nothing of what its lanes have computed: nobody will read by it."""
        owners = {lane.bases for lane in self.lanes}
        for kept in {lane.kept for lane in self.lanes}:
            kept.drop(owners)


def compile_route(
    src: EngineLayout,
    dst: EngineLayout,
    dst_rank: int,
    *,
    election: Election | None = None,
    cost: CostModel = CostModel(),  # noqa: B008 (frozen)
    way: Way | None = None,
    kept: Kept | None = None,
) -> Route:
    """The proved route of one destination rank. Raises LayoutMismatch naming field, axis, both values and the remedy.

    `election`: the table of this pair, if another destination rank's route has already needed it. `cost` decides per lane
    whether it is read directly or through staging; `way` forces it. `kept`: where what the lanes compute stays, if routes share it.
    """
    from kvreshard.plan.check import prove

    if dst_rank not in dst.rank_by_number:
        raise LayoutMismatch(
            f"engine '{dst.engine}' has no rank {dst_rank}; its ranks are {sorted(dst.rank_by_number)}"
        )
    matched = match_fields(src, dst)
    table = election if election is not None else elect(src, dst, matched.names)
    num_pairs = sum(len(boxes) ** 2 // 2 for (rank, _), boxes in table.boxes.items() if rank == dst_rank)
    if num_pairs > MAX_LANE_PAIRS:
        raise LayoutMismatch(
            f"rank {dst_rank} of engine '{dst.engine}' would read so many parts from the {len(src.ranks)} ranks of engine "
            f"'{src.engine}' that {num_pairs} pairs of them had to be compared, more than {MAX_LANE_PAIRS}; use fewer ranks, "
            "or sizes that divide one another"
        )
    budget = Budget(src, dst)
    kept = Kept() if kept is None else kept
    lanes = tuple(
        _decide(_lane(src, dst, family, src_rank, dst_rank, box, budget, kept), cost, way, budget)
        for index, family in enumerate(table.families)
        for src_rank, box in table.boxes.get((dst_rank, index), ())
    )
    route = Route(src.engine, dst.engine, dst_rank, lanes, table.reporters, matched.warnings, dst.groups)
    prove(route, src, dst)
    return route


def _decide(lane: Lane, cost: CostModel, way: Way | None, budget: Budget) -> Lane:
    field = lane.fields[0]
    along = lane.along
    longest = 1 if along is None else max(along.chosen.period, along.dst.owned.period)
    turns = OVERLAPS_LOOKED_AT * (min(lane.src_span.indices, lane.dst_span.indices) // longest + 1)
    budget.spend(field, TURN_STEPS * turns, "pages of too many turns")
    window = lane.typical_window()
    cuts, kept = lane.work(*window)
    budget.spend(field, CUT_STEPS * cuts + KEPT_STEPS * kept, "pages that cut one another into too many stretches")
    pattern = lane.pattern(lane.overlap_of(*window))
    steps = NEST_STEPS * len(pattern.runs) + RUN_STEPS * len(pattern.lengths)
    budget.spend(field, steps, "pages that overlap in too many runs")
    return lane.chosen(choose(pattern, cost, way))


def _lane(
    src: EngineLayout,
    dst: EngineLayout,
    family: Family,
    src_rank: int,
    dst_rank: int,
    box: Box,
    budget: Budget,
    kept: Kept,
) -> Lane:
    steps = LANE_STEPS + FIELD_STEPS * len(family.fields)
    budget.spend(family.fields[0], steps, "too many parts that one rank reads")
    src_geometry, dst_geometry = family.src[src_rank], family.dst[dst_rank]
    axes = tuple(
        LaneAxis(axis.name, axis.extent, src_map, dst_map, chosen)
        for axis, src_map, dst_map, chosen in zip(
            family.shape.axes, src_geometry.axes, dst_geometry.axes, box, strict=True
        )
    )
    sequence = family.shape.sequence
    along = next((axis for axis in axes if axis.extent is None), None)
    state = Span(1, 1, 1, None)
    return Lane(
        src_rank=src_rank,
        dst_rank=dst_rank,
        src_group=src.group_by_name[src_geometry.group],
        dst_group=dst.group_by_name[dst_geometry.group],
        fields=family.fields,
        bases=_bases(src.rank_by_number[src_rank], dst.rank_by_number[dst_rank], family.fields),
        element_bytes=family.shape.element_bytes,
        src_page_stride_bytes=src_geometry.page_stride_bytes,
        dst_page_stride_bytes=dst_geometry.page_stride_bytes,
        axes=axes,
        tokens_per_index=sequence.tokens_per_index if sequence else 1,
        keep_partial=sequence.keep_partial if sequence else False,
        src_span=_span(family, src, along.src, along.chosen) if along else state,
        dst_span=_span(family, dst, along.dst, Interval(0, None)) if along else state,
        kept=kept,
    )


def _bases(src: Rank, dst: Rank, fields: tuple[str, ...]) -> Bases:
    """Where fields begin on both sides."""
    from_bases, to_bases = [src.bases[field] for field in fields], [dst.bases[field] for field in fields]
    pairs = [(src.place_of[field].region, dst.place_of[field].region) for field in fields]
    numbers: dict[tuple[str, str], int] = {}
    regions = [numbers.setdefault(pair, len(numbers)) for pair in pairs]
    return Bases(
        np.array(from_bases, dtype=np.int64), np.array(to_bases, dtype=np.int64), np.array(regions, dtype=np.int64)
    )


def _span(family: Family, layout: EngineLayout, mapped: AxisMap, chosen: Ownership) -> Span:
    """The smallest stretch of the sequence that is a whole number of pages and of periods of both ownerships."""
    per_page = mapped.indices_per_page
    local = math.lcm(per_page, mapped.owned.run)
    indices = local // mapped.owned.run * mapped.owned.period
    whole = math.lcm(indices, chosen.period)
    if whole > MAX_SIZE:
        raise LayoutMismatch(
            f"field '{family.fields[0]}', axis '{mapped.axis}', engine '{layout.engine}': pages of {per_page} indices and turns of "
            f"{chosen if chosen.period > mapped.owned.period else mapped.owned} are whole together only every {whole} coordinates, "
            f"more than {MAX_SIZE}; use an interleave that divides the page"
        )
    pages = local // per_page * (whole // indices)
    ring = mapped.ring_pages
    capacity = None if ring is None else ring * per_page // mapped.owned.run * mapped.owned.period
    return Span(whole, pages, ring, capacity)
