"""The digest straight from its definition: one unit after another, in plain Python. Shares no code with `tools/`.

sum over rows, units of a row: R[field, row] * U[unit] * (value + C)        modulo 2^64
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from kvreshard.model import Axis, AxisMap, EngineLayout, Field, Rank, Shard
from kvreshard.model.ownership import Cyclic
from kvreshard.model.tables import PageTable, Tokens

MASK = 2**64 - 1
Memory = Mapping[tuple[int, str], NDArray[np.uint8]]
Cell = tuple[int, ...]


def weight(key: bytes, role: str, number: int) -> int:
    seed = hashlib.blake2b(role.encode(), digest_size=8, key=key, person=b"kvreshard-digest").digest()
    mixed = (int.from_bytes(seed, "little") + (number + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return mixed ^ (mixed >> 31)


def digest_of_cells(key: bytes, field: Field, cells: Mapping[Cell, bytes], position: int = 0) -> tuple[int, int]:
    """(value, bytes) of cells given as coordinates in the field's axis order -> bytes of the element."""
    presence, size = weight(key, "presence", 0), 2 - field.element_bytes % 2
    bounded = [number for number, axis in enumerate(field.axes) if axis.extent is not None]
    along = next((number for number, axis in enumerate(field.axes) if axis.extent is None), None)
    role = f"row\0{field.name}" if along is not None else f"state\0{position}\0{field.name}"
    if along is None and len(bounded) > 1:
        along = bounded[0]
    value = 0
    for cell, content in cells.items():
        row = weight(key, role, 0 if along is None else cell[along])
        number = 0
        for axis in bounded:
            if axis != along:
                number = number * (field.axes[axis].extent or 0) + cell[axis]
        units = [content[first : first + size] for first in range(0, len(content), size)]
        for inside, unit in enumerate(units):
            read = int.from_bytes(unit, "little", signed=True)
            value += row * weight(key, "unit", number * len(units) + inside) * (read + presence)
    return value % 2**64, len(cells) * field.element_bytes


def places(layout: EngineLayout, shard: Shard, table: PageTable, intervals: Sequence[Tokens]) -> dict[Cell, int]:
    """Where in its region a rank keeps each cell that it holds of a field, of the indices that the intervals bring."""
    field, geometry = layout.field_by_name[shard.field], shard.geometry
    if not intervals:
        return {}
    found = {}
    along = [_coordinates(axis, mapped, intervals) for axis, mapped in zip(field.axes, geometry.axes, strict=True)]
    for cell in product(*along):
        page, byte, ring = 0, shard.offset_bytes, False
        for coordinate, mapped in zip(cell, geometry.axes, strict=True):
            page_of, byte_of = _locate(mapped, coordinate)
            page, byte = page + page_of, byte + byte_of
            ring = ring or (mapped.digits[-1].extent is None and not mapped.digits[-1].page_step)
        entry = page if ring or field.sequence is None else page - table.first_page
        found[cell] = byte + int(table.pages[entry]) * geometry.page_stride_bytes
    return found


def read_cells(
    layout: EngineLayout, field: str, memory: Memory, table: PageTable, intervals: Sequence[Tokens]
) -> dict[Cell, bytes]:
    """The cells that any rank holds of a field, and their bytes. All replicas must agree."""
    size = layout.field_by_name[field].element_bytes
    found: dict[Cell, bytes] = {}
    for rank, shard in shards_of(layout, field):
        region = memory[rank.rank, shard.region]
        for cell, start in places(layout, shard, table, intervals).items():
            content = region[start : start + size].tobytes()
            assert found.setdefault(cell, content) == content, f"replicas of {field} {cell} differ"
    return found


def write_cells(
    layout: EngineLayout,
    field: str,
    memory: Memory,
    table: PageTable,
    intervals: Sequence[Tokens],
    cells: Mapping[Cell, bytes],
) -> None:
    """Writes the given cells wherever a rank holds them."""
    for rank, shard in shards_of(layout, field):
        region = memory[rank.rank, shard.region]
        for cell, start in places(layout, shard, table, intervals).items():
            if cell in cells:
                region[start : start + len(cells[cell])] = np.frombuffer(cells[cell], dtype=np.uint8)


def _coordinates(axis: Axis, mapped: AxisMap, intervals: Sequence[Tokens]) -> list[int]:
    extent, size, partial = axis.extent, axis.tokens_per_index, axis.keep_partial
    if extent is not None:
        wanted: set[int] = set(range(extent))
    else:
        wanted = set()
        for start, stop in intervals:
            wanted |= {
                index
                for index in range(start // size, stop // size + 1)
                if index * size < stop and (partial or (index + 1) * size <= stop)
            }
    return sorted(index for index in wanted if _holds(mapped, index))


def _holds(mapped: AxisMap, index: int) -> bool:
    owned = mapped.owned
    if isinstance(owned, Cyclic):
        return owned.start <= index % owned.step < owned.start + owned.run
    return owned.start <= index and (owned.stop is None or index < owned.stop)


def _locate(mapped: AxisMap, index: int) -> tuple[int, int]:
    owned = mapped.owned
    local = index - owned.start
    if isinstance(owned, Cyclic):
        local = index // owned.step * owned.run + index % owned.step - owned.start
    page = byte = 0
    for digit in mapped.digits:
        value = local if digit.extent is None else local % digit.extent
        local = 0 if digit.extent is None else local // digit.extent
        page, byte = page + value * digit.page_step, byte + value * digit.byte_step
    return page, byte


def shards_of(layout: EngineLayout, field: str) -> Iterator[tuple[Rank, Shard]]:
    for rank in layout.ranks:
        for shard in rank.shards:
            if shard.field == field:
                yield rank, shard
