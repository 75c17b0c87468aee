"""The digest of cached values in logical coordinates, which agrees across layouts exactly when the bytes do.

    digest = sum over rows, units of a row: R[field, row] * U[unit] * (value + C)        modulo 2^64

A row is a token, or a coordinate of a state's first axis. A unit is two bytes of an element, or one where elements have an odd
size, read as a signed number; its number counts the units of a row in logical order, whatever the rank holds of them. R, U and C are
pseudo-random numbers of 64 bits under a key. Nothing in it depends on where a cell lies, so layouts agree; it is a sum, so parts add up.
A difference is missed once in 2^44: docs/design/0006-digest.md.

- `digest_transfers`: per transfer and field, from one side's own memory and address maps. Each destination rank's cells are in exactly one
  of its transfers, so replicas count once per rank that has them.
- `digest_cells`: some cells of one rank as one sum, for whoever asks about a part of a transfer.

Refused with BindError: tables and intervals that do not fit (`rows`), a key of a wrong size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import BindError
from kvreshard.model.tables import Request, Tokens
from kvreshard.plan.transfer import RankTransfer
from kvreshard.tools.cells import Cells, Side, of_transfer
from kvreshard.tools.memory import Memory
from kvreshard.tools.rows import Intervals, Rows, Tables, inner_axes, locate, page_rows
from kvreshard.tools.verdict import Digest, Part

Int64s = NDArray[np.int64]

MAX_KEY_BYTES = 64
# Units that are read at once: 256 KiB stay in a core's second-level cache.
UNITS_AT_ONCE = 1 << 17


def digest_transfers(
    transfers: Iterable[RankTransfer],
    side: Side,
    request: Request,
    memory: Memory,
    key: bytes,
    fields: Collection[str] | None = None,
) -> dict[Part, Digest]:
    """The digest of every field of every transfer, over the cells that the transfer moves for the request.

    A side needs its own block tables only. `memory` holds that side's ranks of these transfers. `fields`: only these. A transfer
    whose group has no intervals is left out.
    """
    tables = request.src_tables if side == "src" else request.dst_tables
    found = dict[Part, Digest]()
    for transfer in transfers:
        cells, name = of_transfer(transfer, side).only(fields), transfer.dst_group.name
        if name not in request.intervals:
            raise BindError(f"group '{name}': no token intervals; give an empty list to digest nothing")
        intervals = tuple((int(start), int(stop)) for start, stop in request.intervals[name])
        if not intervals:
            continue
        box = ", ".join(f"{axis.name} {axis.chosen}" for axis in transfer.axes)
        digests = _digest_fields(cells, tables, {cells.group.name: intervals}, memory, key)
        for field, digest in zip(cells.fields, digests, strict=True):
            found[Part(field, transfer.src_rank, transfer.dst_rank, box, intervals)] = digest
    return found


def digest_cells(cells: Cells, tables: Tables, intervals: Intervals, memory: Memory, key: bytes) -> Digest:
    """One digest over all fields of `cells`, for the tokens of its group in `intervals`."""
    return sum(_digest_fields(cells, tables, intervals, memory, key), Digest(0, 0))


def cut_tokens(intervals: tuple[Tokens, ...], size: int) -> Iterator[tuple[Tokens, ...]]:
    """The intervals, cut at the multiples of `size`; pieces of one multiple together."""
    together: dict[int, list[Tokens]] = {}
    for start, stop in intervals:
        for number in range(start // size, -(-stop // size)):
            piece = (max(start, number * size), min(stop, (number + 1) * size))
            together.setdefault(number, []).append(piece)
    yield from (tuple(pieces) for pieces in together.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """What a row holds: `runs` of adjacent units, byte offsets of shape (m,), and the `weights` of their units, shape (m, k)."""

    runs: Int64s
    weights: Int64s
    unit_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.weights.size * self.unit_bytes


def _digest_fields(cells: Cells, tables: Tables, intervals: Intervals, memory: Memory, key: bytes) -> list[Digest]:
    """The digest of each of some congruent fields."""
    row, presence = _describe_row(cells, key), weights(key, "presence", np.zeros(1, np.int64))
    at_once = max(1, UNITS_AT_ONCE // max(1, row.weights.size))
    values, num_rows = [0] * len(cells.fields), 0
    for rows in page_rows(cells, tables, intervals):
        num_rows += len(rows.offsets)
        for number, (field, base) in enumerate(zip(cells.fields, cells.bases, strict=True)):
            row_weights = _weigh_rows(rows, field, key)
            for first in range(0, len(rows.offsets) if row.weights.size else 0, at_once):
                part = slice(first, first + at_once)
                sums = memory.weighted_sums(base + rows.offsets[part], row.runs, row.weights, row.unit_bytes)
                values[number] += int((row_weights[part] * (sums + presence * row.weights.sum())).sum())
    return [Digest(value % 2**64, num_rows * row.num_bytes) for value in values]


def _describe_row(cells: Cells, key: bytes) -> _Row:
    unit_bytes = 2 if cells.element_bytes % 2 == 0 else 1
    offsets = numbers = np.zeros(1, dtype=np.int64)
    for axis in inner_axes(cells):
        coordinates = np.arange(*axis.bounds(), dtype=np.int64)
        offsets = (offsets[:, None] + locate(axis, coordinates)).reshape(-1)
        numbers = (numbers[:, None] * (axis.extent or 1) + coordinates).reshape(-1)
    inside = np.arange(cells.element_bytes // unit_bytes, dtype=np.int64)
    offsets = (offsets[:, None] + inside * unit_bytes).reshape(-1)
    numbers = (numbers[:, None] * len(inside) + inside).reshape(-1)
    order = np.argsort(offsets, kind="stable")
    offsets, unit_weights = offsets[order], weights(key, "unit", numbers[order])
    ends = np.flatnonzero(np.diff(offsets) != unit_bytes) + 1
    length = int(np.gcd.reduce([len(offsets), *ends.tolist()])) or 1
    return _Row(offsets[::length], unit_weights.reshape(-1, length), unit_bytes)


def _weigh_rows(rows: Rows, field: str, key: bytes) -> Int64s:
    if rows.position is None:
        return weights(key, f"row\0{field}", rows.coordinates)
    return weights(key, f"state\0{rows.position}\0{field}", rows.coordinates)


def weights(key: bytes, role: str, numbers: Int64s) -> Int64s:
    """Pseudo-random numbers of 64 bits, same shape: SplitMix64 of the numbers, from a seed that is BLAKE2b of the role under the key."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise BindError(f"digest key of {len(key)} bytes; both sides need one key of 1 to {MAX_KEY_BYTES} bytes")
    seed = hashlib.blake2b(role.encode(), digest_size=8, key=key, person=b"kvreshard-digest").digest()
    mixed = np.frombuffer(seed, dtype="<u8") + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Int64s = (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
    return found
