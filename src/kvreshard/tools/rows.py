"""Where in memory the rows of one request lie: the cells of one token, or of a state's first axis.

1. List the indices that the token intervals bring, in windows of bounded size; keep those that all ownerships hold.
2. Locate them in pages, and look the pages up in the block table.

A state has one page. Its rows are the coordinates of its first axis, or one row if it has no other axis.

Refused with BindError: no intervals or table for the group, a table that is too short, names a page outside its pool or the
null page, holds fewer tokens than are asked for, or a ring whose tokens have been overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import BindError
from kvreshard.model.tables import PageTable, Tokens
from kvreshard.tools.cells import Cells, Cut

Int64s = NDArray[np.int64]
Tables = Mapping[str, PageTable]
Intervals = Mapping[str, Sequence[Tokens]]

# 2**16 indices take about 4 MB over all arrays of a window.
INDICES_PER_WINDOW = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Row i has coordinate `coordinates[i]` and lies `offsets[i]` bytes from a field's base, shapes (n,). `position`: the tokens that
    a state has absorbed, so that the right bytes of another moment have another digest; None where there is a sequence.
    """

    coordinates: Int64s
    offsets: Int64s
    position: int | None = None


def page_rows(cells: Cells, tables: Tables, intervals: Intervals) -> Iterator[Rows]:
    """Every row of the request, exactly once."""
    name = cells.group.name
    if name not in intervals:
        raise BindError(f"group '{name}': no token intervals; give an empty list to digest nothing")
    if not intervals[name]:
        return
    table = tables.get(name)
    if table is None:
        raise BindError(f"group '{name}': no block table; give the one that the rank's engine uses for the request")
    if cells.sequence is None:
        yield _state_rows(cells, table)
        return
    ranges = list(_index_ranges(cells, intervals[name]))
    _check_tokens(cells, cells.sequence, table, intervals[name], ranges)
    for window in _windows(ranges):
        held = cells.sequence.mapped.owned.contains(window)
        for owned in cells.sequence.within:
            held &= owned.contains(window)
        if held.any():
            yield _token_rows(cells, cells.sequence, table, window[held])


def inner_axes(cells: Cells) -> tuple[Cut, ...]:
    """The axes inside a row."""
    bounded = cells.bounded
    return bounded[1:] if cells.sequence is None and len(bounded) > 1 else bounded


def locate(cut: Cut, coordinates: Int64s) -> Int64s:
    """Byte offsets of coordinates of a bounded axis."""
    _, offsets = cut.mapped.locate(cut.mapped.owned.to_local(coordinates))
    return offsets


def _state_rows(cells: Cells, table: PageTable) -> Rows:
    if len(table.pages) != 1:
        raise BindError(
            f"group '{cells.group.name}': {len(table.pages)} pages for a state; give the one page of the running state"
        )
    _check_ids(cells, table.pages)
    coordinates = offsets = np.zeros(1, dtype=np.int64)
    if len(cells.bounded) > 1:
        first = cells.bounded[0]
        coordinates = np.arange(*first.bounds(), dtype=np.int64)
        offsets = locate(first, coordinates)
    return Rows(coordinates, table.pages[0] * cells.page_stride_bytes + offsets, table.num_tokens)


def _token_rows(cells: Cells, sequence: Cut, table: PageTable, indices: Int64s) -> Rows:
    mapped = sequence.mapped
    pages, offsets = mapped.locate(mapped.owned.to_local(indices))
    entry = pages if mapped.ring_pages is not None else pages - table.first_page
    if int(entry.min()) < 0 or int(entry.max()) >= len(table.pages):
        raise BindError(
            f"group '{cells.group.name}': logical pages [{int(pages.min())}, {int(pages.max()) + 1}) are needed, but the block "
            f"table has {len(table.pages)} from {table.first_page}; digest only tokens whose pages exist"
        )
    page_ids = table.pages[entry]
    _check_ids(cells, page_ids)
    return Rows(indices, page_ids * cells.page_stride_bytes + offsets)


def _index_ranges(cells: Cells, intervals: Sequence[Tokens]) -> Iterator[tuple[int, int]]:
    """Ranges of indices, without repeats: two intervals may touch the same compressed index."""
    end = 0
    for start_token, stop_token in intervals:
        stop_token += cells.tokens_per_index - 1 if cells.keep_partial else 0
        start, stop = max(end, start_token // cells.tokens_per_index), stop_token // cells.tokens_per_index
        if stop > start:
            yield start, stop
            end = stop


def _windows(ranges: list[tuple[int, int]]) -> Iterator[Int64s]:
    """The indices of all ranges, in arrays of at most `INDICES_PER_WINDOW`; short ranges share one."""
    pending: list[Int64s] = []
    room = INDICES_PER_WINDOW
    for start, stop in ranges:
        while start < stop:
            taken = min(stop - start, room)
            pending.append(np.arange(start, start + taken, dtype=np.int64))
            start, room = start + taken, room - taken
            if not room:
                yield np.concatenate(pending)
                pending, room = [], INDICES_PER_WINDOW
    if pending:
        yield np.concatenate(pending)


def _check_ids(cells: Cells, page_ids: Int64s) -> None:
    group = cells.group
    low, high = int(page_ids.min()), int(page_ids.max())
    if low < 0 or high >= group.num_pages:
        raise BindError(
            f"group '{group.name}': the block table names page {low if low < 0 else high}, but its pool '{group.pool}' has "
            f"pages [0, {group.num_pages})"
        )
    if group.null_page is not None and (page_ids == group.null_page).any():
        raise BindError(
            f"group '{group.name}': the block table has the null page {group.null_page} inside the tokens to be digested; "
            "digest only tokens whose pages exist"
        )


def _check_tokens(
    cells: Cells, sequence: Cut, table: PageTable, intervals: Sequence[Tokens], ranges: list[tuple[int, int]]
) -> None:
    name, stop_token = cells.group.name, intervals[-1][1]
    if stop_token > table.num_tokens:
        raise BindError(
            f"group '{name}': tokens up to {stop_token} are to be digested, but the block table holds {table.num_tokens}"
        )
    mapped = sequence.mapped
    if mapped.ring_pages is None or not ranges:
        return
    capacity = mapped.ring_pages * mapped.indices_per_page // mapped.owned.run * mapped.owned.period
    absorbed = table.num_tokens // cells.tokens_per_index
    if absorbed - ranges[0][0] > capacity:
        raise BindError(
            f"group '{name}': index {ranges[0][0]} of {absorbed} was overwritten in a ring of {capacity}; digest the last "
            f"{capacity} only"
        )
