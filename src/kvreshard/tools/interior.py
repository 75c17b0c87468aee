"""What does a page hold per sequence coordinate, as loops over memory with a weight for each step?

The axes with an end become `Piece`s, strided and weighted:

1. An ordinary axis is listed, located and cut into strips; the weight belongs to the coordinate.
2. The last one is the packed axis. It is looked at as bytes, byte q = coordinate * element_bytes + byte of the element, and
   four bytes make a word: byte q weighs 256^(q mod 4) times the weight of word q div 4. Whole words that lie together are
   read as one 32-bit number; elsewhere the unit is the element, or its largest power of two up to 4 bytes.
3. A field without any such axis has a packed axis of one coordinate.

A weight belongs to the word, not to how it is read: both readings give the same sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

import numpy as np
from numpy.typing import NDArray

from kvreshard.tools.cells import Cells, Cut
from kvreshard.tools.modular import Residues, multiply
from kvreshard.tools.strips import strips
from kvreshard.tools.weights import Role, Weights

Int64s = NDArray[np.int64]

WORD_BYTES = 4
# Longer rows are cut: 256 words keep limbs of 13 bits, and the float64 copy of a chunk of rows in the cache.
MAX_UNITS_PER_PIECE = 256


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part of one axis: `weights` of shape loop counts, `steps` in bytes, the first one `offset` bytes from the row.

    `unit_bytes`: how much is read at each step; 0 on an axis that is not the packed one.
    """

    offset: int
    steps: tuple[int, ...]
    weights: Residues
    unit_bytes: int = 0


def ordinary_pieces(cut: Cut, weights: Weights) -> list[Piece]:
    """Strips of an axis other than the packed one."""
    coordinates = np.arange(*cut.bounds(), dtype=np.int64)
    _, offsets = cut.mapped.locate(cut.mapped.owned.to_local(coordinates))
    found = weights.along(Role.AXIS, cut.name, coordinates)
    return [
        Piece(int(offsets[s.first]), s.steps, found[s.first : s.first + s.size].reshape(s.counts))
        for s in strips(offsets)
    ]


def packed_pieces(cells: Cells, weights: Weights) -> list[Piece]:
    """Strips of the packed axis, each of at most `MAX_UNITS_PER_PIECE` units."""
    pieces = []
    name = cells.bounded[-1].name if cells.bounded else ""
    for position, offsets, unit in _units(cells):
        word = weights.along(Role.WORD, name, position // WORD_BYTES)
        scale = np.array([1 << (8 * byte) for byte in range(WORD_BYTES)], dtype=np.uint64)[position % WORD_BYTES]
        found = multiply(word, scale) if unit < WORD_BYTES else word
        for low in range(0, len(offsets), MAX_UNITS_PER_PIECE):
            part = offsets[low : low + MAX_UNITS_PER_PIECE]
            for s in strips(part):
                of_strip = found[low + s.first : low + s.first + s.size].reshape(s.counts)
                pieces.append(Piece(int(part[s.first]), s.steps, of_strip, unit))
    return pieces


def _units(cells: Cells) -> Iterator[tuple[Int64s, Int64s, int]]:
    """(byte positions on the packed axis, byte offsets in memory, bytes per unit) of all units."""
    element = cells.element_bytes
    start, stop = cells.bounded[-1].bounds() if cells.bounded else (0, 1)
    coordinates = np.arange(start, stop, dtype=np.int64)
    offsets = np.zeros_like(coordinates)
    if cells.bounded:
        mapped = cells.bounded[-1].mapped
        _, offsets = mapped.locate(mapped.owned.to_local(coordinates))
    unit = gcd(element, WORD_BYTES)
    inside = np.arange(0, element, unit, dtype=np.int64)
    position = (coordinates[:, None] * element + inside).reshape(-1)
    at = (offsets[:, None] + inside).reshape(-1)
    if unit == WORD_BYTES:
        yield position, at, unit
        return
    per_word = WORD_BYTES // unit
    head = min(len(position), int(-position[0] // unit) % per_word)
    body = (len(position) - head) // per_word * per_word
    words = at[head : head + body].reshape(-1, per_word)
    together = body > 0 and bool((np.diff(words, axis=1) == unit).all())
    if not together:
        yield position, at, unit
        return
    yield position[head : head + body : per_word], np.ascontiguousarray(words[:, 0]), WORD_BYTES
    tail = head + body
    for part in (slice(0, head), slice(tail, None)):
        if len(position[part]):
            yield position[part], at[part], unit
