"""Can this request be bound to this route at all?

Checked in whole before the first address is given out, so that a bad request moves nothing:

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
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import BindError
from kvreshard.model.layout import Group
from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.plan.route import Lane, Route, Span


def entries(table: PageTable, span: Span) -> PageTable:
    """The table as bind indexes it: a ring and a state start at logical page 0."""
    return table if span.ring_pages is None else PageTable(table.pages, table.num_tokens)


def check_request(route: Route, request: Request) -> None:
    """Raises BindError unless every lane of the route can be bound."""
    _check_group_names(route, request)
    used: dict[str, NDArray[np.bool_]] = {}
    seen: set[object] = set()
    for lane in route.lanes:
        name = lane.dst_group.name
        if name not in request.intervals:
            raise BindError(f"group '{name}': no token intervals; give an empty list to move nothing")
        intervals = request.intervals[name]
        if not intervals:
            continue
        src = _table(request.src_tables, lane.src_group, "source")
        dst = _table(request.dst_tables, lane.dst_group, "destination")
        mask = used.setdefault(name, np.zeros(len(dst.pages), dtype=bool))
        along = next((axis for axis in lane.axes if axis.extent is None), None)
        key = (lane.src_group.name, name, along, lane.tokens_per_index, lane.keep_partial)
        if key in seen:
            continue
        seen.add(key)
        if along is None:
            _check_state(lane, src, dst)
            mask[0] = True
            continue
        _check_tokens(lane.src_group, "source", src, intervals)
        _check_tokens(lane.dst_group, "destination", dst, intervals)
        for interval in intervals:
            _pages(lane, lane.src_group, "source", src, along.src, lane.src_span, interval)
            touched = _pages(lane, lane.dst_group, "destination", dst, along.dst, lane.dst_span, interval)
            mask[touched] = True
    _check_used_once(route, used, request)


def _check_group_names(route: Route, request: Request) -> None:
    known = [group.name for group in route.dst_groups]
    for what, names in (("token intervals", request.intervals), ("new pages", request.dst_new_pages)):
        for name in names:
            if name not in known:
                raise BindError(
                    f"group '{name}': the request has {what} for it, but the destination's groups are {', '.join(known)}"
                )


def _table(tables: Mapping[str, PageTable], group: Group, side: str) -> PageTable:
    table = tables.get(group.name)
    if table is None:
        raise BindError(f"group '{group.name}': the {side} gives no block table")
    return table


def _check_state(lane: Lane, src: PageTable, dst: PageTable) -> None:
    for group, table, side in ((lane.src_group, src, "source"), (lane.dst_group, dst, "destination")):
        if len(table.pages) != 1:
            raise BindError(
                f"group '{group.name}': the {side} gives {len(table.pages)} pages for a state; give the one page of the "
                "running state"
            )
        _check_ids(group, table.pages, side)
    if src.num_tokens != dst.num_tokens:
        raise BindError(
            f"group '{lane.dst_group.name}': the source's state has absorbed {src.num_tokens} tokens, the destination "
            f"resumes at {dst.num_tokens}: both must agree, stop the prefill at the token where the decode resumes"
        )


def _check_tokens(group: Group, side: str, table: PageTable, intervals: Sequence[Tokens]) -> None:
    stop = intervals[-1][1]
    if stop > table.num_tokens:
        raise BindError(
            f"group '{group.name}': tokens up to {stop} are to be moved, but the {side}'s pages hold {table.num_tokens}"
        )


def _pages(
    lane: Lane, group: Group, side: str, table: PageTable, mapped: AxisMap, span: Span, interval: Tokens
) -> NDArray[np.int64]:
    """Positions in the table of the pages that an interval touches on one side, checked."""
    start_token, stop_token = interval
    stop_token += lane.tokens_per_index - 1 if lane.keep_partial else 0
    start, stop = start_token // lane.tokens_per_index, stop_token // lane.tokens_per_index
    first, last = mapped.owned.count_below(start), mapped.owned.count_below(stop) - 1
    if last < first:
        return np.zeros(0, dtype=np.int64)
    if span.ring_pages is not None and span.capacity is not None:
        partial = lane.tokens_per_index - 1 if lane.keep_partial else 0
        absorbed = (table.num_tokens + partial) // lane.tokens_per_index
        if absorbed - start > span.capacity:
            raise BindError(
                f"group '{group.name}': tokens from {start_token} of {table.num_tokens} are to be moved, but the {side}'s "
                f"ring keeps only the last {span.capacity * lane.tokens_per_index}; move a shorter tail"
            )
        if len(table.pages) < span.ring_pages:
            raise BindError(
                f"group '{group.name}': the {side} gives {len(table.pages)} pages for a ring of {span.ring_pages}"
            )
        positions = np.arange(min(span.ring_pages, len(table.pages)), dtype=np.int64)
        _check_ids(group, table.pages[positions], side)
        return positions
    low, high = first // mapped.indices_per_page, last // mapped.indices_per_page + 1
    if low < table.first_page or high > table.first_page + len(table.pages):
        raise BindError(
            f"group '{group.name}': tokens [{interval[0]}, {interval[1]}) need the {side}'s pages [{low}, {high}), but "
            f"its block table has pages [{table.first_page}, {table.first_page + len(table.pages)})"
        )
    positions = np.arange(low - table.first_page, high - table.first_page, dtype=np.int64)
    _check_ids(group, table.pages[positions], side)
    return positions


def _check_ids(group: Group, pages: NDArray[np.int64], side: str) -> None:
    outside = (pages < 0) | (pages >= group.num_pages)
    if outside.any():
        raise BindError(
            f"group '{group.name}': the {side}'s block table names page {int(pages[outside][0])}, but its pool "
            f"'{group.pool}' has pages [0, {group.num_pages})"
        )
    if group.null_page is not None and (pages == group.null_page).any():
        raise BindError(
            f"group '{group.name}': the {side}'s block table has the null page {group.null_page} inside the tokens to "
            "be moved; move only tokens whose pages exist"
        )


def _check_used_once(route: Route, used: dict[str, NDArray[np.bool_]], request: Request) -> None:
    """No page of a pool is written or called new by two groups, or twice by one."""
    by_pool: defaultdict[str, dict[str, NDArray[np.int64]]] = defaultdict(dict)
    for group in route.dst_groups:
        mask, new = used.get(group.name), _new_pages(group, request)
        if mask is None and not len(new):
            continue
        written = request.dst_tables[group.name].pages[mask] if mask is not None else new[:0]
        _once(group.pool, {group.name: written})
        by_pool[group.pool][group.name] = np.union1d(written, new) if len(new) else written
    for pool, pages in by_pool.items():
        if len(pages) > 1:
            _once(pool, pages)


def _once(pool: str, pages_of: Mapping[str, NDArray[np.int64]]) -> None:
    values = np.sort(np.concatenate(list(pages_of.values())))
    again = values[1:] == values[:-1]
    if again.any():
        page = int(values[1:][again][0])
        owners = [name for name, pages in pages_of.items() if page in pages]
        raise BindError(
            f"page {page} of destination pool '{pool}' is written twice, by {' and '.join(map(repr, owners))}: a "
            "page belongs to one group and one place in its block table"
        )


def _new_pages(group: Group, request: Request) -> NDArray[np.int64]:
    """The pages that a group calls new, checked: they will be zeroed, so a wrong one destroys what it holds."""
    new_pages = np.asarray(request.dst_new_pages.get(group.name, ()), dtype=np.int64)
    if not len(new_pages):
        return new_pages
    table = _table(request.dst_tables, group, "destination")
    stray = new_pages[~np.isin(new_pages, table.pages)]
    if len(stray):
        raise BindError(
            f"group '{group.name}': page {int(stray[0])} is called new, but is not in the destination's block table"
        )
    _check_ids(group, new_pages, "destination")
    return new_pages
