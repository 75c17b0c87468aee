"""What does a request's cache hold, whatever engine it lies in?

1. Each rank's layout says where every cell of its fields lies; the cells of the tokens asked for are read from the rank's
   snapshot, one address at a time. This shares nothing with the planner but the layout itself.
2. Ranks are put together per field: an array over (sequence index, other axes ..., bytes of an element).
3. `first_difference` compares every rank of one cache, replicas included, with another cache, and names the field, the rank,
   the coordinates and both values. Ranks that compute the same cell differ by float noise, so a cell that several ranks of
   the expected cache hold must equal one of them.

A field without a sequence (a state) has no token axis. Tokens before a group's window or chunk are not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.e2e.snapshots import NULL_BLOCK, RankInfo, Snapshot

from kvreshard.model import EngineLayout, Field, Group, Shard
from kvreshard.model.wire import decode

Cells = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a field: its coordinates on each axis (counted from `Logical.first` on the sequence)."""

    rank: int
    where: tuple[NDArray[np.int64], ...]
    cells: Cells


@dataclass(frozen=True, slots=True)
class Logical:
    """One field of one request: `first` is the sequence index of `cells[0]`; `held` says which cells any rank has."""

    field: Field
    first: int
    cells: Cells
    held: NDArray[np.bool_]
    parts: tuple[Part, ...]


class Incomplete(Exception):
    """A page that must be there is not, or a rank could not be described."""


Holder = tuple[Shard, Group, Snapshot, RankInfo, EngineLayout]


def logical_cache(
    facts: Sequence[RankInfo], snapshots: Sequence[Snapshot], num_tokens: int, first_token: int = 0
) -> dict[str, Logical]:
    """Every field of the request, from `first_token`, as far as a decode step after `num_tokens` tokens needs it.

    Raises Incomplete.
    """
    by_rank = {rank.rank: rank for rank in facts}
    holders: dict[str, list[Holder]] = {}
    fields: dict[str, Field] = {}
    for snapshot in snapshots:
        rank = by_rank[snapshot.rank]
        if rank.layout is None:
            raise Incomplete(f"rank {rank.rank} could not be described: {rank.refusal}")
        layout = decode(rank.layout)
        fields.update(layout.field_by_name)
        for shard in layout.ranks[0].shards:
            group = layout.group_by_name[shard.geometry.group]
            holders.setdefault(shard.field, []).append((shard, group, snapshot, rank, layout))
    return {name: _assemble(fields[name], found, num_tokens, first_token) for name, found in holders.items()}


def _assemble(field: Field, holders: Sequence[Holder], num_tokens: int, first_token: int) -> Logical:
    _, group, _, rank, _ = holders[0]
    first, stop = _needed(field, group, rank, num_tokens, first_token)
    shape = [stop - first if axis.extent is None else axis.extent for axis in field.axes]
    cells = np.zeros([*shape, field.element_bytes], np.uint8)
    held = np.zeros(shape, np.bool_)
    parts = []
    for shard, group, snapshot, rank, layout in holders:
        where, addresses = _addresses(field, shard, group, snapshot, rank, layout, first, stop)
        found = snapshot.read((addresses[..., None] + np.arange(field.element_bytes)).ravel())
        found = found.reshape([*addresses.shape, field.element_bytes])
        cells[np.ix_(*where)], held[np.ix_(*where)] = found, True
        parts.append(Part(rank.rank, where, found))
    return Logical(field, first, cells, held, tuple(parts))


