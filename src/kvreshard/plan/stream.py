"""Which lanes of a route can be bound together?

Tables are checked and cut once per `Stream`: lanes that read one group from one group and cut the sequence alike. Where
both sides' pages are spans of the same size, whole pages need no cutting: `Sheaf`s say what every one of them means, for as
many lanes at once as differ by their addresses only, as one frame that a transport prepares once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from kvreshard.model.layout import Group
from kvreshard.model.loops import compiled, lane_entries
from kvreshard.model.ownership import Interval, Ownership
from kvreshard.plan.copies import Page
from kvreshard.plan.lane import Lane, Span
from kvreshard.plan.slot import Boxes

if TYPE_CHECKING:
    from kvreshard.model._loops import Streams

ALL = Interval(0, None)
# A page and its pool are one number of 63 bits where they are looked up (`_loops.MAX_PAGE`).
MAX_QUICK_PAGES = 1 << 40


class Sheaf(msgspec.Struct, frozen=True, eq=False):
    """Lanes from one source rank whose whole pages are read alike: one `frame` for all of them.

    A page is `num_runs` copies of `page_bytes` together; `joins`: pages that are neighbours on both sides are one copy per
    run. Staged it is `num_boxes` reads of `box_bytes` together, the longest slot `slot_bytes`; `joins_boxes`: neighbouring
    source pages are one read.
    """

    lanes: tuple[Lane, ...]
    frame: Page
    joins: bool
    num_runs: int
    page_bytes: int
    num_boxes: int
    box_bytes: int
    slot_bytes: int
    joins_boxes: bool


class Side(msgspec.Struct, frozen=True):
    """One side of the sequence as a request is checked against it: `name` is "source" or "destination"."""

    name: str
    group: Group
    owned: Ownership
    indices_per_page: int
    span: Span


@dataclass(frozen=True, eq=False)
class Stream:
    """Lanes between two groups that cut the sequence alike. `sides`: source and destination of the sequence, None for states."""

    src_group: Group
    dst_group: Group
    sides: tuple[Side, Side] | None
    tokens_per_index: int
    keep_partial: bool
    src_span: Span
    dst_span: Span
    lanes: tuple[Lane, ...]
    frames: dict[object, Page]

    @cached_property
    def page_indices(self) -> int | None:
        """Coordinates of a page, where one page of each side is a span and both are of one size; None elsewhere."""
        alike = self.src_span.indices == self.dst_span.indices and self.src_span.pages == self.dst_span.pages == 1
        return self.src_span.indices if alike else None

    @cached_property
    def sheaves(self) -> tuple[Sheaf, ...]:
        """All lanes that move something of a whole page, together where one frame can say what."""
        together: dict[tuple[bool, bool, object], list[tuple[Lane, Boxes]]] = {}
        for number, lane in enumerate(self.lanes):
            pattern = lane.pattern((0, 0, self.src_span.indices))
            if not len(pattern.lengths):
                continue
            strides = lane.src_page_stride_bytes, lane.dst_page_stride_bytes
            boxes = lane.boxes((0, 0, self.src_span.indices))
            joins = len(pattern.lengths) == 1 and strides == (pattern.lengths[0], pattern.lengths[0])
            joins_boxes = len(boxes.lengths) == 1 and boxes.slot_bytes == strides[0]
            # Where boxes are fewer than runs, staging may pay for this lane and not for the next.
            alike = -1 if len(boxes.lengths) == len(pattern.lengths) else number
            together.setdefault((joins, joins_boxes, (lane.src_rank, *strides, alike, _way(lane))), []).append(
                (lane, boxes)
            )
        return tuple(_sheaf(found, joins, joined, self.frames) for (joins, joined, _), found in together.items())


def make_streams(lanes: Iterable[Lane]) -> tuple[Stream, ...]:
    """Every lane in one stream, in the order of the first of each."""
    together: dict[object, list[Lane]] = {}
    for lane in lanes:
        groups, spans = (lane.src_group, lane.dst_group), (lane.src_span, lane.dst_span)
        key = (groups, _sides(lane), lane.tokens_per_index, lane.keep_partial, spans)
        together.setdefault(key, []).append(lane)
    frames: dict[object, Page] = {}
    return tuple(
        Stream(
            first.src_group,
            first.dst_group,
            _sides(first),
            first.tokens_per_index,
            first.keep_partial,
            first.src_span,
            first.dst_span,
            tuple(found),
            frames,
        )
        for found in together.values()
        for first in found[:1]
    )


def _sides(lane: Lane) -> tuple[Side, Side] | None:
    along = lane.along
    if along is None:
        return None
    return (
        Side("source", lane.src_group, along.src.owned, along.src.indices_per_page, lane.src_span),
        Side("destination", lane.dst_group, along.dst.owned, along.dst.indices_per_page, lane.dst_span),
    )


def _sheaf(found: list[tuple[Lane, Boxes]], joins: bool, joins_boxes: bool, frames: dict[object, Page]) -> Sheaf:
    lanes, boxes = tuple(lane for lane, _ in found), [boxes for _, boxes in found]
    first = lanes[0]
    whole = (0, 0, first.src_span.indices)
    patterns = [lane.pattern(whole) for lane in lanes]
    src_start, dst_start, length = lane_entries(
        [(p.bases.src, p.bases.dst, p.src_offsets, p.dst_offsets, p.lengths) for p in patterns]
    )
    strides = first.src_page_stride_bytes, first.dst_page_stride_bytes
    counts = first.src_group.num_pages, first.dst_group.num_pages
    # Groups that overlay each other have equal frames: one object, so that their pages are posted together.
    key = (
        first.src_rank,
        *strides,
        *counts,
        _way(first),
        *(column.tobytes() for column in (src_start, dst_start, length)),
    )
    frame = frames.setdefault(key, Page.of(src_start, dst_start, length, strides, counts))
    slots = [len(p.bases.src) for p in patterns]
    return Sheaf(
        lanes,
        frame,
        joins,
        len(length),
        sum(p.num_bytes for p in patterns),
        sum(count * len(box.lengths) for count, box in zip(slots, boxes, strict=True)),
        sum(count * box.slot_bytes for count, box in zip(slots, boxes, strict=True)),
        max(box.slot_bytes for box in boxes),
        joins_boxes,
    )


def _way(lane: Lane) -> object:
    """What decides how a lane is read."""
    return None if lane.choice is None else (lane.choice.way, lane.choice.forced, lane.choice.model)


def quick_streams(streams: Sequence[Stream], groups: Sequence[Group]) -> Streams | None:
    """What says of plain requests that nothing is wrong, and cuts them; None where it was not compiled, or a stream is not plain.

    Plain: pages of one size on both sides, no rings, ranks that hold the whole sequence.
    """
    if compiled is None or not streams:
        return None
    if max(group.num_pages for stream in streams for group in (stream.src_group, *groups)) > MAX_QUICK_PAGES:
        return None
    pools = {group.pool: number for number, group in enumerate(groups)}
    known = {
        group.name: compiled.Pages(group.name, group.num_pages, group.null_page, pools[group.pool], number)
        for number, group in enumerate(groups)
    }
    found = []
    for stream in streams:
        size = _plain_size(stream)
        if size is None:
            return None
        src, dst = stream.src_group, known[stream.dst_group.name]
        pages = compiled.Pages(src.name, src.num_pages, src.null_page, 0, 0)
        partial = stream.tokens_per_index - 1 if stream.keep_partial else 0
        found.append(compiled.Stream(pages, dst, size, stream.tokens_per_index, partial))
    quick: Streams = compiled.Streams(found, known, 1 + max(pools.values()))
    return quick


def _plain_size(stream: Stream) -> int | None:
    """Indices of a page, 0 for a state, None for a stream that is not plain."""
    size = stream.page_indices
    if stream.sides is None or size is None:
        return 0 if stream.sides is None and size == 1 else None
    is_plain = all(
        side.owned == ALL and side.indices_per_page == size and side.span.ring_pages is None for side in stream.sides
    )
    return size if is_plain else None
