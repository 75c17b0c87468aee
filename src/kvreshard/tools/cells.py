"""The cells of some fields that one rank digests: a box of its own address maps, and where the rows of one request lie in its memory.

A row is the cells of one token, or of one coordinate of a state's first axis. A state has one page.

Raises BindError: no intervals or block table for the group; a table that is too short, names a page outside its pool or the null page, or
holds fewer tokens than the intervals; a ring whose tokens have been overwritten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import BindError
from kvreshard.model.field import Axis
from kvreshard.model.ownership import Ownership
from kvreshard.model.rank import Group
from kvreshard.model.tables import PageTable, Tokens
from kvreshard.plan.transfer import RankTransfer

Int64s = NDArray[np.int64]
Side = Literal["src", "dst"]
Tables = Mapping[str, PageTable]
Intervals = Mapping[str, Sequence[Tokens]]

# 2**16 indices take about 4 MB over all arrays of a window.
INDICES_PER_WINDOW = 1 << 16


@dataclass(frozen=True, slots=True)
class Cut:
    """One axis: where the rank stores it, and the ownerships that a coordinate must be in besides the rank's own."""

    axis: Axis
    mapped: AxisMap
    within: tuple[Ownership, ...]

    def bounds(self) -> tuple[int, int]:
        """The half-open range of coordinates of a bounded axis; empty where the ownerships do not meet."""
        owners = (self.mapped.owned, *self.within)
        stops = [stop for stop in (getattr(owned, "stop", None) for owned in owners) if stop is not None]
        return max(owned.start for owned in owners), min(stops)

    def locate(self, coordinates: Int64s) -> Int64s:
        """Byte offsets of coordinates of a bounded axis."""
        _, offsets = self.mapped.locate(self.mapped.owned.to_local(coordinates))
        return offsets


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Congruent fields of one rank, cut to a box. `bases`: address of each field's first cell in page 0, same order."""

    fields: tuple[str, ...]
    bases: Int64s
    element_bytes: int
    group: Group
    page_stride_bytes: int
    axes: tuple[Cut, ...]

    @property
    def sequence(self) -> Cut | None:
        """The axis without end; None for a state."""
        return next((cut for cut in self.axes if cut.axis.extent is None), None)

    @property
    def bounded(self) -> tuple[Cut, ...]:
        """The axes with an end, in the field's order."""
        return tuple(cut for cut in self.axes if cut.axis.extent is not None)

    @property
    def inner(self) -> tuple[Cut, ...]:
        """The axes inside a row."""
        return self.bounded[1:] if self.sequence is None and len(self.bounded) > 1 else self.bounded

    def only(self, names: Collection[str] | None) -> Cells:
        """The same cells of the fields in `names`; of all fields for None."""
        if names is None:
            return self
        chosen = [index for index, field in enumerate(self.fields) if field in names]
        return replace(self, fields=tuple(self.fields[index] for index in chosen), bases=self.bases[chosen])


def of_transfer(transfer: RankTransfer, side: Side) -> Cells:
    """The cells that a transfer moves, on one side: the elected box, and what the other side holds."""
    at_source = side == "src"
    axes = [
        Cut(a.axis, *((a.src, (a.dst.owned, a.chosen)) if at_source else (a.dst, (a.src.owned, a.chosen))))
        for a in transfer.axes
    ]
    return Cells(
        transfer.fields,
        transfer.bases.src if at_source else transfer.bases.dst,
        transfer.element_bytes,
        transfer.src_group if at_source else transfer.dst_group,
        transfer.src_page_stride_bytes if at_source else transfer.dst_page_stride_bytes,
        tuple(axes),
    )


def find_rows(cells: Cells, tables: Tables, intervals: Intervals) -> Iterator[tuple[Int64s, Int64s]]:
    """Coordinates of the request's rows, and their byte offsets from a field's base, shapes (n,). Every row comes exactly once."""
    name = cells.group.name
    if name not in intervals:
        raise BindError(f"group '{name}': no token intervals; give an empty list to digest nothing")
    if not intervals[name]:
        return
    table = tables.get(name)
    if table is None:
        raise BindError(f"group '{name}': no block table; give the one that the rank's engine uses for the request")
    sequence = cells.sequence
    if sequence is None:
        yield _state_rows(cells, table)
        return
    ranges = list(sequence.axis.index_ranges(intervals[name]))
    _check_tokens(cells, sequence, table, intervals[name], ranges)
    indices = np.concatenate([np.zeros(0, np.int64), *(np.arange(*ends, dtype=np.int64) for ends in ranges)])
    for first in range(0, len(indices), INDICES_PER_WINDOW):
        window = indices[first : first + INDICES_PER_WINDOW]
        held = sequence.mapped.owned.contains(window)
        for owned in sequence.within:
            held &= owned.contains(window)
        if held.any():
            yield window[held], _token_offsets(cells, sequence, table, window[held])


def _state_rows(cells: Cells, table: PageTable) -> tuple[Int64s, Int64s]:
    if len(table.pages) != 1:
        raise BindError(
            f"group '{cells.group.name}': {len(table.pages)} pages for a state; give the one page of the running state"
        )
    _check_ids(cells, table.pages)
    coordinates = offsets = np.zeros(1, dtype=np.int64)
    if len(cells.bounded) > 1:
        first = cells.bounded[0]
        coordinates = np.arange(*first.bounds(), dtype=np.int64)
        offsets = first.locate(coordinates)
    return coordinates, table.pages[0] * cells.page_stride_bytes + offsets


def _token_offsets(cells: Cells, sequence: Cut, table: PageTable, indices: Int64s) -> Int64s:
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
    return page_ids * cells.page_stride_bytes + offsets


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
    _, absorbed = sequence.axis.indices_of(0, table.num_tokens)
    if absorbed - ranges[0][0] > capacity:
        raise BindError(
            f"group '{name}': index {ranges[0][0]} of {absorbed} was overwritten in a ring of {capacity}; digest the last "
            f"{capacity} only"
        )