def _needed(field: Field, group: Group, rank: RankInfo, num_tokens: int, first_token: int) -> tuple[int, int]:
    """Half-open range of sequence indices that the token after `num_tokens` tokens looks at."""
    axis = field.sequence
    if axis is None:
        return 0, 1
    window, chunk = group.window_tokens, _group_facts(group, rank)[1]["chunk_tokens"]
    start = first_token if window is None else max(first_token, num_tokens - window)
    if chunk is not None:
        start = max(start, num_tokens // chunk * chunk)
    if start % axis.tokens_per_index:
        start += axis.tokens_per_index - start % axis.tokens_per_index
    first, stop = axis.indices_of(start, num_tokens)
    return first, max(first, stop)


def _addresses(
    field: Field,
    shard: Shard,
    group: Group,
    snapshot: Snapshot,
    rank: RankInfo,
    layout: EngineLayout,
    first: int,
    stop: int,
) -> tuple[tuple[NDArray[np.int64], ...], NDArray[np.int64]]:
    """Which coordinates the rank holds on each axis (counted from `first` on the sequence), and where each cell lies."""
    table = _page_table(group, snapshot, rank)
    where, pages, offsets = [], np.zeros(1, np.int64), np.zeros(1, np.int64)
    for axis in field.axes:
        mapped = shard.geometry.axis(axis.name)
        wanted = np.arange(first, stop) if axis.extent is None else np.arange(axis.extent)
        mine = wanted[mapped.owned.contains(wanted)]
        page, byte = mapped.locate(mapped.owned.to_local(mine))
        where.append(mine - first if axis.extent is None else mine)
        pages, offsets = pages[..., None] + page, offsets[..., None] + byte
    pages, offsets = pages[0], offsets[0]
    if pages.size and (pages.max() >= len(table) or (table[pages] == NULL_BLOCK).any()):
        raise Incomplete(
            f"field '{field.name}', rank {rank.rank}: needs logical pages {pages.min()} to {pages.max()}, the request has "
            f"{table.tolist()} (0: no page)"
        )
    page_ids = table[pages] if pages.size else pages
    base = layout.ranks[0].base_address(shard)
    return tuple(where), base + page_ids * shard.geometry.page_stride_bytes + offsets


def _page_table(group: Group, snapshot: Snapshot, rank: RankInfo) -> NDArray[np.int64]:
    """The group's pages of the request, in logical order; 0 where there is none."""
    index, facts = _group_facts(group, rank)
    blocks = list(snapshot.held.block_ids[index])
    if group.tokens_per_page is None:
        entry = -(-snapshot.held.num_tokens // facts["block_size"]) - 1 if facts["state_mode"] == "align" else 0
        blocks = blocks[entry : entry + 1]
    return np.array(blocks, dtype=np.int64)


def _group_facts(group: Group, rank: RankInfo) -> tuple[int, dict[str, Any]]:
    """The place of the group among the engine's, and what the engine said about it."""
    return next((i, facts) for i, facts in enumerate(rank.groups) if facts["name"] == group.name)


def first_difference(expected: Mapping[str, Logical], got: Mapping[str, Logical], tolerance: float = 0.0) -> str | None:
    """Where two caches differ first, in words; None when they agree.

    Bytes are compared, or, with a `tolerance`, float32 values relative to the largest in the field. A field that only one
    side has must be optional.
    """
    for name in sorted({*expected, *got}):
        left, right = expected.get(name), got.get(name)
        if left is None or right is None:
            only = left or right
            assert only is not None
            if not only.field.optional:
                return f"field '{name}' is on one side only"
            continue
        words = _difference(left, right, tolerance)
        if words is not None:
            return f"field '{name}': {words}"
    return None


def _difference(left: Logical, right: Logical, tolerance: float) -> str | None:
    if left.field.axes != right.field.axes or left.field.encoding != right.field.encoding:
        return f"{left.field} against {right.field}"
    if left.first != right.first or left.held.shape != right.held.shape:
        return f"cells from {left.first} {left.held.shape} against those from {right.first} {right.held.shape}"
    for side in (left, right):
        if not side.held.all():
            return f"{int((~side.held).sum())} of {side.held.size} cells are held by no rank"
    for part in right.parts:
        words = _part_difference(left, part, tolerance)
        if words is not None:
            return words
    return None


def _part_difference(expected: Logical, part: Part, tolerance: float) -> str | None:
    field, index = expected.field, np.ix_(*part.where)
    right = expected.cells[index]
    wrong = (right != part.cells).any(-1)
    if wrong.any() and len(expected.parts) > 1:
        for replica in expected.parts:
            cells, held = np.zeros_like(expected.cells), np.zeros_like(expected.held)
            cells[np.ix_(*replica.where)], held[np.ix_(*replica.where)] = replica.cells, True
            wrong &= (cells[index] != part.cells).any(-1) | ~held[index]
    if not wrong.any():
        return None
    a, b = _floats(field, right), _floats(field, part.cells)
    if tolerance:
        allowed = tolerance * max(1e-30, np.abs(_floats(field, expected.cells)).max(initial=0.0))
        wrong &= ~(np.abs(a - b) <= allowed)
        if not wrong.any():
            return None
    at = tuple(np.argwhere(wrong)[0])
    place = ", ".join(
        f"{axis.name} {int(held[i]) + (expected.first if axis.extent is None else 0)}"
        for axis, held, i in zip(field.axes, part.where, at, strict=True)
    )
    share = f"{100 * wrong.mean():.1f} % of its {wrong.size} cells"
    return f"rank {part.rank} differs in {share}, first at {place}: expected {a[at]:.8g}, got {b[at]:.8g}"


def _floats(field: Field, cells: Cells) -> NDArray[np.float64]:
    """Values of the cells, by the encoding's dtype; cells of another width count as bytes."""
    if field.element_bytes == 2:
        wide = np.zeros((*cells.shape[:-1], 4), np.uint8)
        wide[..., 2:] = cells  # bfloat16 is the upper half of a float32
        return wide.view(np.float32)[..., 0].astype(np.float64)
    if field.element_bytes == 4:
        return np.ascontiguousarray(cells).view(np.float32)[..., 0].astype(np.float64)
    return cells.astype(np.float64).sum(-1)
