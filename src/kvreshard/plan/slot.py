"""What of a source page is read into the staging buffer, and how does it go on from there?

A slot is what one piece (an overlap of two pages, of one field) needs from the source, box after box, without gaps, so that
neighbouring pages of a fresh table become one large read. It is found once per overlap of a lane:

1. `find_boxes` joins the runs of a pattern over gaps that are cheaper read than left out.
2. `make_slot` folds the runs from slot to page into loops: `Step`s.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.plan.pattern import Pattern
from kvreshard.plan.refine import Loop, Strip, fold

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """What is read as one piece at the source, per overlap: source offsets and lengths, and where each lies in a staging slot."""

    src_offsets: Int64s
    lengths: Int64s
    src_pages: Int64s
    slot_offsets: Int64s
    run_slot_offsets: Int64s

    @property
    def slot_bytes(self) -> int:
        return int(self.lengths.sum())


def find_boxes(pattern: Pattern, max_gap_bytes: int) -> Boxes:
    """Merge a pattern's runs, which are sorted by source page and offset, over gaps of at most `max_gap_bytes`.

    Bytes in a gap are read and left in the slot: cheaper than a copy of their own (`CostModel.max_gap_bytes`).
    """
    src, length, page = pattern.src_offsets, pattern.lengths, pattern.src_pages
    apart = (src[1:] - src[:-1] - length[:-1] > max_gap_bytes) | (page[1:] != page[:-1])
    starts = np.flatnonzero(np.concatenate([[True], apart]))
    box_of = np.cumsum(np.concatenate([[True], apart])) - 1
    ends = np.concatenate([starts[1:], [len(src)]]) - 1
    lengths = src[ends] + length[ends] - src[starts]
    slot_offsets = np.cumsum(lengths) - lengths
    return Boxes(src[starts], lengths, page[starts], slot_offsets, slot_offsets[box_of] + src - src[starts][box_of])


@dataclass(frozen=True, slots=True)
class Step:
    """Runs of `length` bytes from a slot to the page that is `column` of the pattern's destination pages, by loops."""

    length: int
    column: int
    slot_offset: int
    dst_offset: int
    loops: tuple[Loop, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """Boxes to read and steps to permute them; `copied_bytes` of one field come out of it."""

    boxes: Boxes
    steps: tuple[Step, ...]
    copied_bytes: int


def make_slot(pattern: Pattern, max_gap_bytes: int) -> Slot:
    """The slot of one overlap, which must not be empty."""
    boxes = find_boxes(pattern, max_gap_bytes)
    found: list[Step] = []
    for length in np.unique(pattern.lengths).tolist():
        for page in np.unique(pattern.dst_pages).tolist():
            chosen = np.flatnonzero((pattern.lengths == length) & (pattern.dst_pages == page))
            runs = zip(boxes.run_slot_offsets[chosen].tolist(), pattern.dst_offsets[chosen].tolist(), strict=True)
            for strip in fold([Strip(0, page, slot, dst, ()) for slot, dst in runs]):
                found.append(Step(length, int(chosen[0]), strip.src_byte, strip.dst_byte, strip.loops))
    return Slot(boxes, tuple(found), int(pattern.lengths.sum()))
