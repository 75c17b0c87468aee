"""What is the weighted sum of many strided cells modulo 2^61 - 1, at the speed of memory?

The sum is bilinear: over rows (sequence coordinate and outer axes), and over columns (the packed axis and what is short
beside it). Both contractions are float64 matrix products over limbs, exact because no sum reaches 2^53:

1. Columns: units of 8, 16 or 32 bits times the limbs of the column weights; limbs are as wide as the number of columns allows.
2. Rows: each result, below 2^53, is cut into 26 and 27 bits and multiplied by limbs of 13 bits of at most 2^13 row weights.
3. The few numbers that remain per chunk are added up as integers; `finish` puts the limbs together.

Chunks are as large as the cache holds; row weights are computed once per chunk and used for all congruent fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from math import prod

import numpy as np
from numpy.typing import NDArray

from kvreshard.tools.interior import Piece
from kvreshard.tools.memory import Memory
from kvreshard.tools.modular import (
    EXACT_BITS,
    PRIME,
    Float64s,
    Residues,
    limbs,
    multiply,
    product,
    reduce,
    total,
    totals,
)
from kvreshard.tools.pages import Rows
from kvreshard.transport.words import Words

Int64s = NDArray[np.int64]

# Units per chunk: 128 KB of words and their float64 copy of 256 KB stay in a core's second-level cache.
CHUNK_UNITS = 1 << 15
# Column sums of several fields are put to their row weights at once, which spares short calls.
SUMS_TOGETHER = 1 << 15
ROW_LIMB_BITS = 13
MAX_ROWS = 1 << 13
MAX_ROW_LIMBS = -(-61 // ROW_LIMB_BITS)
SPLIT_BITS = EXACT_BITS - ROW_LIMB_BITS - 13  # 27: the lower part of a column sum; the upper part has 26
# Sums of below 2^53 in int64.
CHUNKS_PER_FLUSH = 1 << 9
# Shorter rows are joined with a neighbouring axis: a matrix product of few columns is all overhead.
SHORT_ROW_UNITS, LONG_ROW_UNITS = 48, 256


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Cells as one strided view: a list of row addresses, then outer and inner loops, largest step first.

    `row_weights`: one array per axis, each broadcasts to (num_rows, *outer counts). `columns`: weights of the units of a
    row, shape (prod(inner counts),).
    """

    address: Int64s
    outer: Loops
    inner: Loops
    row_weights: tuple[Residues, ...]
    columns: Residues
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class Loops:
    """A nest of loops in memory, steps in bytes."""

    counts: tuple[int, ...]
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockSum:
    """Per field the weighted sum of values; for all of them alike the weighted sum of ones per byte, and bytes per field."""

    values: tuple[int, ...]
    presence: int
    num_bytes: int


def make_block(rows: Rows, row_weights: Residues, pieces: Sequence[Piece], packed: Piece) -> Block:
    """The block of some rows (weights in the shape of their coordinates), a piece of each other axis and a packed one."""
    inner, outer = [packed], sorted(pieces, key=lambda piece: piece.steps)
    units = packed.weights.size
    while outer and units < SHORT_ROW_UNITS and units * outer[0].weights.size <= LONG_ROW_UNITS:
        units *= outer[0].weights.size
        inner.append(outer.pop(0))
    inner_loops, inner_weights = _arrange([(piece.weights, piece.steps) for piece in inner])
    # Rows lie anywhere: as a loop they come first, with a step beyond all others.
    loops, spread = _arrange(
        [(row_weights, (1 << 62, *rows.steps)), *((piece.weights, piece.steps) for piece in outer)]
    )
    return Block(
        rows.address + packed.offset + sum(piece.offset for piece in pieces),
        Loops(loops.counts[1:], loops.steps[1:]),
        inner_loops,
        tuple(spread),
        np.broadcast_to(product(inner_weights), inner_loops.counts).reshape(-1),
        packed.unit_bytes,
    )


def _arrange(axes: Sequence[tuple[Residues, tuple[int, ...]]]) -> tuple[Loops, list[Residues]]:
    """All loops of all axes, largest step first, and each axis' weights as an array that broadcasts to them."""
    loops = [(axis, number) for axis, (_, steps) in enumerate(axes) for number in range(len(steps))]
    loops.sort(key=lambda loop: -abs(axes[loop[0]][1][loop[1]]))
    counts = tuple(axes[axis][0].shape[number] for axis, number in loops)
    spread = []
    for axis, (weights, _) in enumerate(axes):
        own = weights.transpose([number for owner, number in loops if owner == axis])
        spread.append(
            own.reshape([count if owner == axis else 1 for (owner, _), count in zip(loops, counts, strict=True)])
        )
    return Loops(counts, tuple(axes[axis][1][number] for axis, number in loops)), spread


