"""From a pair of engines to everything that a destination rank needs to know about its sources.

A `Lane` is the unit of work: congruent fields that one destination rank reads from one source rank, as one box. It
knows base addresses, page strides and, per axis, both address maps; block tables come later, at bind. Its patterns
depend only on where two pages overlap, so they are computed at first use and kept.

`compile_route`:
1. match fields by name (`match`), 2. elect sources (`election`), 3. make a lane per source and box, 4. prove that the
lanes cover the destination exactly once and stay in bounds (`check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.layout import EngineLayout, Group, Rank
from kvreshard.model.ownership import Interval, Ownership
from kvreshard.plan.copies import PageFrame
from kvreshard.plan.cost import Choice, CostModel, Way, choose
from kvreshard.plan.election import Box, Election, Family, elect
from kvreshard.plan.match import match_fields
from kvreshard.plan.pattern import Bases, Pattern, build_pattern
from kvreshard.plan.refine import Strip, refine

# Patterns differ by where pages overlap; page sizes 64 and 63 give 126, clipped ends a few more per request.
MAX_KEPT_PATTERNS = 4096
# Frames are of whole pages, which are few; a transport may hold something for each.
MAX_KEPT_FRAMES = 16
# Interleaves that do not divide one another meet within a few laps, or a page costs about the same in each.
LAPS_LOOKED_AT = 8
# Where one side's pages are much smaller than the other's, that many overlaps, evenly spread, tell as much as all.
OVERLAPS_LOOKED_AT = 32
MAX_CUTS = 1 << 14
# The proof compares the lanes of a field with one another: 512 source ranks of eight kinds of fields make that many pairs.
MAX_LANE_PAIRS = 1 << 20

Overlap = tuple[int, int, int]
"""Coordinates from the source span's first, from the destination span's first, and how many: one page over another."""


@dataclass(frozen=True, slots=True)
class Span:
    """How one side's pages cut the sequence: `indices` coordinates lie in `pages` consecutive pages.

    `ring_pages`: in how many pages a ring wraps, None without a ring; a state wraps in its one page. `capacity`: coordinates
    that a ring holds.
    """

    indices: int
    pages: int
    ring_pages: int | None
    capacity: int | None


@dataclass(frozen=True, slots=True)
class LaneAxis:
    """One axis of a lane: both sides' maps and the elected part."""

    name: str
    extent: int | None
    src: AxisMap
    dst: AxisMap
    chosen: Ownership


