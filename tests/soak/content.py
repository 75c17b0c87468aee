"""What does a request's cache hold, and is it there?

Cell by cell, from a seed and the request's length, by the definition of a layout and without the planner: the oracle's
arithmetic (`testing.oracle`), done once per engine for the longest request and kept as arrays.

1. `Content.write`: give the cells of some tokens their values, on every rank that holds them.
2. `Content.count_wrong`: compare whole pages of a loaded request: the cells of its tokens, and zeros everywhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.model import EngineLayout, Shard
from kvreshard.model.tables import PageTable
from kvreshard.testing.oracle import Bytes, holds, page_and_byte

Int64s = NDArray[np.int64]
Memory = Mapping[int, Mapping[str, Bytes]]
"""rank -> region -> its bytes."""
Tokens = Mapping[str, tuple[int, int]]
"""Group -> half-open range of tokens."""


@dataclass(frozen=True)
class _Cells:
    """One shard's cells in ascending order of `token` (0 for a state): where each lies and which value it has."""

    rank: int
    shard: Shard
    field: int
    per_token: int
    element_bytes: int
    is_state: bool
    token: Int64s
    page: Int64s
    byte: Int64s
    value: Int64s

    @property
    def group(self) -> str:
        return self.shard.geometry.group

    def of(self, tokens: tuple[int, int]) -> slice:
        """The cells of a range of tokens; all of a state."""
        if self.is_state:
            return slice(0, len(self.token))
        return slice(*np.searchsorted(self.token, tokens).tolist())


class Content:
    """Of one engine, for requests of up to `max_tokens` tokens."""

    def __init__(self, layout: EngineLayout, max_tokens: int) -> None:
        self._layout = layout
        self._cells = [
            _cells(layout, rank.rank, shard, max_tokens, number)
            for rank in layout.ranks
            for shard in rank.shards
            for number in [[field.name for field in layout.fields].index(shard.field)]
        ]

    def write(
        self,
        memory: Memory,
        tables: Mapping[str, PageTable],
        tokens: Tokens,
        seed: int,
        num_tokens: int,
        only: tuple[int, Collection[str]] | None = None,
    ) -> None:
        """Give the cells of these tokens the values of request `seed`. `only`: of one rank, and of these fields."""
        values: dict[int, Bytes] = {}
        for cells in self._cells:
            if only is not None and (cells.rank != only[0] or cells.shard.field not in only[1]):
                continue
            found = cells.of(tokens[cells.group])
            if found.start == found.stop:
                continue
            if cells.field not in values:
                values[cells.field] = _values(cells, seed, num_tokens)
            geometry, table = cells.shard.geometry, tables[cells.group]
            page = cells.page[found] - (0 if cells.is_state else table.first_page)
            where = cells.byte[found] + table.pages[page] * geometry.page_stride_bytes
            region, chosen = memory[cells.rank][cells.shard.region], values[cells.field][cells.value[found]]
            for byte in range(cells.element_bytes):
                region[where + byte] = chosen[:, byte]

    def count_wrong(
        self, memory: Memory, tables: Mapping[str, PageTable], tokens: Tokens, seed: int, num_tokens: int
    ) -> tuple[int, int]:
        """(bytes that are not what they should be, bytes compared) in all pages of the tables."""
        expected = {
            rank: {name: np.zeros_like(content) for name, content in regions.items()}
            for rank, regions in memory.items()
        }
        self.write(expected, tables, tokens, seed, num_tokens)
        wrong = compared = 0
        pages = np.unique(np.concatenate([table.pages for table in tables.values()]))
        for wanted, found in zip(views(self._layout, expected), views(self._layout, memory), strict=True):
            wrong += int(np.count_nonzero(wanted[pages] != found[pages]))
            compared += wanted[pages].size
        return wrong, compared


def views(layout: EngineLayout, memory: Memory) -> list[Bytes]:
    """The slabs of all ranks as arrays of shape (pages, bytes of a page); every engine here has one pool."""
    found = []
    for rank in layout.ranks:
        for slab in rank.slabs:
            region = memory[rank.rank][slab.region]
            shape = layout.groups[0].num_pages, slab.page_bytes
            found.append(
                np.lib.stride_tricks.as_strided(region[slab.offset_bytes :], shape, (slab.page_stride_bytes, 1))
            )
    return found


def _values(cells: _Cells, seed: int, num_tokens: int) -> Bytes:
    """Bytes of all cells of a field, 1 to 255: neither zeroed nor forgotten memory looks like them."""
    count = cells.per_token * (1 if cells.is_state else num_tokens)
    rng = np.random.default_rng([seed, cells.field, num_tokens])
    return rng.integers(1, 256, (count, cells.element_bytes), dtype=np.uint8)


def _cells(layout: EngineLayout, rank: int, shard: Shard, max_tokens: int, number: int) -> _Cells:
    field = layout.field_by_name[shard.field]
    order = sorted(range(len(field.axes)), key=lambda i: field.axes[i].extent is not None)  # the sequence first
    token = page = byte = value = np.zeros(1, np.int64)
    per_token = 1
    for place in order:
        axis, mapped = field.axes[place], shard.geometry.axes[place]
        assert axis.tokens_per_index == 1, "this check knows one token per index"
        extent = max_tokens if axis.extent is None else axis.extent
        held = [c for c in range(extent) if holds(mapped, c)]
        places = np.array([page_and_byte(mapped, c) for c in held], np.int64).reshape(-1, 2)
        coordinate = np.array(held, np.int64)
        is_sequence = axis.extent is None
        per_token *= 1 if is_sequence else extent
        token = (token[:, None] + (coordinate if is_sequence else 0 * coordinate)).reshape(-1)
        page = (page[:, None] + places[:, 0]).reshape(-1)
        byte = (byte[:, None] + places[:, 1]).reshape(-1)
        value = (value[:, None] * extent + coordinate).reshape(-1)
    return _Cells(
        rank, shard, number, per_token, field.element_bytes, field.sequence is None, token, page,
        byte + shard.offset_bytes, value,
    )  # fmt: skip
