"""Checks that a request can be bound to a route.

All of it is checked before the first address is computed, so that a bad request moves nothing:

1. Every group that the route writes has intervals and block tables on both sides.
2. Tokens lie below what each side holds; a state is one page, absorbed to the same token on both sides; the live tokens
   of a ring fit its capacity.
3. Every page that an interval touches is in the table, inside its pool, and not the null page.
4. No page id of a destination pool is written or called new twice, not even by two groups that overlay each other; what is
   called new is in the block table, since it will be zeroed.

Raises BindError naming group, page or token, both values and the remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from kvreshard.model.errors import BindError
from kvreshard.model.expect import expect
from kvreshard.model.field import Axis
from kvreshard.model.ownership import Ownership
from kvreshard.model.rank import Group
from kvreshard.model.tables import PageTable, Request, Tokens, page_ids
from kvreshard.plan.copies import Int64s, joined
from kvreshard.plan.pairs import GroupPair, Side
from kvreshard.plan.route import Route

_NO_PAGES = np.zeros(0, dtype=np.int64)


UsedEntries = dict[str, tuple[Group, Int64s, set[tuple[int, int]]]]
"""By group: its block table, and the ranges of its entries that are read or written; they may overlap."""

UsedIds = list[tuple[Group, Int64s]]
"""Of groups of one pool: the page ids that are read or written, at least one each."""


def check_request(route: Route, request: Request) -> None:
    """Raises BindError unless every transfer of the route can be bound."""
    expect(route, Route, "a route", "what `kvreshard.compile_routes` returns for one rank")
    expect(request, Request, "a request", "Request(src_tables, dst_tables, intervals, dst_new_pages)")
    check_group_names(route.dst_groups, request)
    src_used: UsedEntries = {}
    dst_used: UsedEntries = {}
    for pair in route.pairs:
        name = pair.dst.group.name
        if name not in request.intervals:
            raise BindError(f"group '{name}': no token intervals; give an empty list to move nothing")
        intervals = request.intervals[name]
        if not intervals:
            continue
        src = _table(request.src_tables, pair.src.group, "source")
        dst = _table(request.dst_tables, pair.dst.group, "destination")
        if pair.is_state:
            _check_state(pair, src, dst)
        for side, table, used in ((pair.src, src, src_used), (pair.dst, dst, dst_used)):
            *_, ranges = used.setdefault(side.group.name, (side.group, table.pages, set()))
            if side.owned is None or pair.sequence is None:
                ranges.add((0, len(table.pages)))
                continue
            _check_tokens(side, table, intervals)
            for interval in intervals:
                ranges.add(_entries(pair.sequence, side, side.owned, table, interval))
    for found in _by_pool(src_used).values():
        _check_inside(found, "source")
    written = _by_pool(dst_used)
    for found in written.values():
        _check_inside(found, "destination")
        _check_once(found)
    if request.dst_new_pages:
        _check_new_pages(route, written, request)


def check_group_names(groups: Sequence[Group], request: Request) -> None:
    """Raises BindError for intervals and new pages of groups that are none of the destination's."""
    known = [group.name for group in groups]
    for what, names in (("token intervals", request.intervals), ("new pages", request.dst_new_pages)):
        for name in names:
            if name not in known:
                raise BindError(
                    f"group '{name}': the request has {what} for it, but the destination's groups are {', '.join(known)}"
                )


def _table(tables: Mapping[str, PageTable], group: Group, side: str) -> PageTable:
    table = tables.get(group.name)
    if table is None:
        known = ", ".join(map(repr, tables)) or "none"
        raise BindError(f"group '{group.name}': the {side} gives no block table; those that it gives are: {known}")
    return table


def _check_state(pair: GroupPair, src: PageTable, dst: PageTable) -> None:
    for side, table in ((pair.src, src), (pair.dst, dst)):
        if len(table.pages) != 1:
            raise BindError(
                f"group '{side.group.name}': the {side.name} gives {len(table.pages)} pages for a state; give the one page of the "
                "running state"
            )
    if src.num_tokens != dst.num_tokens:
        raise BindError(
            f"group '{pair.dst.group.name}': the source's state has absorbed {src.num_tokens} tokens, the destination "
            f"resumes at {dst.num_tokens}: both must agree, stop the prefill at the token where the decode resumes"
        )


def _check_tokens(side: Side, table: PageTable, intervals: Sequence[Tokens]) -> None:
    stop = intervals[-1][1]
    if stop > table.num_tokens:
        raise BindError(
            f"group '{side.group.name}': tokens up to {stop} are to be moved, but the {side.name}'s pages hold {table.num_tokens}"
        )


