"""Is a route right, whoever made it?

The proof looks at the finished route and at both layouts, not at how the route was made:

1. Each lane says of every field what the layouts say: encoding, element size, axis maps, page strides, addresses.
2. Bounds: from base address to the last cell of the last page lies inside one region on each side.
3. Exact cover, per field that the destination rank holds: each box lies inside what its source rank holds, no two boxes
   share a cell, and together they have as many cells as the destination's shard.

Raises LayoutMismatch with all findings (the first few in full), each naming field, axis and both values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from itertools import combinations
from math import prod

import numpy as np

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.field import Axis, Field
from kvreshard.model.layout import MAX_ADDRESS, EngineLayout, Geometry, Rank, Shard
from kvreshard.model.ownership import Ownership
from kvreshard.plan.alike import Seen, shape_of
from kvreshard.plan.cover import count_common, exact_period, overlaps
from kvreshard.plan.lane import Lane
from kvreshard.plan.match import SHOWN
from kvreshard.plan.route import Route

# Of one field. More are first looked at together: which of them have cells in common at all.
FEW_LANES = 4


def prove(route: Route, src: EngineLayout, dst: EngineLayout) -> None:
    """Raises LayoutMismatch unless the route is an exact, in-bounds cover of its destination rank."""
    findings = list(find_faults(route, src, dst))
    if findings:
        more = f" (and {len(findings) - SHOWN} more)" if len(findings) > SHOWN else ""
        raise LayoutMismatch(
            f"route from engine '{src.engine}' to rank {route.dst_rank} of engine '{dst.engine}' is not provable: "
            + "; ".join(findings[:SHOWN])
            + more
        )


def find_faults(route: Route, src: EngineLayout, dst: EngineLayout) -> Iterator[str]:
    """Everything that is wrong with a route, as sentences; nothing for a right one."""
    rank = dst.rank_by_number[route.dst_rank]
    seen = Seen(src, dst)
    drawn: defaultdict[str, list[int]] = defaultdict(list)
    for position, lane in enumerate(route.lanes):
        if lane.dst_rank != rank.rank:
            yield f"fields {', '.join(lane.fields)}: a lane to rank {lane.dst_rank} in the route of rank {rank.rank}"
        yield from seen.differences(lane.fields)
        yield from _lane_faults(lane, src.rank_by_number[lane.src_rank], src, "source", seen)
        yield from _lane_faults(lane, rank, dst, "destination", seen)
        for name in seen.drawn(lane):
            drawn[name].append(position)
    # Fields of one geometry that are in the same lanes are covered alike.
    covered: set[tuple[int, tuple[int, ...]]] = set()
    for place in rank.template.shards:
        kind = place.geometry, tuple(drawn[place.field])
        if kind not in covered and place.field in src.kind_of:
            covered.add(kind)
            lanes = [route.lanes[position] for position in kind[1]]
            yield from _cover_faults(place.field, rank.geometries[place.geometry], lanes, rank, dst)


def _lane_faults(lane: Lane, rank: Rank, layout: EngineLayout, side: str, seen: Seen) -> Iterator[str]:
    """One side of a lane. What its fields share, they share by geometry and axes: that is looked at once for each."""
    bases = lane.bases.src if side == "source" else lane.bases.dst
    names = lane.fields
    named = seen.named(names, rank, layout)
    yield from (f"field '{name}', {side} rank {rank.rank}: does not hold the field" for name in named.lacking)
    reach = 0  # of the longest kind; kinds that differ in it differ from the lane too, which is a fault of theirs
    for geometry, field in named.kinds:
        behind = yield from _geometry_faults(lane, field, geometry, rank, layout, side)
        reach = max(reach, min(behind, MAX_ADDRESS - 1))
    if len(bases) != len(names):
        yield f"field '{names[0]}', {side} rank {rank.rank}: a lane with {len(bases)} addresses for {len(names)} fields"
    if not len(bases) == len(named.held) == len(names):
        return
    for index in np.flatnonzero((bases != named.bases) | (named.room_bytes < reach)).tolist():
        yield from _place_faults(rank.shard_by_field[named.held[index]], int(bases[index]), reach, rank, side)


def _geometry_faults(
    lane: Lane, field: Field, geometry: Geometry, rank: Rank, layout: EngineLayout, side: str
) -> Generator[str, None, int]:
    """What a lane says of a field's geometry; returns the bytes from its first cell to behind the pool's last one."""
    source = side == "source"
    who = f"field '{field.name}', {side} rank {rank.rank}"
    if field.element_bytes != lane.element_bytes:
        yield f"{who}: elements of {lane.element_bytes} bytes, its layout says {field.element_bytes}"
    maps = tuple(axis.src if source else axis.dst for axis in lane.axes)
    for mapped, told in zip(maps, geometry.axes, strict=False):
        if mapped != told:
            yield f"{who}, axis '{told.axis}': the lane maps {mapped}, its layout says {told}"
    if len(maps) != len(geometry.axes):
        yield f"{who}: {len(maps)} axes, its layout has {len(geometry.axes)}"
    if [(axis.name, axis.extent) for axis in lane.axes] != shape_of(field):
        yield f"{who}: axes {[(a.name, a.extent) for a in lane.axes]}, its layout has {shape_of(field)}"
    if field.sequence is not None:
        yield from _sequence_faults(lane, field.sequence, who, source)
    stride = lane.src_page_stride_bytes if source else lane.dst_page_stride_bytes
    if stride != geometry.page_stride_bytes:
        yield f"{who}: pages every {stride} bytes, its layout says {geometry.page_stride_bytes}"
    group = lane.src_group if source else lane.dst_group
    if group != layout.group_by_name[geometry.group]:
        yield f"{who}: block table of group '{group.name}', its layout says '{geometry.group}'"
    inside = sum([mapped.last_byte_offset for mapped in geometry.axes])
    return (group.num_pages - 1) * stride + inside + lane.element_bytes


def _place_faults(shard: Shard, base: int, reach: int, rank: Rank, side: str) -> Iterator[str]:
    """Where one field begins, and whether all of its pages lie in its region."""
    region = rank.region_by_name[shard.region]
    if base != region.address + shard.offset_bytes:
        yield (
            f"field '{shard.field}', {side} rank {rank.rank}: first cell at address {base}, its layout says "
            f"{region.address + shard.offset_bytes}"
        )
    if base < region.address or base + reach > region.address + region.size_bytes:
        yield (
            f"field '{shard.field}', {side} rank {rank.rank}: addresses [{base}, {base + reach}) are out of bounds of "
            f"region '{region.name}' [{region.address}, {region.address + region.size_bytes})"
        )


def _sequence_faults(lane: Lane, sequence: Axis, who: str, source: bool) -> Iterator[str]:
    """How the lane counts tokens, and the spans in which bind cuts them."""
    if (lane.tokens_per_index, lane.keep_partial) != (sequence.tokens_per_index, sequence.keep_partial):
        yield (
            f"{who}, axis '{sequence.name}': {lane.tokens_per_index} tokens per index (partial ones "
            f"{'kept' if lane.keep_partial else 'left'}), its layout says {sequence.tokens_per_index} "
            f"({'kept' if sequence.keep_partial else 'left'})"
        )
    for axis in lane.axes:
        if axis.name != sequence.name:
            continue
        mapped, span = (axis.src, lane.src_span) if source else (axis.dst, lane.dst_span)
        held = span.pages * mapped.indices_per_page
        whole = span.indices * mapped.owned.run == held * mapped.owned.period and not held % mapped.owned.run
        if not whole or (source and span.indices % axis.chosen.period) or span.ring_pages != mapped.ring_pages:
            yield (
                f"{who}, axis '{sequence.name}': a span of {span.indices} indices in {span.pages} pages (ring of "
                f"{span.ring_pages}) is not whole pages and periods of {mapped.owned} in pages of {mapped.indices_per_page} "
                f"(ring of {mapped.ring_pages})"
            )


def _cover_faults(name: str, geometry: Geometry, lanes: list[Lane], rank: Rank, dst: EngineLayout) -> Iterator[str]:
    field = dst.field_by_name[name]
    held = {mapped.axis: mapped.owned for mapped in geometry.axes}
    for lane in lanes:
        for axis in lane.axes:
            both = (axis.chosen, axis.src.owned)
            whole = _count(axis.extent, exact_period(axis.extent, both), axis.chosen)
            if whole != count_common(axis.extent, *both):
                yield (
                    f"field '{name}', axis '{axis.name}': {axis.chosen} is read from rank {lane.src_rank}, "
                    f"which holds only {axis.src.owned}"
                )
    for first, second in _overlapping(lanes):
        pairs = zip(first.axes, second.axes, strict=True)
        if all(count_common(a.extent, a.chosen, b.chosen, a.dst.owned) for a, b in pairs):
            axes = ", ".join(
                f"{a.name} {a.chosen} and {b.chosen}" for a, b in zip(first.axes, second.axes, strict=True)
            )
            yield (
                f"field '{name}': ranks {first.src_rank} and {second.src_rank} both write the same cells "
                f"(overlap: {axes})"
            )
    periods_of = {
        axis.name: exact_period(
            axis.extent,
            [held[axis.name], *(a.chosen for lane in lanes for a in lane.axes if a.name == axis.name)],
        )
        for axis in field.axes
    }
    wanted = prod(_count(axis.extent, periods_of[axis.name], held[axis.name]) for axis in field.axes)
    written = sum(
        prod(_count(axis.extent, periods_of[axis.name], axis.chosen, axis.dst.owned) for axis in lane.axes)
        for lane in lanes
    )
    if written < wanted:
        parts = "; ".join(
            f"rank {lane.src_rank} gives {', '.join(f'{a.name} {a.chosen}' for a in lane.axes)}" for lane in lanes
        )
        yield (
            f"field '{name}': a hole, {wanted - written} of {wanted} cells (per period) of rank {rank.rank} have no "
            f"source; it holds {', '.join(f'{n} {o}' for n, o in held.items())}, and {parts or 'nobody gives anything'}"
        )


def _overlapping(lanes: Sequence[Lane]) -> Iterator[tuple[Lane, Lane]]:
    """Pairs of lanes of one field whose elected boxes have cells in common, whatever the destination holds of them."""
    if len(lanes) <= FEW_LANES:
        yield from combinations(lanes, 2)  # to look at a pair costs less than to find out whether it must be
        return
    pairs = np.tri(len(lanes), k=-1, dtype=bool).T
    for along in zip(*(lane.axes for lane in lanes), strict=True):
        number = {owned: index for index, owned in enumerate(dict.fromkeys(axis.chosen for axis in along))}
        which = np.array([number[axis.chosen] for axis in along])
        pairs &= overlaps(along[0].extent, list(number))[which][:, which]
    for first, second in np.argwhere(pairs).tolist():
        yield lanes[first], lanes[second]


def _count(extent: int | None, period: int, *owners: Ownership) -> int:
    """Cells of one common period, scaled from the owners' own period."""
    own = exact_period(extent, owners)
    return count_common(extent, *owners) * (period // own)
