"""The slow oracle: what a transfer must leave in the destination's memory, straight from the definition.

For each destination cell: find a source rank that holds it, read there, write here. No intersection of intervals, no
merging, no election; coordinates are listed one by one and addresses computed digit by digit in plain Python. This file
was written before the planner and imports the model's nouns only, none of their methods.

1. The pages that were allocated for the request are zeroed, in full (their slabs).
2. Every cell that the request's intervals name, on every destination rank that holds it, is copied from the first
   source rank that holds it.

Refused (BindError): a request without intervals or block tables, a table without a page that is needed, a page outside its pool, and a cell
that no source rank holds, unless the source lacks an optional field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.address import AxisMap
from kvreshard.model.errors import BindError, UsageError
from kvreshard.model.expect import expect
from kvreshard.model.field import Axis, Field
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import Cyclic
from kvreshard.model.rank import Group, Rank, Shard
from kvreshard.model.tables import PageTable, Request, Tokens, page_ids

Bytes = NDArray[np.uint8]
Memory = Mapping[tuple[int, str], Bytes]
"""An engine's memory: (rank, region name) -> its bytes, shape (size_bytes,)."""
# At once: a caller's memory may be most of what the machine has.
COMPARED_BYTES = 64 << 20


def oracle_transfer(
    src: EngineLayout, dst: EngineLayout, src_memory: Memory, dst_memory: Memory, request: Request
) -> dict[tuple[int, str], Bytes]:
    """The destination's memory after the request, as a copy; `dst_memory` is not changed. Raises UsageError for arguments of other types,
    BindError for a request that names what is not there.
    """
    for layout, memory, side in ((src, src_memory, "source"), (dst, dst_memory, "destination")):
        expect(layout, EngineLayout, f"the {side}'s layout", "what `kvreshard.describe` returns")
        expect(memory, Mapping, f"the {side}'s memory", "(rank, region name) -> its bytes")
        for rank in layout.ranks:
            for name, size in zip(rank.template.regions, rank.template.region_bytes, strict=True):
                if (rank.rank, name) not in memory:
                    raise UsageError(f"the {side}'s memory lacks region '{name}' of rank {rank.rank}")
                content = memory[rank.rank, name]
                expect(content, np.ndarray, f"region '{name}' of rank {rank.rank} in the {side}'s memory", "its bytes")
                if content.dtype != np.uint8 or content.shape != (size,):
                    raise UsageError(
                        f"region '{name}' of rank {rank.rank} in the {side}'s memory is {content.dtype} of shape {content.shape}, and must be "
                        f"uint8 of shape ({size},)"
                    )
    expect(request, Request, "a request", "Request(src_tables, dst_tables, intervals, dst_new_pages)")
    after = {place: content.copy() for place, content in dst_memory.items()}
    apply_request(src, dst, src_memory, after, request)
    return after


def apply_request(src: EngineLayout, dst: EngineLayout, src_memory: Memory, after: Memory, request: Request) -> None:
    """The same in place: `after` is the destination's memory before, and then after, the request."""
    fill_new_pages(dst, after, request, 0)
    for rank in dst.ranks:
        for shard in rank.shards:
            field = next(f for f in dst.fields if f.name == shard.field)
            _copy_field(src, dst, rank, shard, field, src_memory, after, request)