def _entries(sequence: Axis, side: Side, owned: Ownership, table: PageTable, interval: Tokens) -> tuple[int, int]:
    """The entries `[start, stop)` of the table that an interval touches on one side; whether the pages exist is not checked yet."""
    group, span = side.group, side.span
    start, stop = sequence.indices_of(*interval)
    first, last = owned.count_below(start), owned.count_below(stop) - 1
    if last < first:
        return 0, 0
    if span.ring_pages is not None and span.capacity is not None:
        _, absorbed = sequence.indices_of(0, table.num_tokens)
        if absorbed - start > span.capacity:
            raise BindError(
                f"group '{group.name}': tokens from {interval[0]} of {table.num_tokens} are to be moved, but the {side.name}'s "
                f"ring keeps only the last {span.capacity * sequence.tokens_per_index}; move a shorter tail"
            )
        if len(table.pages) < span.ring_pages:
            raise BindError(
                f"group '{group.name}': the {side.name} gives {len(table.pages)} pages for a ring of {span.ring_pages}"
            )
        return 0, span.ring_pages
    low, high = first // side.indices_per_page, last // side.indices_per_page + 1
    if low < table.first_page or high > table.first_page + len(table.pages):
        raise BindError(
            f"group '{group.name}': tokens [{interval[0]}, {interval[1]}) need the {side.name}'s pages [{low}, {high}), but "
            f"its block table has pages [{table.first_page}, {table.first_page + len(table.pages)})"
        )
    return low - table.first_page, high - table.first_page


def _by_pool(used: UsedEntries) -> Mapping[str, UsedIds]:
    pools: defaultdict[str, UsedIds] = defaultdict(list)
    for group, table, ranges in used.values():
        end = 0
        for start, stop in sorted(ranges):
            if stop > end:  # each entry once
                pools[group.pool].append((group, table[max(start, end) : stop]))
                end = stop
    return pools


def _check_inside(found: UsedIds, side: str) -> None:
    """Every id inside the pool, and none the null page."""
    ids, num_pages = joined([pages for _, pages in found]), found[0][0].num_pages
    low, high = int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
    if low < 0 or high >= num_pages:
        for group, pages in found:
            wrong = pages[(pages < 0) | (pages >= num_pages)]
            if len(wrong):
                raise BindError(
                    f"group '{group.name}': the {side}'s block table names page {wrong[0]}, but its pool '{group.pool}' has pages "
                    f"[0, {num_pages})"
                )
    for group, pages in found:
        null = group.null_page
        if null is not None and low <= null <= high and (pages == null).any():
            raise BindError(
                f"group '{group.name}': the {side}'s block table has the null page {null} inside the tokens to "
                "be moved; move only tokens whose pages exist"
            )


def _check_new_pages(route: Route, written: Mapping[str, UsedIds], request: Request) -> None:
    """No page of a pool is called new by one group and written or called new by another."""
    for pool in dict.fromkeys(group.pool for group in route.dst_groups):
        used = written.get(pool, ())
        found: UsedIds = []
        for group in route.dst_groups:
            if group.pool == pool:
                new = checked_new_pages(group, request)
                found.append(
                    (group, np.unique(joined([new, *(pages for one, pages in used if one.name == group.name)])))
                )
        _check_once(found)


def _check_once(found: UsedIds) -> None:
    """No id is there twice, in one group or in two of a pool. All lie inside the pool: narrow numbers are sorted in less time."""
    width = np.min_scalar_type(found[0][0].num_pages)
    ids = np.concatenate([pages for _, pages in found], dtype=width, casting="unsafe")
    # NumPy's stable sort is a radix sort up to 16 bits, and a slow one above.
    ids.sort(kind="stable" if width.itemsize <= 2 else None)
    again = ids[1:] == ids[:-1]
    if np.logical_or.reduce(again):
        page = int(ids[1:][again][0])
        owners = dict.fromkeys(group.name for group, pages in found if page in pages)
        raise BindError(
            f"page {page} of destination pool '{found[0][0].pool}' is written twice, by {' and '.join(map(repr, owners))}: a "
            "page belongs to one group and one place in its block table"
        )


def checked_new_pages(group: Group, request: Request) -> Int64s:
    """The pages that a group calls new, checked: they will be zeroed, so a wrong one destroys what it holds."""
    new_pages = page_ids(request.dst_new_pages.get(group.name, _NO_PAGES), f"group '{group.name}': new pages")
    if not len(new_pages):
        return new_pages
    ids, counts = np.unique(new_pages, return_counts=True)
    if len(ids) < len(new_pages):
        raise BindError(f"group '{group.name}': page {int(ids[counts > 1][0])} is called new twice; name it once")
    table = _table(request.dst_tables, group, "destination")
    stray = new_pages[~np.isin(new_pages, table.pages)]
    if len(stray):
        raise BindError(
            f"group '{group.name}': page {int(stray[0])} is called new, but is not in the destination's block table"
        )
    _check_inside([(group, ids)], "destination")
    return new_pages
