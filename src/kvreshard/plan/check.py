"""Proof that a route is right, whoever made it.

It looks at the finished route and at both layouts. With the election it shares what an ownership is (`cover.turn`), and nothing else:

1. Each transfer says of every field what the layouts say: encoding, element size, axis maps, page strides, addresses.
2. Bounds: from base address to the last cell of the last page lies inside one region on each side.
3. Exact cover, per field that the destination rank holds: each box lies inside what its source rank holds, no two boxes share a cell,
   and together they have as many cells as the destination's shard.

Raises LayoutMismatch with all findings (the first few in full), each naming field, axis and both values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from fractions import Fraction
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import LayoutMismatch
from kvreshard.model.field import Axis, Field
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.model.rank import MAX_ADDRESS, Geometry, Int64s, Rank
from kvreshard.plan.cover import count_common, exact_period, turn
from kvreshard.plan.match import SHOWN, differences
from kvreshard.plan.route import Route
from kvreshard.plan.transfer import RankTransfer, Span, TransferAxis


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
    transfers_of: dict[str, tuple[int, ...]] = dict.fromkeys(rank.shard_number, ())
    for number, transfer in enumerate(route.transfers):
        if transfer.dst_rank != rank.rank:
            yield f"fields {', '.join(transfer.fields)}: a transfer to rank {transfer.dst_rank} in the route of rank {rank.rank}"
        yield from _transfer_faults(transfer, src.rank_by_number[transfer.src_rank], src, "source")
        yield from _transfer_faults(transfer, rank, dst, "destination")
        for name in transfer.fields:
            transfers_of[name] = (*transfers_of.get(name, ()), number)
    # Fields of one form and geometry that the same transfers have are covered alike: one of them is looked at.
    alike = defaultdict[tuple[tuple[int, ...], int | None, int, int], list[str]](list)
    for shard in rank.template.shards:
        name = shard.field
        alike[transfers_of[name], src.kind_of.get(name), dst.kind_of[name], shard.geometry].append(name)
    for (numbers, src_form, _, geometry), names in alike.items():
        if src_form is None:
            continue
        field = dst.field_by_name[names[0]]
        for difference in differences(src.engine, src.field_by_name[names[0]], dst.engine, field):
            yield from (f"field '{name}'{difference}" for name in names)
        transfers = [route.transfers[number] for number in numbers]
        fitting = [transfer for transfer in transfers if _axes_of(transfer) == field.axes]
        yield from _cover_faults(field, rank.geometries[geometry], fitting, rank)


def _axes_of(transfer: RankTransfer) -> tuple[Axis, ...]:
    return tuple(along.axis for along in transfer.axes)


def _transfer_faults(transfer: RankTransfer, rank: Rank, layout: EngineLayout, side: str) -> Iterator[str]:
    """One side of a transfer, field by field; a form and geometry is looked at once."""
    bases = transfer.bases.src if side == "source" else transfer.bases.dst
    if len(bases) != len(transfer.fields):
        yield f"field '{transfer.fields[0]}', {side} rank {rank.rank}: {len(bases)} addresses for {len(transfer.fields)} fields"
        return
    numbers = [rank.shard_number.get(name, -1) for name in transfer.fields]
    kinds: dict[tuple[int, int], list[int]] = {}
    shards, kind_of = rank.template.shards, layout.kind_of
    for index, (name, number) in enumerate(zip(transfer.fields, numbers, strict=True)):
        if number < 0:
            yield f"field '{name}', {side} rank {rank.rank}: does not hold the field"
        else:
            kinds.setdefault((kind_of[name], shards[number].geometry), []).append(index)
    for (_, geometry), members in kinds.items():
        field = layout.field_by_name[transfer.fields[members[0]]]
        reach = yield from _geometry_faults(transfer, field, rank.geometries[geometry], rank, layout, side)
        yield from _place_faults(transfer.fields, bases, np.array(members), np.array(numbers), reach, rank, side)


def _place_faults(
    fields: Sequence[str], bases: Int64s, members: Int64s, numbers: Int64s, reach: int, rank: Rank, side: str
) -> Iterator[str]:
    """Where the fields `members`, of one geometry, begin, and whether all of their pages lie in their regions."""
    bases, numbers = bases[members], numbers[members]
    addresses, regions = rank.shard_addresses[numbers], rank.shard_regions[numbers]
    start, size = rank.region_starts[regions], rank.region_sizes[regions]
    is_out = (bases < start) | (bases - start > size - min(reach, MAX_ADDRESS - 1))
    for index in np.flatnonzero((bases != addresses) | is_out).tolist():
        base, who = int(bases[index]), f"field '{fields[members[index]]}', {side} rank {rank.rank}"
        if base != addresses[index]:
            yield f"{who}: first cell at address {base}, its layout says {addresses[index]}"
        if is_out[index]:
            yield (
                f"{who}: addresses [{base}, {base + reach}) are out of bounds of region '{rank.template.regions[regions[index]]}' "
                f"[{start[index]}, {start[index] + size[index]})"
            )


def _geometry_faults(
    transfer: RankTransfer, field: Field, geometry: Geometry, rank: Rank, layout: EngineLayout, side: str
) -> Generator[str, None, int]:
    """What a transfer says of a field's geometry; returns the bytes from its first cell to behind the pool's last one."""
    source, who = side == "source", f"field '{field.name}', {side} rank {rank.rank}"
    if field.element_bytes != transfer.element_bytes:
        yield f"{who}: elements of {transfer.element_bytes} bytes, its layout says {field.element_bytes}"
    maps = tuple(axis.src if source else axis.dst for axis in transfer.axes)
    for mapped, expected in zip(maps, geometry.axes, strict=False):
        if mapped != expected:
            yield f"{who}, axis '{expected.axis}': the transfer maps {mapped}, its layout says {expected}"
    if len(maps) != len(geometry.axes):
        yield f"{who}: {len(maps)} axes, its layout has {len(geometry.axes)}"
    if _axes_of(transfer) != field.axes:
        said, held = (", ".join(map(str, axes)) for axes in (_axes_of(transfer), field.axes))
        yield f"{who}: axes {said}; its layout has {held}"
    span = transfer.src_span if source else transfer.dst_span
    for along in transfer.axes:
        if along.extent is None:
            yield from _span_faults(span, along, who, source)
    if transfer.is_state and (span.indices, span.pages, span.ring_pages, span.capacity) != (1, 1, 1, None):
        yield f"{who}: a state is one page, but the transfer cuts it by {span}"
    stride = transfer.src_page_stride_bytes if source else transfer.dst_page_stride_bytes
    if stride != geometry.page_stride_bytes:
        yield f"{who}: pages every {stride} bytes, its layout says {geometry.page_stride_bytes}"
    group = transfer.src_group if source else transfer.dst_group
    if group != layout.group_by_name[geometry.group]:
        yield f"{who}: block table of group '{group.name}', its layout says '{geometry.group}'"
    inside = sum([mapped.last_byte_offset for mapped in geometry.axes])
    return (group.num_pages - 1) * stride + inside + transfer.element_bytes


def _span_faults(span: Span, along: TransferAxis, who: str, source: bool) -> Iterator[str]:
    """The span in which bind cuts the sequence on one side."""
    mapped = along.src if source else along.dst
    held = span.pages * mapped.indices_per_page
    whole = span.indices * mapped.owned.run == held * mapped.owned.period and not held % mapped.owned.run
    if not whole or (source and span.indices % along.chosen.period) or span.ring_pages != mapped.ring_pages:
        yield (
            f"{who}, axis '{along.name}': a span of {span.indices} indices in {span.pages} pages (ring of "
            f"{span.ring_pages}) is not whole pages and periods of {mapped.owned} in pages of {mapped.indices_per_page} "
            f"(ring of {mapped.ring_pages})"
        )
    ring, per_page, owned = mapped.ring_pages, mapped.indices_per_page, mapped.owned
    capacity = None if ring is None else ring * per_page // owned.run * owned.period
    if span.capacity != capacity:
        yield f"{who}, axis '{along.name}': a ring that has room for {span.capacity} indices, its layout has room for {capacity}"


def _cover_faults(field: Field, geometry: Geometry, transfers: Sequence[RankTransfer], rank: Rank) -> Iterator[str]:
    """Whether the boxes of a field lie in what their sources hold, share no cell, and are together what the rank holds of it."""
    held = [(axis, mapped.owned) for axis, mapped in zip(field.axes, geometry.axes, strict=True)]
    periods = [
        exact_period(
            axis.extent,
            (owned, *(o for t in transfers for o in (t.axes[i].chosen, t.axes[i].src.owned, t.axes[i].dst.owned))),
        )
        for i, (axis, owned) in enumerate(held)
    ]
    for transfer in transfers:
        for axis, period in zip(transfer.axes, periods, strict=True):
            if not _lies_on(axis.extent, axis.chosen):
                yield f"field '{field.name}', axis '{axis.name}': {axis.chosen} is no part of an axis {_end(axis.extent)}"
            elif _count(axis.extent, period, axis.chosen, axis.src.owned) != _count(
                axis.extent, period, axis.chosen, axis.chosen
            ):
                yield (
                    f"field '{field.name}', axis '{axis.name}': {axis.chosen} is read from rank {transfer.src_rank}, "
                    f"which holds only {axis.src.owned}"
                )
    for first, second in _overlapping(transfers):
        axes = ", ".join(f"{a.name} {a.chosen} and {b.chosen}" for a, b in zip(first.axes, second.axes, strict=True))
        yield f"field '{field.name}': ranks {first.src_rank} and {second.src_rank} both write the same cells (overlap: {axes})"
    wanted = prod(
        [_count(axis.extent, period, owned, owned) for (axis, owned), period in zip(held, periods, strict=True)]
    )
    written = sum(
        [
            prod(
                [
                    _count(a.extent, period, a.chosen, a.dst.owned)
                    for a, period in zip(transfer.axes, periods, strict=True)
                ]
            )
            for transfer in transfers
        ]
    )
    if written < wanted:
        given = [
            f"rank {transfer.src_rank} gives {', '.join(f'{a.name} {a.chosen}' for a in transfer.axes)}"
            for transfer in transfers
        ]
        yield (
            f"field '{field.name}': a hole, {1 - Fraction(written, wanted)} of the cells of rank {rank.rank} have no source; it holds "
            f"{', '.join(f'{axis.name} {owned}' for axis, owned in held)}, and {'; '.join(given) or 'nobody gives anything'}"
        )


def _lies_on(extent: int | None, owned: Ownership) -> bool:
    """Whether an ownership is one of an axis: an interval before its end; of a sequence, turns or all of it."""
    if extent is None:
        return isinstance(owned, Cyclic) or owned == Interval(0, None)
    return isinstance(owned, Interval) and owned.stop is not None and owned.stop <= extent


def _end(extent: int | None) -> str:
    return "without end" if extent is None else f"of {extent}"


def _count(extent: int | None, period: int, first: Ownership, second: Ownership) -> int:
    """How many of `period` coordinates both hold; it is a multiple of their `exact_period`."""
    return count_common(extent, first, second) * (period // exact_period(extent, (first, second)))


def _overlapping(transfers: Sequence[RankTransfer]) -> Iterator[tuple[RankTransfer, RankTransfer]]:
    """Pairs of transfers of one field whose boxes have cells in common: coordinates along every axis."""
    both = ~np.tri(len(transfers), dtype=bool)
    for along in zip(*(transfer.axes for transfer in transfers), strict=True):
        if not both.any():
            return
        both &= overlap_table(along[0].extent, [axis.chosen for axis in along])
    for first, second in np.argwhere(both).tolist():
        yield transfers[first], transfers[second]


def overlap_table(extent: int | None, owners: Sequence[Ownership]) -> NDArray[np.bool_]:
    """Which of some ownerships have coordinates in common, shape (n, n)."""
    turns = np.array([turn(extent, owned) for owned in owners], dtype=np.int64)
    start, size, period = turns.T[:, :, None]
    # Of two turns the phases agree again and again, modulo the greatest divisor that their periods share.
    shared = np.gcd(period, period.T)
    ahead = (start.T - start) % shared
    found: NDArray[np.bool_] = (ahead < size) | (ahead + size.T > shared)
    return found
