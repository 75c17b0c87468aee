"""Which cell of which request lies at a byte of a destination rank?

For the report of a failed verification: a person needs a field and a token, not an offset.

1. Find the page whose slab holds the byte, and the request and group whose block table has the page.
2. Of the group's shards, find the one with a cell at the byte: every cell of one page is listed, there is no inverse of a map.
3. From the logical page and the place inside it follow the global coordinates.

A byte of no request's page, or of no cell (padding), is named as what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.model import AxisMap, EngineLayout, Rank, Shard
from kvreshard.model.tables import Request

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Use:
    """A page of a request: logical page `logical` of `group`."""

    request: int
    group: str
    logical: int


def find_cell(layout: EngineLayout, requests: Sequence[Request], rank_number: int, region: str, offset: int) -> str:
    """What lies at byte `offset` of a region, in words: `field 'layers.5.attn.k', token 17, head 1, channel 0 of request 0`."""
    rank = layout.rank_by_number[rank_number]
    page, pool = _page_at(layout, rank, region, offset)
    if page is None:
        return "a byte of no page"
    uses = _uses(layout, requests, pool, page)
    if not uses:
        return f"page {page} of pool '{pool}', which belongs to no request of this run"
    for use in uses:
        for shard in rank.shards:
            if shard.geometry.group == use.group and shard.region == region:
                inside = offset - shard.offset_bytes - page * shard.geometry.page_stride_bytes
                coordinates = _coordinates(shard, inside, use.logical, layout.field_by_name[shard.field].element_bytes)
                if coordinates is not None:
                    told = ", ".join(f"{name} {value}" for name, value in coordinates.items())
                    return f"field '{shard.field}', {told} of request {use.request}"
    return f"page {page} of request {uses[0].request}, group '{uses[0].group}', outside of every field (padding)"


def _page_at(layout: EngineLayout, rank: Rank, region: str, offset: int) -> tuple[int | None, str]:
    num_pages = {group.pool: group.num_pages for group in layout.groups}
    for slab in rank.slabs:
        page, inside = divmod(offset - slab.offset_bytes, slab.page_stride_bytes)
        if slab.region == region and 0 <= page < num_pages[slab.pool] and inside < slab.page_bytes:
            return page, slab.pool
    return None, ""


def _uses(layout: EngineLayout, requests: Sequence[Request], pool: str, page: int) -> list[_Use]:
    found = []
    for number, request in enumerate(requests):
        for name, table in request.dst_tables.items():
            if layout.group_by_name[name].pool == pool:
                positions = np.flatnonzero(table.pages == page).tolist()
                found += [_Use(number, name, table.first_page + position) for position in positions]
    return found


def _coordinates(shard: Shard, inside: int, logical: int, element_bytes: int) -> dict[str, int] | None:
    """Global coordinates of the cell that has byte `inside` of its page; None if there is none."""
    offsets = np.zeros((), dtype=np.int64)
    places = [_page_offsets(mapped) for mapped in shard.geometry.axes]
    for along in places:
        offsets = offsets[..., None] + along
    hits = np.argwhere((offsets <= inside) & (inside < offsets + element_bytes))
    if not len(hits):
        return None
    found = {}
    for mapped, index in zip(shard.geometry.axes, hits[0].tolist(), strict=True):
        is_sequence = mapped.num_held is None and mapped.ring_pages is None
        local = index + logical * mapped.indices_per_page if is_sequence else index
        found[mapped.axis] = int(mapped.owned.to_global(np.array([local], dtype=np.int64))[0])
    return found


def _page_offsets(mapped: AxisMap) -> Int64s:
    """Byte offsets of the local indices of one page, in order."""
    count = mapped.indices_per_page if mapped.num_held is None else mapped.num_held
    return mapped.locate(np.arange(count, dtype=np.int64))[1]
