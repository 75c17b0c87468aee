"""Compiles a pair of engines to proved routes.

1. Match fields by name (`match`). 2. Elect sources (`election`). 3. Make a `RankTransfer` per source and box, each read in the way that
costs less (`cost`). 4. Prove that the transfers cover the destination exactly once and stay in bounds (`check`).

Refused (LayoutMismatch): what `match`, `election` and `check` refuse, and pairs that take more work than a `Budget` has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import LayoutMismatch, UsageError
from kvreshard.model.expect import expect, expect_whole
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import MAX_SIZE, Interval, Ownership
from kvreshard.model.rank import Rank
from kvreshard.plan.budget import Budget
from kvreshard.plan.check import prove
from kvreshard.plan.cost import CostModel, Way, choose
from kvreshard.plan.election import Box, Election, FieldSet, elect
from kvreshard.plan.match import match_fields
from kvreshard.plan.pattern import Bases
from kvreshard.plan.pattern_cache import PatternCache
from kvreshard.plan.route import Route
from kvreshard.plan.transfer import RankTransfer, Span, TransferAxis

# Steps of a transfer, each of its fields, and each other transfer of the same fields, with which the proof compares it.
TRANSFER_STEPS, FIELD_STEPS, PAIR_STEPS = 40_000, 500, 128
# Where two pages overlap: of each nest of loops and run.
NEST_STEPS, RUN_STEPS = 1000, 40


def compile_route(
    src: EngineLayout,
    dst: EngineLayout,
    dst_rank: int,
    *,
    election: Election | None = None,
    cost: CostModel = CostModel(),  # noqa: B008 (frozen)
    way: Way | None = None,
    pattern_cache: PatternCache | None = None,
) -> Route:
    """The proved route of one destination rank. Raises LayoutMismatch naming field, axis, both values and the remedy.

    `election`: the table of this pair, if another destination rank's route has already needed it. `cost` decides per transfer
    whether it is read directly or through staging; `way` forces it. `pattern_cache`: what the transfers compute stays there, if routes share it.
    """
    if dst_rank not in dst.rank_by_number:
        raise LayoutMismatch(
            f"engine '{dst.engine}' has no rank {dst_rank}; its ranks are {sorted(dst.rank_by_number)}"
        )
    matched = match_fields(src, dst)
    table = election if election is not None else elect(src, dst, matched.names)
    cache, budget = PatternCache() if pattern_cache is None else pattern_cache, Budget(src, dst)
    transfers: list[RankTransfer] = []
    for index, field_set in enumerate(table.field_sets):
        boxes = table.boxes.get((dst_rank, index), ())
        each_transfer = TRANSFER_STEPS + FIELD_STEPS * len(field_set.fields) + PAIR_STEPS * len(boxes) // 2
        budget.spend(field_set.fields[0], len(boxes) * each_transfer, "too many boxes that one rank reads")
        for src_rank, box in boxes:
            transfer = _transfer(
                src.rank_by_number[src_rank], dst.rank_by_number[dst_rank], src, dst, field_set, box, cache
            )
            transfers.append(_decide(transfer, cost, way, budget))
    route = Route(src.engine, dst.engine, dst_rank, tuple(transfers), table.reporters, matched.warnings, dst.groups)
    prove(route, src, dst)
    return route


def _decide(transfer: RankTransfer, cost: CostModel, way: Way | None, budget: Budget) -> RankTransfer:
    """The transfer with the way that costs less for a typical page. Raises LayoutMismatch where finding a page's runs takes too long."""
    pattern = transfer.typical_pattern(budget)
    steps = NEST_STEPS * len(pattern.runs) + RUN_STEPS * len(pattern.lengths)
    budget.spend(transfer.fields[0], steps, "pages that overlap in too many runs")
    return replace(transfer, choice=choose(pattern, cost, way, is_state=transfer.is_state))