@dataclass(frozen=True)
class Lane:
    """Congruent fields that `dst_rank` reads from `src_rank`. Bases have shape (len(fields),), addresses in bytes.

    For the sequence axis, if there is one: `tokens_per_index`, `keep_partial`, and both sides' spans.
    """

    src_rank: int
    dst_rank: int
    src_group: Group
    dst_group: Group
    fields: tuple[str, ...]
    bases: Bases
    element_bytes: int
    src_page_stride_bytes: int
    dst_page_stride_bytes: int
    axes: tuple[LaneAxis, ...]
    tokens_per_index: int
    keep_partial: bool
    src_span: Span
    dst_span: Span
    choice: Choice | None = None
    _patterns: dict[Overlap, Pattern] = field(default_factory=dict, init=False, compare=False, repr=False)
    _frames: dict[Overlap, PageFrame | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def is_state(self) -> bool:
        """Whether a page holds a whole state, without a sequence axis."""
        return all(axis.extent is not None for axis in self.axes)

    def pattern(self, overlap: Overlap) -> Pattern:
        """The runs where a source page and a destination page overlap; computed once per overlap."""
        found = self._patterns.get(overlap)
        if found is None:
            if len(self._patterns) >= MAX_KEPT_PATTERNS:
                self._patterns.clear()
            found = build_pattern(self.bases, self.element_bytes, [self._strips(axis, overlap) for axis in self.axes])
            self._patterns[overlap] = found
        return found

    def frame(self, overlap: Overlap) -> PageFrame | None:
        """The pattern of one overlap as a frame, the same object each time; None if a side needs several pages for it."""
        if overlap not in self._frames:
            if len(self._frames) >= MAX_KEPT_FRAMES:
                self._frames.clear()
            self._frames[overlap] = self._make_frame(self.pattern(overlap))
        return self._frames[overlap]

    def _make_frame(self, pattern: Pattern) -> PageFrame | None:
        if not len(pattern.lengths) or self.src_span.pages != 1 or self.dst_span.pages != 1:
            return None
        return PageFrame(
            (pattern.bases.src[:, None] + pattern.src_offsets).reshape(-1),
            (pattern.bases.dst[:, None] + pattern.dst_offsets).reshape(-1),
            np.tile(pattern.lengths, len(pattern.bases.src)),
            self.src_page_stride_bytes,
            self.dst_page_stride_bytes,
            self.src_group.num_pages,
            self.dst_group.num_pages,
        )

    def _strips(self, axis: LaneAxis, overlap: Overlap) -> list[Strip]:
        if axis.extent is None:
            return refine(axis.src, axis.dst, axis.chosen, *overlap)
        return refine(axis.src, axis.dst, axis.chosen, 0, 0, axis.extent)

    def typical_overlap(self) -> Overlap:
        """The fullest overlap of two pages near the start of a sequence: what a page costs.

        Where ranks share the sequence, the first overlap may hold nothing of this lane; some laps are looked at.
        """
        src_size, dst_size = self.src_span.indices, self.dst_span.indices
        first = (0, 0, min(src_size, dst_size))
        along = next((axis for axis in self.axes if axis.extent is None), None)
        if along is None or along.src.owned.period == along.dst.owned.period == along.chosen.period == 1:
            return first
        reach = min(
            math.lcm(src_size, dst_size), LAPS_LOOKED_AT * max(src_size, dst_size), MAX_CUTS * min(src_size, dst_size)
        )
        cuts = sorted({*range(0, reach + 1, src_size), *range(0, reach + 1, dst_size)})
        every = -(-len(cuts) // OVERLAPS_LOOKED_AT) | 1  # odd: where two ranks take turns, both turns are seen
        overlaps = [(low % src_size, low % dst_size, high - low) for low, high in list(pairwise(cuts))[::every]]
        return max(overlaps, key=lambda overlap: sum(strip.num_cells for strip in self._strips(along, overlap)))


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


def compile_route(
    src: EngineLayout,
    dst: EngineLayout,
    dst_rank: int,
    *,
    election: Election | None = None,
    cost: CostModel = CostModel(),  # noqa: B008 (frozen)
    way: Way | None = None,
) -> Route:
    """The proved route of one destination rank. Raises LayoutMismatch naming field, axis, both values and the remedy.

    `election`: the table of this pair, if another destination rank's route has already needed it. `cost` decides per lane
    whether it is read directly or through staging; `way` forces it.
    """
    from kvreshard.plan.check import prove

    if dst_rank not in dst.rank_by_number:
        raise LayoutMismatch(
            f"engine '{dst.engine}' has no rank {dst_rank}; its ranks are {sorted(dst.rank_by_number)}"
        )
    matched = match_fields(src, dst)
    table = election if election is not None else elect(src, dst, list(matched.names))
    num_pairs = sum(len(boxes) ** 2 // 2 for (rank, _), boxes in table.boxes.items() if rank == dst_rank)
    if num_pairs > MAX_LANE_PAIRS:
        raise LayoutMismatch(
            f"rank {dst_rank} of engine '{dst.engine}' would read so many parts from the {len(src.ranks)} ranks of engine "
            f"'{src.engine}' that {num_pairs} pairs of them had to be compared, more than {MAX_LANE_PAIRS}; use fewer ranks, "
            "or sizes that divide one another"
        )
    lanes = tuple(
        _decide(_lane(src, dst, family, src_rank, dst_rank, box), cost, way)
        for index, family in enumerate(table.families)
        for src_rank, box in table.boxes.get((dst_rank, index), ())
    )
    route = Route(src.engine, dst.engine, dst_rank, lanes, table.reporters, matched.warnings, dst.groups)
    prove(route, src, dst)
    return route


def _decide(lane: Lane, cost: CostModel, way: Way | None) -> Lane:
    return replace(lane, choice=choose(lane.pattern(lane.typical_overlap()), cost, way))


def _lane(src: EngineLayout, dst: EngineLayout, family: Family, src_rank: int, dst_rank: int, box: Box) -> Lane:
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
        src_span=_span(along.src, along.chosen) if along else state,
        dst_span=_span(along.dst, Interval(0, None)) if along else state,
    )


def _bases(src: Rank, dst: Rank, fields: tuple[str, ...]) -> Bases:
    numbers: dict[tuple[str, str], int] = {}
    src_shards, dst_shards = [[rank.shard_by_field[name] for name in fields] for rank in (src, dst)]
    return Bases(
        np.array([src.base_address(shard) for shard in src_shards], dtype=np.int64),
        np.array([dst.base_address(shard) for shard in dst_shards], dtype=np.int64),
        np.array(
            [
                numbers.setdefault((a.region, b.region), len(numbers))
                for a, b in zip(src_shards, dst_shards, strict=True)
            ],
            dtype=np.int64,
        ),
    )


def _span(mapped: AxisMap, chosen: Ownership) -> Span:
    """The smallest stretch of the sequence that is a whole number of pages and of periods of both ownerships."""
    per_page = mapped.indices_per_page
    local = math.lcm(per_page, mapped.owned.run)
    indices = local // mapped.owned.run * mapped.owned.period
    whole = math.lcm(indices, chosen.period)
    pages = local // per_page * (whole // indices)
    ring = mapped.ring_pages
    capacity = None if ring is None else ring * per_page // mapped.owned.run * mapped.owned.period
    return Span(whole, pages, ring, capacity)
