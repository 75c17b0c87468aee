"""Content of the pages of one rank, token by token and state by state, at the addresses of its layout.

The addresses are held to vLLM's views elsewhere (`tests.vllm.engines.check_addresses`); here they are where kernels would read
and write.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.vllm.engines import Side, label

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class _Cells:
    """One field on one rank: `grid` has None where the tokens go."""

    name: str
    element_bytes: int
    memory: Array
    offset_bytes: int
    stride_bytes: int
    token_axis: Any | None
    grid: tuple[Array | None, ...]
    offsets: tuple[Array | None, ...]
    tokens_per_page: int | None
    tokens_per_index: int

    @functools.cached_property
    def whole(self) -> Array:
        """Addresses of all bytes that the field has on page 0 of the pool."""
        indices = None
        if self.token_axis is not None:
            assert self.tokens_per_page is not None
            every = np.arange(self.tokens_per_page // self.tokens_per_index, dtype=np.int64)
            indices = every[self.token_axis.owned.contains(every)]
        return self.find([0], indices)[0].reshape(-1)

    def held_here(self, tokens: Array) -> tuple[Array, Array]:
        """(which of the tokens have a cell here, its index): of a compressed group the last."""
        indices = tokens // self.tokens_per_index
        mine = self.token_axis.owned.contains(indices) & ((tokens + 1) % self.tokens_per_index == 0)
        return mine, indices[mine]

    def find(self, table: Sequence[int], indices: Array | None) -> tuple[Array, tuple[Array, ...]]:
        """(address of every byte, coordinates without the tokens' place filled in)."""
        grid, offsets = [], []
        for coordinates, steps in zip(self.grid, self.offsets, strict=True):
            if coordinates is None or steps is None:
                assert indices is not None
                page, step = self.token_axis.locate(self.token_axis.owned.to_local(indices))
                grid.append(indices)
                offsets.append(step + np.asarray(table, dtype=np.int64)[page] * self.stride_bytes)
            else:
                grid.append(coordinates)
                offsets.append(steps)
        first = self.offset_bytes + (table[0] * self.stride_bytes if self.token_axis is None else 0)
        start = first + sum(np.ix_(*offsets))
        return start[..., None] + np.arange(self.element_bytes), np.ix_(*grid)

    def labels(self, coordinates: tuple[Array, ...], held: Array | np.uint64) -> Array:
        mixed = []
        for place, coordinate in enumerate(coordinates):
            if self.grid[place] is None:
                shape = [1] * len(coordinates)
                shape[place] = -1
                mixed.append(np.asarray(held).reshape(shape))
            else:
                mixed.append(coordinate)
        if self.token_axis is None:
            mixed.append(np.asarray(held).reshape([1] * len(coordinates)))
        return label(self.name, self.element_bytes, *mixed)


class RankContent:
    """One rank's memory, by group."""

    def __init__(self, side: Side, rank_number: int) -> None:
        rank = next(r for r in side.layout.ranks if r.rank == rank_number)
        self._cells: dict[str, list[_Cells]] = {group.name: [] for group in side.layout.groups}
        for shard in rank.shards:
            field = side.layout.field_by_name[shard.field]
            grid: list[Array | None] = []
            offsets: list[Array | None] = []
            token_axis, tokens_per_index = None, 1
            for axis, mapped in zip(field.axes, shard.geometry.axes, strict=True):
                if axis.extent is None:
                    assert not axis.keep_partial, "a group that is not complete has no cell here"
                    token_axis, tokens_per_index = mapped, axis.tokens_per_index
                    grid.append(None)
                    offsets.append(None)
                    continue
                every = np.arange(axis.extent, dtype=np.int64)
                held = every[mapped.owned.contains(every)]
                page, offset = mapped.locate(mapped.owned.to_local(held))
                assert not page.any()
                grid.append(held)
                offsets.append(offset)
            self._cells[shard.geometry.group].append(
                _Cells(
                    field.name,
                    field.element_bytes,
                    side.memory[rank.rank, shard.region],
                    shard.offset_bytes,
                    shard.geometry.page_stride_bytes,
                    token_axis,
                    tuple(grid),
                    tuple(offsets),
                    side.layout.group_by_name[shard.geometry.group].tokens_per_page,
                    tokens_per_index,
                )
            )

    def write(self, group: str, table: Sequence[int], tokens: Array, held: Array) -> None:
        """A kernel writes these tokens."""
        for cells in self._cells[group]:
            mine, indices = cells.held_here(tokens)
            address, coordinates = cells.find(table, indices)
            cells.memory[address] = cells.labels(coordinates, held[mine])

    def wrong(self, group: str, table: Sequence[int], tokens: Array, held: Array) -> list[int]:
        """Which of these tokens a kernel would not find."""
        found: set[int] = set()
        for cells in self._cells[group]:
            mine, indices = cells.held_here(tokens)
            address, coordinates = cells.find(table, indices)
            differs = cells.memory[address] != cells.labels(coordinates, held[mine])
            place = cells.grid.index(None)
            axes = tuple(axis for axis in range(differs.ndim) if axis != place)
            found.update(tokens[mine][differs.any(axis=axes)].tolist())
        return sorted(found)

    def write_state(self, group: str, page: int, held: np.uint64) -> None:
        """A kernel leaves a state."""
        for cells in self._cells[group]:
            address, coordinates = cells.find([page], None)
            cells.memory[address] = cells.labels(coordinates, held)

    def has_state(self, group: str, page: int, held: np.uint64) -> bool:
        """Whether a kernel would find this state."""
        for cells in self._cells[group]:
            address, coordinates = cells.find([page], None)
            if (cells.memory[address] != cells.labels(coordinates, held)).any():
                return False
        return True

    def copy_page(self, group: str, src: int, dst: int) -> None:
        """Everything of a page, into another one."""
        for cells in self._cells[group]:
            cells.memory[dst * cells.stride_bytes + cells.whole] = cells.memory[src * cells.stride_bytes + cells.whole]

    def poison(self, page: int) -> None:
        """Nothing of what a page held may be found any more."""
        for of_group in self._cells.values():
            for cells in of_group:
                cells.memory[page * cells.stride_bytes + cells.whole] = 0