def _transfer(
    src_rank: Rank,
    dst_rank: Rank,
    src: EngineLayout,
    dst: EngineLayout,
    field_set: FieldSet,
    box: Box,
    pattern_cache: PatternCache,
) -> RankTransfer:
    src_geometry, dst_geometry = field_set.src[src_rank.rank], field_set.dst[dst_rank.rank]
    axes = tuple(
        TransferAxis(axis, src_map, dst_map, chosen)
        for axis, src_map, dst_map, chosen in zip(
            field_set.shape.axes, src_geometry.axes, dst_geometry.axes, box, strict=True
        )
    )
    along = next((axis for axis in axes if axis.extent is None), None)
    state = Span(1, 1, 1, None)
    return RankTransfer(
        src_rank=src_rank.rank,
        dst_rank=dst_rank.rank,
        src_group=src.group_by_name[src_geometry.group],
        dst_group=dst.group_by_name[dst_geometry.group],
        fields=field_set.fields,
        bases=_bases(src_rank, dst_rank, field_set.fields),
        element_bytes=field_set.shape.element_bytes,
        src_page_stride_bytes=src_geometry.page_stride_bytes,
        dst_page_stride_bytes=dst_geometry.page_stride_bytes,
        axes=axes,
        src_span=_span(field_set, src, along.src, along.chosen) if along else state,
        dst_span=_span(field_set, dst, along.dst, Interval(0, None)) if along else state,
        pattern_cache=pattern_cache,
    )


def _bases(src: Rank, dst: Rank, fields: Sequence[str]) -> Bases:
    """Where fields begin on both sides, with a number for each pair of regions."""
    at_src, at_dst = ([rank.shard_number[name] for name in fields] for rank in (src, dst))
    region = src.shard_regions[at_src] * len(dst.addresses) + dst.shard_regions[at_dst]
    return Bases(src.shard_addresses[at_src], dst.shard_addresses[at_dst], region)


def _span(field_set: FieldSet, layout: EngineLayout, mapped: AxisMap, chosen: Ownership) -> Span:
    """The smallest stretch of the sequence that is a whole number of pages and of periods of both ownerships."""
    per_page = mapped.indices_per_page
    local = math.lcm(per_page, mapped.owned.run)
    indices = local // mapped.owned.run * mapped.owned.period
    whole = math.lcm(indices, chosen.period)
    if whole > MAX_SIZE:
        raise LayoutMismatch(
            f"field '{field_set.fields[0]}', axis '{mapped.axis}', engine '{layout.engine}': pages of {per_page} indices and turns of "
            f"{chosen if chosen.period > mapped.owned.period else mapped.owned} are whole together only every {whole} coordinates, "
            f"more than {MAX_SIZE}; use an interleave that divides the page"
        )
    pages = local // per_page * (whole // indices)
    ring = mapped.ring_pages
    capacity = None if ring is None else ring * per_page // mapped.owned.run * mapped.owned.period
    return Span(whole, pages, ring, capacity)


def compile_routes(
    src: EngineLayout,
    dst: EngineLayout,
    ranks: Iterable[int] | None = None,
    *,
    cost: CostModel | None = None,
    way: Way | None = None,
) -> list[Route]:
    """One proved route for each rank of `dst`, or of `ranks`, in their order; one election serves all of them.

    Args:
        src: layout of the prefill engine.
        dst: layout of the decode engine.
        ranks: numbers of destination ranks; all of the layout if not given.
        cost: what copies cost, to choose between direct and staged; the defaults if not given.
        way: read everything directly, or through staging.

    Raises:
        LayoutMismatch: the engines cannot exchange caches, or there is no such rank.
        UsageError: something else than a layout was given.
    """
    if way not in (None, *get_args(Way)):
        raise UsageError(
            f"way is {way!r:.80}, and must be {' or '.join(map(repr, get_args(Way)))}, or None for what is faster"
        )
    if cost is not None:
        expect(cost, CostModel, "cost", "CostModel(), or what `kvreshard bench` measures")
    if ranks is not None:
        expect(ranks, Iterable, "the ranks", "a list of ranks of the decode engine")
        ranks = list(ranks)
        for number in ranks:
            expect_whole(number, "a rank")
    election = elect(src, dst, match_fields(src, dst).names)
    numbers = list(dst.rank_by_number if ranks is None else dict.fromkeys(ranks))
    return [compile_route(src, dst, number, election=election, cost=cost or CostModel(), way=way) for number in numbers]
