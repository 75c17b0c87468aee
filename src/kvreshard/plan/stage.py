"""For one request and a staged lane: what is read into the staging buffer, and how is it permuted from there?

A batch is as many slots (`slot`) as `fill_bytes` hold, or one:

1. Take pairs of pages in the order of the source, cut from whole pages (`whole`) or looked up per piece (`bind`).
2. Reads: every box of every page, merged where both sides continue, and that for every field.
3. Moves: per step of the slot, a strided copy from slots to destination pages, as loops, not as a list.
4. Put batches of one source rank that fit the buffer together into one: each costs a post.

Staging addresses are offsets from the start of the buffer; whoever owns the buffer adds its address.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kvreshard.model.errors import BindError
from kvreshard.model.loops import slot_reads
from kvreshard.plan.bind import CutLane, distinct_overlaps, page_ids
from kvreshard.plan.copies import CopyList
from kvreshard.plan.cost import CostModel
from kvreshard.plan.lane import Lane, Overlap
from kvreshard.plan.pattern import Pattern
from kvreshard.plan.refine import Loop
from kvreshard.plan.slot import Slot

Int64s = NDArray[np.int64]
# A request whose pages divide one another meets the other side's in one way, and in two more at its ends. Page sizes that do not
# would need a joint slot for almost every page.
MAX_JOINTS = 8
# What was read is permuted while it is still in a cache, and the first batch is permuted early. Of 3 to 16 MiB, 4 and 5 were the fastest in
# eighteen cases of 84 and 168 MB (HND TP 8 -> 4: 30 ms, 36 with 16 MiB; page 64 -> 16, random: 43, with 6 MiB 60), and below 3 the posts cost
# more than is saved. Of 671 MB it made no difference, and each batch costs processor time: so many per lane, then they grow.
FILL_BYTES, MAX_FILL_BYTES = 5 << 20, 16 << 20
MAX_SMALL_BATCHES = 32


class Move(msgspec.Struct, frozen=True, eq=False):
    """A strided local copy: for field f, piece k and every step of `loops` (src_step in the slot, dst_step in the page)

        staging[(f * num_pieces + k) * slot_bytes + slot_offset + ...] -> dst_bases[f] + dst_pages[k] + dst_offset + ...

    `length` bytes at a time. `dst_pages`: byte offsets of the places in pages where the steps begin, shape (num_pieces,).
    """

    length: int
    loops: tuple[Loop, ...]
    slot_offset: int
    dst_offset: int
    slot_bytes: int
    dst_bases: Int64s
    dst_pages: Int64s


class Slots(msgspec.Struct, frozen=True, eq=False):
    """Slots of one form, in the source's order once `find_slots` has put them together: page ids of the source's boxes, shape
    (n, boxes), and where the slot's steps begin in the destination's pages, in bytes of its pool, shape (n, pages); or (n, 1)
    where that is one page.
    """

    pattern: Pattern
    slot: Slot
    src_page: Int64s
    dst_at: Int64s


class Filled(msgspec.Struct, frozen=True, eq=False):
    """Some of the slots in the staging buffer, from byte `at` on: fields and pieces `[first, stop)`, field after field."""

    slots: Slots
    fields: tuple[int, int]
    pieces: tuple[int, int]
    at: int

    def moves(self) -> Iterator[Move]:
        """From there to the destination's pages. Made when they are wanted: the reads are posted before."""
        pattern, slot = self.slots.pattern, self.slots.slot
        dst_bases, dst_at = pattern.bases.dst[slice(*self.fields)], self.slots.dst_at[slice(*self.pieces)]
        for step in slot.steps:
            pages = dst_at[:, step.column]
            slot_offset = step.slot_offset + self.at
            yield Move(step.length, step.loops, slot_offset, step.dst_offset, slot.boxes.slot_bytes, dst_bases, pages)


