"""Names in words for bytes of a destination rank: the field, tokens and heads of a request that lie at a byte, or in a copy.

1. Find the pages that the bytes lie in, and the request and group whose block table has each page.
2. Of the group's shards, find those with cells at the bytes. An address map has no inverse: the cells of one page are listed once
   per geometry, and searched.
3. Compute the global coordinates from the logical page and the place inside it.

A byte in no request's page, or in no cell (padding), is named as that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreshard.model import AxisMap, EngineLayout, Rank, Shard
from kvreshard.model.tables import Request
from kvreshard.plan.explain import number_ranges

Int64s = NDArray[np.int64]


class Use(NamedTuple):
    """A page of a request: logical page `logical` of `group`."""

    request: int
    group: str
    logical: int


@dataclass(frozen=True, slots=True)
class Cells:
    """Some cells of one field in one page, as global coordinates: their count, the distinct ones per axis, those of the first and last cell."""

    count: int
    distinct: dict[str, Int64s]
    first: dict[str, int]
    last: dict[str, int]


def find_cell(layout: EngineLayout, requests: Sequence[Request], rank_number: int, region: str, offset: int) -> str:
    """The cell at byte `offset` of a region, in words: `field 'layers.5.attn.k', token 17, head 1, channel 0 of request 0`."""
    rank = layout.rank_by_number[rank_number]
    pages = list(_pages_at(layout, rank, region, offset, offset + 1))
    if not pages:
        return "a byte of no page"
    pool, page = pages[0]
    uses = find_uses(layout, requests, pool, page)
    for use in uses:
        for field, found in _cells(layout, rank, region, offset, offset + 1, page, use):
            cell = ", ".join(f"{axis} {value}" for axis, value in found.first.items())
            return f"field '{field}', {cell} of request {use.request}"
    if uses:
        return f"page {page} of request {uses[0].request}, group '{uses[0].group}', outside of every field (padding)"
    return f"page {page} of pool '{pool}', which belongs to no request of this run"


def name_copy(layout: EngineLayout, request: Request, rank: Rank, address: int, num_bytes: int) -> str:
    """The cells that a copy writes, in words: `layers.5.attn.k token 0-15, head 2`; axes that it writes whole are left out."""
    region = next(r for r in rank.regions if r.address <= address < r.address + r.size_bytes)
    start, stop = address - region.address, address - region.address + num_bytes
    cells: defaultdict[str, list[Cells]] = defaultdict(list)
    for pool, page in _pages_at(layout, rank, region.name, start, stop):
        for use in find_uses(layout, [request], pool, page):
            for field, found in _cells(layout, rank, region.name, start, stop, page, use):
                cells[field].append(found)
    return "; ".join(_name_cells(layout, field, found) for field, found in cells.items())


def _name_cells(layout: EngineLayout, field: str, found: Sequence[Cells]) -> str:
    """Cells of one field, one entry per page, in words."""
    distinct = {axis: np.unique(np.concatenate([part.distinct[axis] for part in found])) for axis in found[0].distinct}
    if prod(map(len, distinct.values())) != sum(
        part.count for part in found
    ):  # the end of one row, the beginning of the next
        first, last = (
            ", ".join(f"{axis} {value}" for axis, value in ends.items()) for ends in (found[0].first, found[-1].last)
        )
        return f"{field} from {first} to {last}"
    extents = {axis.name: axis.extent for axis in layout.field_by_name[field].axes}
    parts = [
        f"{axis} {number_ranges(values.tolist())}" for axis, values in distinct.items() if len(values) != extents[axis]
    ]
    return f"{field} {', '.join(parts)}".rstrip()


def _pages_at(layout: EngineLayout, rank: Rank, region: str, start: int, stop: int) -> Iterator[tuple[str, int]]:
    """Pool and number of every page that has some of bytes [start, stop) of a region."""
    num_pages = {group.pool: group.num_pages for group in layout.groups}
    for slab in rank.slabs:
        if slab.region == region:
            first = max(0, (start - slab.offset_bytes) // slab.page_stride_bytes)
            last = min(num_pages[slab.pool] - 1, (stop - 1 - slab.offset_bytes) // slab.page_stride_bytes)
            for page in range(first, last + 1):
                begins = slab.offset_bytes + page * slab.page_stride_bytes
                if begins < stop and start < begins + slab.page_bytes:
                    yield slab.pool, page


def find_uses(layout: EngineLayout, requests: Sequence[Request], pool: str, page: int) -> list[Use]:
    """The block tables of destination groups that a page is in."""
    found = []
    for number, request in enumerate(requests):
        for name, table in request.dst_tables.items():
            if layout.group_by_name[name].pool == pool:
                positions = np.flatnonzero(table.pages == page).tolist()
                found += [Use(number, name, table.first_page + position) for position in positions]
    return found


def _cells(
    layout: EngineLayout, rank: Rank, region: str, start: int, stop: int, page: int, use: Use
) -> Iterator[tuple[str, Cells]]:
    """Fields that have cells of this page at bytes [start, stop) of a region, with these cells."""
    for shard in rank.shards:
        stride = shard.geometry.page_stride_bytes
        begins = shard.offset_bytes + page * stride
        if shard.geometry.group == use.group and shard.region == region and begins < stop and start < begins + stride:
            element_bytes = layout.field_by_name[shard.field].element_bytes
            found = _coordinates(shard, start - begins - element_bytes + 1, stop - begins, use.logical)
            if found is not None:
                yield shard.field, found


def _coordinates(shard: Shard, first_offset: int, stop_offset: int, logical: int) -> Cells | None:
    """The cells that begin at bytes [first, stop) of their page; None if there are none."""
    offsets, _ = _page_cells(shard.geometry.axes)
    first, stop = np.searchsorted(offsets, [first_offset, stop_offset]).tolist()
    if first == stop:
        return None
    cells = Cells(stop - first, {}, {}, {})
    for mapped, (local, *ends) in zip(shard.geometry.axes, _page_part(shard.geometry.axes, first, stop), strict=True):
        is_sequence = mapped.num_held is None and mapped.ring_pages is None
        before = logical * mapped.indices_per_page if is_sequence else 0
        cells.distinct[mapped.axis] = mapped.owned.to_global(local + before)
        both = mapped.owned.to_global(np.array(ends, dtype=np.int64) + before).tolist()
        cells.first[mapped.axis], cells.last[mapped.axis] = both
    return cells


@lru_cache(maxsize=4096)
def _page_part(axes: tuple[AxisMap, ...], first: int, stop: int) -> tuple[tuple[Int64s, int, int], ...]:
    """Of cells [first, stop) of a page, per axis: the distinct local indices, and those of the first and the last."""
    parts = [index[first:stop] for index in _page_cells(axes)[1]]
    return tuple((np.unique(part), int(part[0]), int(part[-1])) for part in parts)


@lru_cache(maxsize=64)
def _page_cells(axes: tuple[AxisMap, ...]) -> tuple[Int64s, tuple[Int64s, ...]]:
    """Every cell of a page in order of address: its byte offset, and its local index on each axis."""
    offsets = np.zeros((), dtype=np.int64)
    for mapped in axes:
        count = mapped.indices_per_page if mapped.num_held is None else mapped.num_held
        offsets = offsets[..., None] + mapped.locate(np.arange(count, dtype=np.int64))[1]
    order = np.argsort(offsets, axis=None, kind="stable")
    return offsets.reshape(-1)[order], np.unravel_index(order, offsets.shape)
