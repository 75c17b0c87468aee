"""What of a source page is read into the staging buffer, and how does it go on from there?

A slot is what one piece (an overlap of two pages, of one field) needs from the source, box after box, without gaps, so that
neighbouring pages of a fresh table become one large read. It is found once per overlap of a lane:

1. `find_boxes` joins the runs of a pattern over gaps that are cheaper read than left out.
2. `make_slot` folds the runs from slot to page into loops: `Step`s, and says how far into the destination's pages they go.
3. Where a source page meets several destination pages, `join_patterns` makes it one slot instead of several.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.plan.pattern import RUN_BYTES, Pattern
from kvreshard.plan.refine import Loop, Strip, fold

Int64s = NDArray[np.int64]


_ZERO = np.zeros(1, dtype=np.int64)
_ZERO.flags.writeable = False


class Boxes(msgspec.Struct, frozen=True, eq=False):
    """What is read as one piece at the source, per overlap: source offsets and lengths, and where each lies in a staging slot of
    `slot_bytes`.
    """

    src_offsets: Int64s
    lengths: Int64s
    src_pages: Int64s
    slot_offsets: Int64s
    run_slot_offsets: Int64s
    slot_bytes: int


def find_boxes(pattern: Pattern, max_gap_bytes: int) -> Boxes:
    """Merge a pattern's runs, which are sorted by source page and offset, over gaps of at most `max_gap_bytes`.

    Bytes in a gap are read and left in the slot: cheaper than a copy of their own (`CostModel.max_gap_bytes`).
    """
    src, length, page = pattern.src_offsets, pattern.lengths, pattern.src_pages
    if len(src) == 1:
        return Boxes(src, length, page, _ZERO, _ZERO, int(length[0]))
    apart = (src[1:] - src[:-1] - length[:-1] > max_gap_bytes) | (page[1:] != page[:-1])
    starts = np.flatnonzero(np.concatenate([[True], apart]))
    box_of = np.cumsum(np.concatenate([[True], apart])) - 1
    ends = np.concatenate([starts[1:], [len(src)]]) - 1
    lengths = src[ends] + length[ends] - src[starts]
    slot_offsets = np.cumsum(lengths) - lengths
    run_slot_offsets = slot_offsets[box_of] + src - src[starts][box_of]
    return Boxes(src[starts], lengths, page[starts], slot_offsets, run_slot_offsets, int(lengths.sum()))


class Step(msgspec.Struct, frozen=True):
    """Runs of `length` bytes from a slot to page `column` of the slot's destination pages, by loops; `dst_offset` is counted
    from the slot's `shift_bytes`.
    """

    length: int
    column: int
    slot_offset: int
    dst_offset: int
    loops: tuple[Loop, ...]


class Slot(msgspec.Struct, frozen=True, eq=False):
    """Boxes to read and steps to permute them, all `shift_bytes` into the destination's pages; `copied_bytes` of one field
    come out of it. `dst_pages`: the distinct destination pages of the pattern, ascending.

    `form`: what slots have in common that differ only in which pages they meet and how far into them they go.
    """

    boxes: Boxes
    steps: tuple[Step, ...]
    dst_pages: Int64s
    shift_bytes: int
    copied_bytes: int
    form: object

    def kept_bytes(self) -> int:
        """About what it takes in memory, its form included."""
        boxes, steps = self.boxes, RUN_BYTES * sum(1 + len(step.loops) for step in self.steps)
        listed = 2 * (boxes.src_offsets.nbytes + boxes.lengths.nbytes)
        return steps + listed + boxes.src_pages.nbytes + boxes.slot_offsets.nbytes + boxes.run_slot_offsets.nbytes


def make_slot(pattern: Pattern, boxes: Boxes) -> Slot:
    """The slot of one overlap, which must not be empty, and whose boxes are found."""
    pages = np.unique(pattern.dst_pages)
    shift_bytes = int(pattern.dst_offsets.min())
    found: list[Step] = []
    for length in np.unique(pattern.lengths).tolist():
        for column, page in enumerate(pages.tolist()):
            chosen = np.flatnonzero((pattern.lengths == length) & (pattern.dst_pages == page))
            offsets = pattern.dst_offsets[chosen] - shift_bytes
            runs = zip(boxes.run_slot_offsets[chosen].tolist(), offsets.tolist(), strict=True)
            for strip in fold([Strip(0, page, slot, dst, ()) for slot, dst in runs]):
                found.append(Step(length, column, strip.src_byte, strip.dst_byte, strip.loops))
    steps, columns = tuple(found), (boxes.src_offsets, boxes.lengths, pattern.bases.src, pattern.bases.dst)
    form = (steps, len(pages), *(column.tobytes() for column in columns))
    return Slot(boxes, steps, pages, shift_bytes, int(pattern.lengths.sum()), form)


def join_patterns(patterns: Sequence[Pattern]) -> Pattern | None:
    """What one source page gives to several destination pages as one pattern, so that it is read once; None where fields are
    fused differently.

    Its destination pages are numbered on: those of the first pattern, then those of the next.
    """
    first = patterns[0].bases
    if any(p.bases.src.tobytes() != first.src.tobytes() for p in patterns[1:]):
        return None
    labels, number = [], 0
    for pattern in patterns:
        pages, label = np.unique(pattern.dst_pages, return_inverse=True)
        labels.append(label.reshape(-1) + number)
        number += len(pages)
    columns = np.stack(
        [
            np.concatenate([p.src_offsets for p in patterns]),
            np.concatenate([p.dst_offsets for p in patterns]),
            np.concatenate([p.lengths for p in patterns]),
            np.concatenate([p.src_pages for p in patterns]),
            np.concatenate(labels),
        ]
    )
    columns = columns[:, np.lexsort((columns[0], columns[3]))]
    return Pattern(first, (), *columns)