def write_values(src: EngineLayout, dst: EngineLayout, memory: Memory, request: Request, seed: int) -> None:
    """Give every cell that the request names one random value, on all source ranks that hold it: replicas are equal.

    Bytes are 1 to 255, so that a byte that was zeroed or never written is told from one that was copied.
    """
    rng = np.random.default_rng(seed)
    groups = {shard.field: shard.geometry.group for rank in dst.ranks for shard in rank.shards}
    for field in src.fields:
        intervals = request.intervals[groups[field.name]] if field.name in groups else []
        coordinates = [_all_coordinates(axis, intervals) for axis in field.axes]
        shape = [len(found) for found in coordinates]
        values = rng.integers(1, 256, (*shape, field.element_bytes), dtype=np.uint8)
        owners = [(rank, shard) for rank in src.ranks for shard in rank.shards if shard.field == field.name]
        for rank, shard in owners if values.size else []:
            held = np.ones(shape, dtype=bool)
            for number, mapped in enumerate(shard.geometry.axes):
                flags = np.array([holds(mapped, c) for c in coordinates[number]], dtype=bool)
                held &= flags.reshape([-1 if i == number else 1 for i in range(len(shape))])
            where = _offsets(src, shard, coordinates, request.src_tables, held)
            for byte in range(field.element_bytes):
                memory[rank.rank, shard.region][where[held] + byte] = values[held][:, byte]


def fill_new_pages(dst: EngineLayout, memory: Memory, request: Request, byte: int) -> None:
    """Fill the pages that were allocated for the request, on all ranks and in full."""
    for rank, group in product(dst.ranks, dst.groups):
        what = f"group '{group.name}': new pages"
        pages = page_ids(request.dst_new_pages.get(group.name, ()), what)
        _check_pool(what, pages, group)
        for page in pages.tolist():
            for slab in rank.slabs:
                if slab.pool == group.pool:
                    start = slab.offset_bytes + page * slab.page_stride_bytes
                    memory[rank.rank, slab.region][start : start + slab.page_bytes] = byte


def _copy_field(
    src: EngineLayout,
    dst: EngineLayout,
    dst_rank: Rank,
    dst_shard: Shard,
    field: Field,
    src_memory: Memory,
    after: Memory,
    request: Request,
) -> None:
    if not any(shard.field == field.name for rank in src.ranks for shard in rank.shards) and field.optional:
        return
    group = dst_shard.geometry.group
    if group not in request.intervals:
        raise BindError(f"group '{group}': no token intervals; give an empty list to move nothing")
    intervals = request.intervals[group]
    if not intervals:
        return
    coordinates = [
        [c for c in _all_coordinates(axis, intervals) if holds(mapped, c)]
        for axis, mapped in zip(field.axes, dst_shard.geometry.axes, strict=True)
    ]
    missing = np.ones([len(found) for found in coordinates], dtype=bool)
    if missing.size == 0:
        return
    dst_bytes = _offsets(dst, dst_shard, coordinates, request.dst_tables)
    for src_rank in src.ranks:
        for src_shard in src_rank.shards:
            if src_shard.field != field.name:
                continue
            held = np.ones(missing.shape, dtype=bool)
            for number, mapped in enumerate(src_shard.geometry.axes):
                flags = np.array([holds(mapped, c) for c in coordinates[number]])
                held &= flags.reshape([-1 if i == number else 1 for i in range(missing.ndim)])
            take = held & missing
            if not take.any():
                continue
            src_bytes = _offsets(src, src_shard, coordinates, request.src_tables, take)
            source, target = src_memory[src_rank.rank, src_shard.region], after[dst_rank.rank, dst_shard.region]
            for byte in range(field.element_bytes):
                target[dst_bytes[take] + byte] = source[src_bytes[take] + byte]
            missing &= ~take
    if missing.any():
        raise BindError(
            f"field '{field.name}': no rank of engine '{src.engine}' holds {int(missing.sum())} of its cells"
        )


