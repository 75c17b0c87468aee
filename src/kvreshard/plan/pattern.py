"""Copy pattern of two pages: which bytes of a source page go to which bytes of a destination page.

A `Pattern` answers for one overlap of a source page and a destination page, for all fields of a transfer at once:

1. Refine every axis; a run of the page is one run of each axis, with their loops together.
2. Coalesce: a loop that continues the run on both sides lengthens it.
3. Fuse: fields that continue one another on both sides (K next to V, layers side by side) lengthen it too; repeat 2.
4. List the remaining loops as byte offsets, sorted by the source.

Post-condition, checked here: the runs have exactly the bytes of the cells that both sides share. Refused, as LayoutMismatch:
two pages that overlap in more than `MAX_NESTS` nests of loops or `MAX_RUNS` runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import LayoutMismatch
from kvreshard.plan.refine import Loop, Run

Int64s = NDArray[np.int64]
# Pages of real engines overlap in a few nests. These take a second or so, and a peer's layout may be made to have them.
MAX_NESTS = 1 << 15
MAX_RUNS = 1 << 22
# Of a run, and of each of its loops: numbers as Python has them.
RUN_BYTES = 200


class Bases(msgspec.Struct, frozen=True, eq=False):
    """Addresses of each field's first cell in page 0, shape (num_fields,).

    `region`: equal numbers where both sides' regions are the same, so that runs of two regions are never joined.
    """

    src: Int64s
    dst: Int64s
    region: Int64s


class Pattern(msgspec.Struct, frozen=True, eq=False):
    """Runs listed flat: offsets within the page and lengths, shape (num_runs,); pages relative to the first, same shape."""

    bases: Bases
    runs: tuple[Run, ...]
    src_offsets: Int64s
    dst_offsets: Int64s
    lengths: Int64s
    src_pages: Int64s
    dst_pages: Int64s

    @property
    def num_bytes(self) -> int:
        """Bytes that the pattern moves over all its fields."""
        return int(np.add.reduce(self.lengths)) * len(self.bases.src)

    def by_page(self) -> Iterator[tuple[int, int, Pattern]]:
        """The runs of each pair of pages that has some: the page of either side, and a list of them alone."""
        if not len(self.lengths):
            return
        order = np.lexsort((self.dst_pages, self.src_pages))
        src_pages, dst_pages = self.src_pages[order], self.dst_pages[order]
        edges = 1 + np.flatnonzero((src_pages[1:] != src_pages[:-1]) | (dst_pages[1:] != dst_pages[:-1]))
        columns = self.src_offsets, self.dst_offsets, self.lengths, self.src_pages, self.dst_pages
        for rows in np.split(order, edges):
            listed = (column[rows] for column in columns)
            yield int(self.src_pages[rows[0]]), int(self.dst_pages[rows[0]]), Pattern(self.bases, (), *listed)

    def cached_bytes(self) -> int:
        """About what it takes in memory."""
        nests = RUN_BYTES * sum(1 + len(run.loops) for run in self.runs)
        columns = (self.src_offsets, self.dst_offsets, self.lengths, self.src_pages, self.dst_pages)
        return nests + sum(column.nbytes for column in columns) + 3 * self.bases.src.nbytes


def coalesce(length: int, loops: Sequence[Loop]) -> tuple[int, tuple[Loop, ...]]:
    """Lengthen a run by every loop that continues it on both sides; join loops that continue one another.

    Four channels of 2 bytes, and three heads that lie side by side at the source only:

    >>> coalesce(2, [Loop(4, 2, 2), Loop(3, 8, 100)])
    (8, (Loop(count=3, src_step=8, dst_step=100),))
    """
    left = [loop for loop in loops if loop.count > 1]
    while True:
        grown = next((loop for loop in left if loop.src_step == length and loop.dst_step == length), None)
        if grown is None:
            break
        left.remove(grown)
        length *= grown.count
    left.sort(key=lambda loop: (loop.src_step, loop.dst_step))
    joined: list[Loop] = []
    for loop in left:
        last = joined[-1] if joined else None
        if last and loop.src_step == last.src_step * last.count and loop.dst_step == last.dst_step * last.count:
            joined[-1] = Loop(last.count * loop.count, last.src_step, last.dst_step)
        else:
            joined.append(loop)
    return length, tuple(joined)


def fuse(bases: Bases, length: int) -> Bases | None:
    """Join fields whose bases lie `length` apart on both sides; None unless all join in equal numbers.

    K and V of two layers, of 16 bytes each: one run of 32 bytes at 0, and one at 100.

    >>> region = np.zeros(4, dtype=np.int64)
    >>> fuse(Bases(np.array([0, 16, 100, 116]), np.array([500, 516, 300, 316]), region), 16).src
    array([  0, 100])
    """
    if len(bases.src) < 2:
        return None
    src, dst, region = bases.src, bases.dst, bases.region
    apart = src[1:] - src[:-1]
    if np.minimum.reduce(apart) <= 0:
        order = np.lexsort((dst, src))
        src, dst, region = src[order], dst[order], region[order]
        apart = src[1:] - src[:-1]
    continues = apart == length
    if not np.logical_or.reduce(continues):
        return None
    continues = continues & (dst[1:] == dst[:-1] + length) & (region[1:] == region[:-1])
    if not np.logical_or.reduce(continues):
        return None
    starts = np.flatnonzero(np.concatenate([[True], ~continues]))
    sizes = np.diff(np.append(starts, len(src)))
    if sizes[0] == 1 or (sizes != sizes[0]).any():
        return None
    return Bases(src[starts], dst[starts], region[starts])


def build_pattern(bases: Bases, element_bytes: int, runs_per_axis: Sequence[Sequence[Run]]) -> Pattern:
    """The pattern of one overlap from the runs along each axis."""
    num_cells = prod([sum([run.num_repeats for run in along]) for along in runs_per_axis])
    num_nests = prod(map(len, runs_per_axis))
    _check_number("nests of loops", num_nests, MAX_NESTS)
    runs = []
    for parts in product(*runs_per_axis):
        length, loops = coalesce(element_bytes, [loop for part in parts for loop in part.loops])
        runs.append(
            Run(
                sum([part.src_page for part in parts]),
                sum([part.dst_page for part in parts]),
                sum([part.src_byte for part in parts]),
                sum([part.dst_byte for part in parts]),
                length,
                loops,
            )
        )
    total = num_cells * element_bytes * len(bases.src)
    while len({run.length for run in runs}) == 1:
        fused = fuse(bases, runs[0].length)
        if fused is None:
            break
        factor = len(bases.src) // len(fused.src)
        bases = fused
        grown = [coalesce(run.length * factor, run.loops) for run in runs]
        runs = [
            Run(run.src_page, run.dst_page, run.src_byte, run.dst_byte, length, loops)
            for run, (length, loops) in zip(runs, grown, strict=True)
        ]
    _check_number("runs", sum([run.num_repeats for run in runs]), MAX_RUNS)
    pattern = _flatten(bases, tuple(runs))
    if pattern.num_bytes != total:
        raise AssertionError(f"pattern of {pattern.num_bytes} bytes for cells of {total} bytes")  # a bug, never input
    return pattern


def _check_number(what: str, number: int, limit: int) -> None:
    if number > limit:
        raise LayoutMismatch(
            f"a page of one engine and a page of the other overlap in {number} {what}; more than {limit} are refused: use page "
            "sizes and layouts that are more alike"
        )


def _flatten(bases: Bases, runs: tuple[Run, ...]) -> Pattern:
    if len(runs) == 1 and not runs[0].loops:
        run = runs[0]
        listed = (run.src_byte, run.dst_byte, run.length, run.src_page, run.dst_page)
        return Pattern(bases, runs, *np.array(listed, dtype=np.int64)[:, None])
    parts: list[Int64s] = []
    for run in runs:
        src, dst = np.array([run.src_byte], dtype=np.int64), np.array([run.dst_byte], dtype=np.int64)
        for loop in reversed(run.loops):
            steps = np.arange(loop.count, dtype=np.int64)
            src = (src[:, None] + steps * loop.src_step).reshape(-1)
            dst = (dst[:, None] + steps * loop.dst_step).reshape(-1)
        constant = np.ones_like(src)
        parts.append(np.stack([src, dst, constant * run.length, constant * run.src_page, constant * run.dst_page]))
    table = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), dtype=np.int64)
    table = table[:, np.lexsort((table[0], table[3]))]
    return Pattern(bases, runs, *table)
