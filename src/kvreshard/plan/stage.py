"""For one request and a staged lane: what is read into the staging buffer, and how is it permuted from there?

A slot is what one piece (an overlap of two pages, of one field) needs from the source, box after box, without gaps, so that
neighbouring pages of a fresh table become one large read. A batch is as many slots as the buffer holds:

1. Cut and look up pieces as `bind` does; sort them by source page.
2. Per group of pieces with one pattern, take the boxes that are read as one piece (`cost.find_boxes`).
3. Reads: every box of every piece, merged where both sides continue, and that for every field.
4. Moves: per run of the pattern, a strided copy from slots to destination pages, as loops, not as a list.

Staging addresses are offsets from the start of the buffer; whoever owns the buffer adds its address.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.model.errors import BindError
from kvreshard.model.tables import PageTable
from kvreshard.plan.bind import CutLane, Pieces, distinct_overlaps, page_ids, select
from kvreshard.plan.copies import CopyList
from kvreshard.plan.cost import Boxes, find_boxes
from kvreshard.plan.lane import Lane
from kvreshard.plan.pattern import Pattern
from kvreshard.plan.refine import Loop, Strip, fold

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """A strided local copy: for field f, piece k and every step of `loops` (src_step in the slot, dst_step in the page)

        staging[(f * num_pieces + k) * slot_bytes + slot_offset + ...] -> dst_bases[f] + dst_pages[k] + dst_offset + ...

    `length` bytes at a time. `dst_pages`: byte offsets of pages, shape (num_pieces,).
    """

    length: int
    loops: tuple[Loop, ...]
    slot_offset: int
    dst_offset: int
    slot_bytes: int
    dst_bases: Int64s
    dst_pages: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One filling of the staging buffer. `reads.dst_address` are offsets in it; `num_bytes` of cache come out of it."""

    reads: CopyList
    moves: tuple[Move, ...]
    num_bytes: int


def stage_pieces(cut: CutLane, buffer_bytes: int) -> Iterator[Batch]:
    """Batches of what a lane of a checked request moves. Raises BindError if one slot does not fit the buffer."""
    lane, pieces = cut.lane, cut.pieces
    overlaps, which = distinct_overlaps(pieces)
    for index, overlap in enumerate(overlaps):
        pattern = lane.pattern(overlap)
        if not len(pattern.lengths):
            continue
        boxes = find_boxes(pattern, 0 if lane.choice is None else lane.choice.max_gap_bytes)
        if boxes.slot_bytes > buffer_bytes:
            raise BindError(
                f"fields {lane.fields[0]}, ...: one page needs {boxes.slot_bytes} bytes of staging, the buffer has "
                f"{buffer_bytes}; give a larger buffer or read directly"
            )
        chosen = np.flatnonzero(which == index)
        yield from _batches(lane, pattern, boxes, select(pieces, chosen), cut.src, cut.dst, buffer_bytes)


def _batches(
    lane: Lane, pattern: Pattern, boxes: Boxes, pieces: Pieces, src: PageTable, dst: PageTable, buffer_bytes: int
) -> Iterator[Batch]:
    same = np.zeros(len(pieces.length), dtype=np.int64)
    src_pages = page_ids(src, lane.src_span, pieces.src_span, [boxes.src_pages], same) * lane.src_page_stride_bytes
    dst_pages = page_ids(dst, lane.dst_span, pieces.dst_span, [pattern.dst_pages], same) * lane.dst_page_stride_bytes
    order = np.argsort(src_pages[:, 0], kind="stable")
    src_pages, dst_pages = src_pages[order], dst_pages[order]
    steps = _steps(pattern, boxes)
    pieces_each = min(len(order), max(1, buffer_bytes // boxes.slot_bytes))
    fields_each = max(1, buffer_bytes // (boxes.slot_bytes * pieces_each))
    for first in range(0, len(order), pieces_each):
        part = slice(first, first + pieces_each)
        # Fields differ by their bases only: what is read of one is found once.
        at_slot = np.arange(len(src_pages[part]), dtype=np.int64)[:, None] * boxes.slot_bytes + boxes.slot_offsets
        at_source = src_pages[part] + boxes.src_offsets
        lengths = np.broadcast_to(boxes.lengths, at_source.shape)
        reads = _join(at_source.reshape(-1), at_slot.reshape(-1), lengths.reshape(-1))
        for field in range(0, len(pattern.bases.src), fields_each):
            fields = slice(field, field + fields_each)
            yield _batch(lane, pattern, boxes, steps, fields, reads, dst_pages[part])


def _batch(
    lane: Lane,
    pattern: Pattern,
    boxes: Boxes,
    steps: list[tuple[int, int, Strip]],
    fields: slice,
    reads: tuple[Int64s, Int64s, Int64s],
    dst_pages: Int64s,
) -> Batch:
    src_bases, dst_bases = pattern.bases.src[fields], pattern.bases.dst[fields]
    (source, slot, length), num_pieces = reads, len(dst_pages)
    slots = np.arange(len(src_bases), dtype=np.int64) * (num_pieces * boxes.slot_bytes)
    copies = CopyList(
        lane.src_rank,
        lane.dst_rank,
        (src_bases[:, None] + source).reshape(-1),
        (slots[:, None] + slot).reshape(-1),
        np.tile(length, len(src_bases)),
    )
    moves = tuple(
        Move(
            run_bytes,
            strip.loops,
            strip.src_byte,
            strip.dst_byte,
            boxes.slot_bytes,
            dst_bases,
            dst_pages[:, column if dst_pages.shape[1] > 1 else 0],
        )
        for run_bytes, column, strip in steps
    )
    return Batch(copies, moves, len(src_bases) * num_pieces * int(pattern.lengths.sum()))


def _join(src: Int64s, dst: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Join neighbouring copies that continue on both sides."""
    apart = (src[1:] != src[:-1] + lengths[:-1]) | (dst[1:] != dst[:-1] + lengths[:-1])
    starts = np.flatnonzero(np.concatenate([[True], apart]))
    return src[starts], dst[starts], np.add.reduceat(lengths, starts)


def _steps(pattern: Pattern, boxes: Boxes) -> list[tuple[int, int, Strip]]:
    """The pattern's runs from slot to page, folded to loops: (length, column of the destination page, strip)."""
    found: list[tuple[int, int, Strip]] = []
    for length in np.unique(pattern.lengths).tolist():
        for page in np.unique(pattern.dst_pages).tolist():
            chosen = np.flatnonzero((pattern.lengths == length) & (pattern.dst_pages == page))
            runs = zip(boxes.run_slot_offsets[chosen].tolist(), pattern.dst_offsets[chosen].tolist(), strict=True)
            strips = fold([Strip(0, page, slot, dst, ()) for slot, dst in runs])
            found += [(length, int(chosen[0]), strip) for strip in strips] if len(chosen) else []
    return found