def _all_coordinates(axis: Axis, intervals: Sequence[Tokens]) -> list[int]:
    if axis.extent is not None:
        return list(range(axis.extent))
    found: list[int] = []
    for start, stop in intervals:
        for index in range(start // axis.tokens_per_index, stop // axis.tokens_per_index + 1):
            first_token, next_token = index * axis.tokens_per_index, (index + 1) * axis.tokens_per_index
            complete = first_token < stop and next_token <= stop
            touched = first_token < stop and next_token > start
            if complete or (axis.keep_partial and touched):
                found.append(index)
    return sorted(set(found))


def holds(mapped: AxisMap, coordinate: int) -> bool:
    """Whether a rank has this coordinate of an axis."""
    owned = mapped.owned
    if isinstance(owned, Cyclic):
        return owned.start <= coordinate % owned.step < owned.start + owned.run
    return owned.start <= coordinate and (owned.stop is None or coordinate < owned.stop)


def page_and_byte(mapped: AxisMap, coordinate: int) -> tuple[int, int]:
    """Logical page and byte in it of a coordinate that the rank holds, as far as this axis decides."""
    owned = mapped.owned
    if isinstance(owned, Cyclic):
        rest = (coordinate // owned.step) * owned.run + coordinate % owned.step - owned.start
    else:
        rest = coordinate - owned.start
    page = byte = 0
    for digit in mapped.digits:
        value = rest if digit.extent is None else rest % digit.extent
        rest = 0 if digit.extent is None else rest // digit.extent
        page += value * digit.page_step
        byte += value * digit.byte_step
    return page, byte


def _check_pool(what: str, pages: NDArray[np.int64], group: Group) -> None:
    outside = pages[(pages < 0) | (pages >= group.num_pages)]
    if len(outside):
        raise BindError(
            f"{what}: there is page {int(outside[0])}, but pool '{group.pool}' has pages [0, {group.num_pages})"
        )


def _offsets(
    layout: EngineLayout,
    shard: Shard,
    coordinates: list[list[int]],
    tables: Mapping[str, PageTable],
    wanted: NDArray[np.bool_] | None = None,
) -> NDArray[np.int64]:
    """Byte offset in the region of every listed cell, shape = lengths of the coordinate lists.

    Cells outside `wanted` get offset -1: their page may not be in the table.
    """
    group = next(group for group in layout.groups if group.name == shard.geometry.group)
    where = f"group '{group.name}' of engine '{layout.engine}'"
    if group.name not in tables:
        raise BindError(f"{where}: no block table is given")
    table = tables[group.name]
    shape = [len(found) for found in coordinates]
    pages, offsets = np.zeros(shape, dtype=np.int64), np.full(shape, shard.offset_bytes, dtype=np.int64)
    for number, mapped in enumerate(shard.geometry.axes):
        places = [page_and_byte(mapped, c) if holds(mapped, c) else (0, 0) for c in coordinates[number]]
        along = [-1 if i == number else 1 for i in range(len(shape))]
        pages += np.array([page for page, _ in places], dtype=np.int64).reshape(along)
        offsets += np.array([byte for _, byte in places], dtype=np.int64).reshape(along)
    wanted = np.ones(shape, dtype=bool) if wanted is None else wanted
    goes_on = any(mapped.digits[-1].extent is None and mapped.digits[-1].page_step for mapped in shard.geometry.axes)
    logical = pages[wanted] - (table.first_page if goes_on else 0)
    if logical.size and (logical.min() < 0 or logical.max() >= len(table.pages)):
        raise BindError(f"{where}: a token that is moved has no page in the block table, which has {len(table.pages)}")
    _check_pool(where, table.pages[logical], group)
    result = np.full(shape, -1, dtype=np.int64)
    result[wanted] = offsets[wanted] + table.pages[logical] * shard.geometry.page_stride_bytes
    return result


def differing_bytes(expected: Memory, got: Memory) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """Half-open byte ranges per (rank, region) where two memories differ; an empty dict when they are equal."""
    found = {}
    for place, content in expected.items():
        found_at = [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(content), COMPARED_BYTES):
            part = slice(start, start + COMPARED_BYTES)
            found_at.append(start + np.flatnonzero(content[part] != got[place][part]))
        wrong = np.concatenate(found_at)
        if wrong.size:
            cuts = [0, *(np.flatnonzero(np.diff(wrong) > 1) + 1).tolist(), len(wrong)]
            found[place] = [(int(wrong[a]), int(wrong[b - 1]) + 1) for a, b in pairwise(cuts)]
    return found
