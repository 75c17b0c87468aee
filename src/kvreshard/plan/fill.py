"""Finds the bytes of newly allocated destination pages that no copy writes.

They must be zeroed before the load is reported complete: an engine does not zero pages that a connector loads, and stale
bytes in overlaid pages are poison. The answer for one rank: the slabs of its new pages, less everything that the copies
to this rank write; never two regions at once, which may follow each other without a gap and be two allocations all the same.

`find_unwritten` is that definition, for copies that are listed. `find_holes` says the same of a request without listing millions of
them, for a route that is proved:

1. A page is whole if the intervals have all that any transfer could write of it. As every destination cell with a source is written exactly
   once, nothing but geometry says which bytes of a whole page are holes: they are the same in all whole pages of a group.
2. So of each group one whole page is looked at, and all that are not whole; its holes are then those of the others too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from msgspec.structs import replace

from kvreshard.model.errors import UsageError
from kvreshard.model.expect import expect, expect_whole
from kvreshard.model.layout import EngineLayout
from kvreshard.model.rank import Group, Rank
from kvreshard.model.tables import Request, page_ids
from kvreshard.plan.byte_ranges import ByteRanges, cut, merged, subtract
from kvreshard.plan.copies import CopyList, Int64s
from kvreshard.plan.pairs import GroupPair
from kvreshard.plan.request_check import check_group_names, checked_new_pages
from kvreshard.plan.route import Route


def find_unwritten(dst: EngineLayout, dst_rank: int, request: Request, copies: Iterable[CopyList]) -> ByteRanges:
    """Address ranges on `dst_rank` to zero, sorted, each in one region. `copies`: all copies to that rank for the request. Raises UsageError,
    and BindError for groups and new pages that there are not.
    """
    expect(dst, EngineLayout, "the destination's layout", "what `kvreshard.describe` returns")
    expect(request, Request, "a request", "Request(src_tables, dst_tables, intervals, dst_new_pages)")
    expect(copies, Iterable, "the copies", "what `kvreshard.bind` returns")
    expect_whole(dst_rank, "the destination rank")
    if dst_rank not in dst.rank_by_number:
        raise UsageError(f"engine '{dst.engine}' has no rank {dst_rank}; its ranks are {sorted(dst.rank_by_number)}")
    copies = list(copies)
    for copy in copies:
        expect(copy, CopyList, "a part of the copies", "what `kvreshard.bind` returns")
    check_group_names(dst.groups, request)
    return _unwritten(dst, dst_rank, {group.name: checked_new_pages(group, request) for group in dst.groups}, copies)


def _unwritten(dst: EngineLayout, dst_rank: int, pages_of: dict[str, Int64s], copies: Iterable[CopyList]) -> ByteRanges:
    """`find_unwritten` for these pages of each group."""
    rank = dst.rank_by_number[dst_rank]
    starts, stops = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for group in dst.groups:
        pages = pages_of[group.name]
        for first, page_bytes, stride in _slabs(rank, group) if len(pages) else ():
            starts.append(first + pages * stride)
            stops.append(first + pages * stride + page_bytes)
    new = merged(np.concatenate(starts), np.concatenate(stops))
    written = [copy for copy in copies if copy.dst_rank == dst_rank]
    if written:
        dst_address = np.concatenate([copy.dst_address for copy in written])
        new = subtract(new, merged(dst_address, dst_address + np.concatenate([copy.length for copy in written])))
    return cut(new, np.array(rank.addresses, dtype=np.int64))


def find_holes(dst: EngineLayout, route: Route, request: Request) -> ByteRanges:
    """`find_unwritten` of everything that the route copies for a checked request."""
    rank = dst.rank_by_number[route.dst_rank]
    pairs: defaultdict[str, list[GroupPair]] = defaultdict(list)
    for pair in route.pairs:
        if request.intervals[pair.dst.group.name]:
            pairs[pair.dst.group.name].append(pair)
    looked_at: dict[str, Int64s] = {}
    alike: list[tuple[Group, Int64s]] = []
    for group in dst.groups:
        looked_at[group.name] = pages = _new_pages(request, group)
        found = _whole_pages(pairs[group.name], request, group) if pairs[group.name] else pages[:0]
        whole = pages[np.isin(pages, found)]
        if len(whole) > 1:
            looked_at[group.name] = pages[~np.isin(pages, whole[1:])]
            alike.append((group, whole))
    copies = [
        copy for name, found in pairs.items() for pair in found for copy in _copies_to(looked_at[name], pair, request)
    ]
    holes = _unwritten(dst, route.dst_rank, looked_at, copies)
    starts, stops = [holes.start], [holes.stop]
    for group, whole in alike:
        for first, page_bytes, stride in _slabs(rank, group):
            low = first + int(whole[0]) * stride
            inside = _within(holes, low, low + page_bytes)
            others = (first + whole[1:] * stride)[:, None]
            starts.append((others + (inside.start - low)).reshape(-1))
            stops.append((others + (inside.stop - low)).reshape(-1))
    return cut(merged(np.concatenate(starts), np.concatenate(stops)), np.array(rank.addresses, dtype=np.int64))


def _whole_pages(pairs: Iterable[GroupPair], request: Request, group: Group) -> Int64s:
    """Pages of a group of which every pair moves all that it ever could; none where tables are rings or states."""
    table = request.dst_tables[group.name]
    is_whole = np.ones(len(table.pages), dtype=bool)
    for pair in pairs:
        moved, span = np.zeros(len(table.pages), dtype=bool), pair.dst.span
        if pair.sequence is not None and span.ring_pages is None:
            for start, stop in pair.sequence.index_ranges(request.intervals[group.name]):
                low, high = -(-start // span.indices) * span.pages, stop // span.indices * span.pages
                moved[max(0, low - table.first_page) : max(0, high - table.first_page)] = True
        is_whole &= moved
    return table.pages[is_whole]


def _copies_to(pages: Int64s, pair: GroupPair, request: Request) -> Iterator[CopyList]:
    """The copies of a pair into some of its destination pages."""
    for bound in pair.copies(pair.page_ranges(request), pair.transfers):
        wanted = np.isin(bound.dst_page, pages)
        if wanted.any():
            yield replace(bound, src_page=bound.src_page[wanted], dst_page=bound.dst_page[wanted]).flat()


def _new_pages(request: Request, group: Group) -> Int64s:
    return page_ids(request.dst_new_pages.get(group.name, ()), f"group '{group.name}': new pages")


def _slabs(rank: Rank, group: Group) -> Iterator[tuple[int, int, int]]:
    """Address of page 0, bytes of a page and stride between pages, of every slab that the group's pages have."""
    for slab in rank.slabs:
        if slab.pool == group.pool:
            address = rank.region_by_name[slab.region].address + slab.offset_bytes
            yield address, slab.page_bytes, slab.page_stride_bytes


def _within(ranges: ByteRanges, low: int, high: int) -> ByteRanges:
    """The part of sorted ranges that lies in `[low, high)`."""
    first, last = np.searchsorted(ranges.stop, low, side="right"), np.searchsorted(ranges.start, high, side="left")
    return ByteRanges(np.maximum(ranges.start[first:last], low), np.minimum(ranges.stop[first:last], high))