class Batch(msgspec.Struct, frozen=True, eq=False):
    """One filling of the staging buffer, `slots_bytes` of it, of which `num_bytes` of cache come out. It reads copies
    `[first, stop)` of `listed`, which other batches are parts of too; their `dst_address` are offsets in the buffer.
    """

    listed: CopyList
    first: int
    stop: int
    filled: tuple[Filled, ...]
    num_bytes: int
    slots_bytes: int

    @property
    def src_rank(self) -> int:
        """Whom it is read from."""
        return self.listed.src_rank

    @property
    def reads(self) -> CopyList:
        """What it reads."""
        rows, listed = slice(self.first, self.stop), self.listed
        columns = listed.src_address[rows], listed.dst_address[rows], listed.length[rows]
        return CopyList(listed.src_rank, listed.dst_rank, *columns)

    @property
    def moves(self) -> tuple[Move, ...]:
        """What is done with it once it is read."""
        return tuple(move for filled in self.filled for move in filled.moves())


def fill_bytes(buffer_bytes: int, total_bytes: int = 0, model: CostModel | None = None) -> int:
    """How much one batch fills of a buffer where so much is staged, unless a single slot is larger."""
    least = FILL_BYTES if model is None else max(FILL_BYTES, model.least_batch_bytes)
    return min(buffer_bytes, max(least, min(MAX_FILL_BYTES, total_bytes // MAX_SMALL_BATCHES)))


def find_slots(cut: CutLane) -> Iterator[Slots]:
    """What a lane of a checked request moves, as slots. All that one source span gives is one slot where that can be, and source
    pages that go to several places of a destination page are read together.
    """
    together: dict[object, list[Slots]] = {}
    for slots in _find_slots(cut):
        together.setdefault(slots.slot.form, []).append(slots)
    for alike in together.values():
        src_page = np.concatenate([one.src_page for one in alike])
        dst_at = np.concatenate([one.dst_at for one in alike])
        order = np.argsort(src_page[:, 0], kind="stable")
        yield Slots(alike[0].pattern, alike[0].slot, src_page[order], dst_at[order])


def _find_slots(cut: CutLane) -> Iterator[Slots]:
    """The same, one for each overlap or joint of overlaps, in the order of the destination."""
    lane, pieces = cut.lane, cut.pieces
    overlaps, which = distinct_overlaps(pieces)
    is_empty = [not len(lane.pattern(overlap).lengths) for overlap in overlaps]
    changes = np.flatnonzero(pieces.src_span[1:] != pieces.src_span[:-1]) + 1
    numbers, met = which.tolist(), defaultdict[tuple[int, ...], list[int]](list)
    if len(changes) + 1 < len(numbers):
        for low, high in pairwise([0, *changes.tolist(), len(numbers)]):
            met[tuple(numbers[low:high])].append(low)
    if not 0 < len(met) <= MAX_JOINTS:
        for index, overlap in enumerate(overlaps):
            if not is_empty[index]:
                yield _slots(cut, (overlap,), np.flatnonzero(which == index)[:, None])
        return
    for members, lows in met.items():
        places = [place for place, member in enumerate(members) if not is_empty[member]]
        rows = np.array(lows)[:, None] + np.array(places, dtype=np.int64)
        wanted = tuple(overlaps[members[place]] for place in places)
        if len(wanted) > 1 and lane.joint(wanted) is None:
            yield from (_slots(cut, (one,), rows[:, [column]]) for column, one in enumerate(wanted))
        elif wanted:
            yield _slots(cut, wanted, rows)


def _slots(cut: CutLane, overlaps: tuple[Overlap, ...], rows: Int64s) -> Slots:
    """`rows`: the pieces, shape (n, len(overlaps)), of one source span each."""
    lane, pieces = cut.lane, cut.pieces
    joint = lane.joint(overlaps) if len(overlaps) > 1 else None
    pattern, slot = joint if joint is not None else (lane.pattern(overlaps[0]), lane.slot(overlaps[0]))
    same = np.zeros(len(rows), dtype=np.int64)
    src_page = page_ids(cut.src, lane.src_span, pieces.src_span[rows[:, 0]], [slot.boxes.src_pages], same)
    dst_page = np.concatenate(
        [
            page_ids(
                cut.dst, lane.dst_span, pieces.dst_span[rows[:, column]], [np.unique(lane.pattern(one).dst_pages)], same
            )
            for column, one in enumerate(overlaps)
        ],
        axis=1,
    )
    return Slots(pattern, slot, src_page, dst_page * lane.dst_page_stride_bytes + slot.shift_bytes)


def stage_pieces(cut: CutLane, buffer_bytes: int) -> Iterator[Batch]:
    """Batches of what a lane of a checked request moves. Raises BindError if one slot does not fit the buffer."""
    for slots in find_slots(cut):
        yield from _batches(cut.lane, slots, buffer_bytes)


def stage_pages(lane: Lane, overlap: Overlap, src_page: Int64s, dst_page: Int64s, buffer_bytes: int) -> Iterator[Batch]:
    """Batches of pairs of pages that overlap alike, in the source's order, shape (n,). Raises BindError as `stage_pieces`."""
    pattern = lane.pattern(overlap)
    if len(pattern.lengths):
        slot = lane.slot(overlap)
        dst_at = dst_page[:, None] * lane.dst_page_stride_bytes + slot.shift_bytes
        yield from _batches(lane, Slots(pattern, slot, src_page[:, None], dst_at), buffer_bytes)


def pack(batches: Iterable[Batch], buffer_bytes: int, model: CostModel | None = None) -> Iterator[Batch]:
    """The same batches, neighbours of one source rank as one where they fit the buffer together."""
    waiting: list[Batch] = []
    filled, most = 0, fill_bytes(buffer_bytes, model=model)
    for batch in batches:
        if waiting and (waiting[0].src_rank != batch.src_rank or filled + batch.slots_bytes > most):
            yield _packed(waiting)
            waiting, filled = [], 0
        waiting.append(batch)
        filled += batch.slots_bytes
    if waiting:
        yield _packed(waiting)


def _packed(batches: list[Batch]) -> Batch:
    first = batches[0]
    if len(batches) == 1:
        return first
    reads, parts, at = [], [], 0
    for batch in batches:
        own = batch.reads
        reads.append((own.src_address, own.dst_address + at, own.length))
        parts += [replace(part, at=part.at + at) for part in batch.filled]
        at += batch.slots_bytes
    columns = (np.concatenate(column) for column in zip(*reads, strict=True))
    copies = CopyList(first.src_rank, first.listed.dst_rank, *columns)
    num_bytes = sum(batch.num_bytes for batch in batches)
    return Batch(copies, 0, copies.num_copies, tuple(parts), num_bytes, at)


def _batches(lane: Lane, slots: Slots, buffer_bytes: int) -> Iterator[Batch]:
    boxes, num_slots = slots.slot.boxes, len(slots.src_page)
    slot_bytes, num_fields = boxes.slot_bytes, len(slots.pattern.bases.src)
    if slot_bytes > buffer_bytes:
        raise BindError(
            f"fields {lane.fields[0]}, ...: one page needs {slot_bytes} bytes of staging, the buffer has "
            f"{buffer_bytes}; give a larger buffer or read directly"
        )
    model = None if lane.choice is None else lane.choice.model
    fill = fill_bytes(buffer_bytes, num_slots * slot_bytes * num_fields, model)
    pieces_each = min(num_slots, max(1, fill // slot_bytes))
    fields_each = max(1, fill // (slot_bytes * pieces_each))
    for first in range(0, num_slots, pieces_each):
        pieces = first, min(num_slots, first + pieces_each)
        yield from _of_pieces(lane, slots, pieces, fields_each)


def _of_pieces(lane: Lane, slots: Slots, pieces: tuple[int, int], fields_each: int) -> Iterator[Batch]:
    """Batches of `fields_each` fields of the pieces `[first, stop)`."""
    bases, slot, boxes, num_pieces = slots.pattern.bases, slots.slot, slots.slot.boxes, pieces[1] - pieces[0]
    slot_bytes, num_fields = boxes.slot_bytes, len(bases.src)
    # Fields differ by their bases only: the reads of one are found once, and written out for all of them at once.
    source, place, length, num_reads = slot_reads(
        slots.src_page[slice(*pieces)],
        (boxes.src_offsets, boxes.slot_offsets, boxes.lengths),
        (lane.src_page_stride_bytes, slot_bytes),
        bases.src,
        fields_each,
    )
    listed = CopyList(lane.src_rank, lane.dst_rank, source, place, length)
    copied_bytes = num_pieces * slot.copied_bytes
    for field in range(0, num_fields, fields_each):
        stop = min(num_fields, field + fields_each)
        filled = Filled(slots, (field, stop), pieces, 0)
        count = stop - field
        yield Batch(
            listed,
            field * num_reads,
            stop * num_reads,
            (filled,),
            count * copied_bytes,
            count * num_pieces * slot_bytes,
        )