def sum_block(block: Block, bases: Int64s, memory: Memory) -> BlockSum:
    """The sums of one block, for a field at each of `bases`."""
    units = len(block.columns)
    column_bits = EXACT_BITS - 8 * block.unit_bytes - (units - 1).bit_length()
    columns = limbs(block.columns, column_bits)
    counts = (len(block.address), *block.outer.counts)
    views, order = _views(block, bases, memory)
    tally = _Tally(len(bases), columns.shape[1], column_bits)
    max_rows = max(1, min(MAX_ROWS, CHUNK_UNITS // units))
    chunk = np.empty(max_rows * units, dtype=np.float64)
    together = max(1, min(len(views), SUMS_TOGETHER // (max_rows * columns.shape[1])))
    presence = 0
    for tile in _tiles(counts, max_rows):
        row_weights = _row_weights(block, tile)
        presence += total(row_weights)
        row_limbs = limbs(row_weights, ROW_LIMB_BITS)
        sums = np.empty((together, len(row_limbs), columns.shape[1]), dtype=np.float64)
        flat = chunk[: len(row_limbs) * units].reshape(-1, units)
        at = _pick(order[tile[0]])
        for first in range(0, len(views), together):
            part = views[first : first + together]
            for number, view in enumerate(part):
                found = view.take(at, tile[1:])
                np.copyto(flat.reshape(found.shape), found)
                np.matmul(flat, columns, out=sums[number])
            tally.add(first, sums[: len(part)], row_limbs)
    ones = sum(1 << (8 * byte) for byte in range(block.unit_bytes))
    presence = presence * total(block.columns) * ones % PRIME
    return BlockSum(tally.finish(), presence, prod(counts) * units * block.unit_bytes)


class _Tally:
    """Sums over chunks: per field an integer for each pair of a column limb, cut in two, and a row limb."""

    def __init__(self, num_fields: int, num_columns: int, column_bits: int) -> None:
        self._scales = np.array(
            [
                pow(2, part * SPLIT_BITS + row * ROW_LIMB_BITS + column * column_bits, PRIME)
                for part in range(2)
                for row in range(MAX_ROW_LIMBS)
                for column in range(num_columns)
            ],
            dtype=np.uint64,
        )
        self._pending = np.zeros((2, num_fields, MAX_ROW_LIMBS, num_columns), dtype=np.int64)
        self._num_pending = 0
        self._values = [0] * num_fields

    def add(self, first: int, sums: Float64s, row_limbs: Float64s) -> None:
        """Adds the product of row weights and `sums`: (fields from `first` on, rows, column limbs), integers below 2^53."""
        if first == 0:
            self._num_pending += 1
            if self._num_pending > CHUNKS_PER_FLUSH:
                self._flush()
        upper = np.floor(sums * 2.0**-SPLIT_BITS)
        lower = sums - upper * 2.0**SPLIT_BITS
        for number, part in enumerate((lower, upper)):
            exact = np.matmul(row_limbs.T, part)
            self._pending[number, first : first + len(sums), : row_limbs.shape[1]] += exact.astype(np.int64)

    def finish(self) -> tuple[int, ...]:
        """The sums modulo the prime."""
        self._flush()
        return tuple(self._values)

    def _flush(self) -> None:
        per_field = self._pending.swapaxes(0, 1).reshape(len(self._values), -1).astype(np.uint64)
        more = totals(multiply(reduce(per_field), self._scales))
        self._values = [(value + extra) % PRIME for value, extra in zip(self._values, more, strict=True)]
        self._pending[:] = 0
        self._num_pending = 0


def _row_weights(block: Block, tile: tuple[slice, ...]) -> Residues:
    """The weights of a tile's rows, flat."""
    cut = [
        weights[tuple(part if size > 1 else slice(None) for part, size in zip(tile, weights.shape, strict=True))]
        for weights in block.row_weights
    ]
    return product(cut).reshape(-1)


def _views(block: Block, bases: Int64s, memory: Memory) -> tuple[list[Words], Int64s]:
    """Per field the words of every place where a row may start, and which of these places are rows, in order."""
    first = int(block.address.min())
    apart = block.address - first
    step = int(np.gcd.reduce(apart)) or 1
    order = apart // step
    counts = (int(order.max()) + 1, *block.outer.counts, *block.inner.counts)
    steps = (step, *block.outer.steps, *block.inner.steps)
    return [memory.words(base + first, block.unit_bytes, counts, steps) for base in bases.tolist()], order


def _pick(order: Int64s) -> slice | Int64s:
    """Rows as an index: a slice where they are evenly spaced, which reads memory without gathering it first."""
    if len(order) == 1:
        return slice(int(order[0]), int(order[0]) + 1)
    step = int(order[1] - order[0])
    if step > 0 and (np.diff(order) == step).all():
        return slice(int(order[0]), int(order[-1]) + 1, step)
    return order


def _tiles(counts: tuple[int, ...], max_rows: int) -> Iterator[tuple[slice, ...]]:
    """The box of `counts` in tiles of at most `max_rows` cells, longest along the last axes."""
    sizes: list[int] = []
    room = max_rows
    for count in reversed(counts):
        sizes.insert(0, max(1, min(count, room)))
        room //= sizes[0]
    starts = [range(0, count, size) for count, size in zip(counts, sizes, strict=True)]
    for corner in combinations(*starts):
        yield tuple(slice(low, min(low + size, count)) for low, size, count in zip(corner, sizes, counts, strict=True))
