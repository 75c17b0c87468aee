"""Where pages of both sides are of one size: which pairs of pages does a request move, and as which copies?

1. Cut the intervals of a stream into whole pages, which are a stretch of both block tables, and parts of a page.
2. Put the whole pages of streams with one frame together, in the order of the source.
3. Neighbours on both sides become one copy where that leaves few, not too long to be shared; else every page is one of its frame.

Nothing is listed per page and lane. `bind` says the same of any pair of pages, and is what this is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.loops import frame_copies, ordered, runs
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan.bind import MAX_COPIES_PER_LIST, index_ranges
from kvreshard.plan.copies import Copies, CopyList, PagedCopies
from kvreshard.plan.lane import Lane, Overlap, Span
from kvreshard.plan.stream import Sheaf, Stream

Int64s = NDArray[np.int64]
# A frame costs a transport some calls of its own, worth it from a few hundred copies on.
MIN_FRAMED_COPIES = 256
# Listing a joined copy costs about three times a page of a frame; NIXL joins neighbouring pages of a frame by itself.
MAX_JOINED = 0.67
# A transport's threads share what a post has in many pieces: 84 MB in 80 take 11.5 ms, in 320 of them 7. So neighbours are joined up to
# the 256th part of what is read; 128 KiB are read in some ten times what a piece costs (docs/design/0020).
SHARED_COPIES = 256
MIN_JOINED_BYTES, MAX_JOINED_BYTES = 128 << 10, 1 << 20
SPLIT_BYTES = 64 * MIN_JOINED_BYTES  # too few pieces for any share below it


class PagePairs(msgspec.Struct, frozen=True, eq=False):
    """What a request moves of a stream: whole pages, as stretches of page ids of both sides, and parts of pages.

    A part is an overlap with the source's and the destination's page id.
    """

    src: list[Int64s]
    dst: list[Int64s]
    parts: list[tuple[Overlap, int, int]]


class WholePages(msgspec.Struct, frozen=True, eq=False):
    """Pairs of whole pages of one frame, in the source's order, shape (n,). `joined`: how many continue the one before on
    both sides; `src_joined`: how many do at the source.
    """

    src_page: Int64s
    dst_page: Int64s
    joined: int
    src_joined: int

    @staticmethod
    def of(src: list[Int64s], dst: list[Int64s]) -> WholePages:
        """Sorted and compared with their neighbours."""
        return WholePages(*ordered(src, dst)) if src else _NO_PAGES

    def num_src_runs(self) -> int:
        """Runs of neighbouring source pages, whatever the destination looks like."""
        return len(self.src_page) - self.src_joined


def pair_pages(stream: Stream, size: int, request: Request) -> PagePairs:
    """Cut a stream whose pages hold `size` coordinates on both sides; the request is checked."""
    name = stream.dst_group.name
    src, dst = request.src_tables[stream.src_group.name], request.dst_tables[name]
    found = PagePairs([], [], [])
    ranges = [(0, 1)] if stream.sides is None else index_ranges(stream, request.intervals[name])
    for start, stop in ranges:
        low, high = -(-start // size), stop // size
        if high > low:
            found.src.append(_ids(src, stream.src_span, low, high))
            found.dst.append(_ids(dst, stream.dst_span, low, high))
        edges = [(start, stop)] if low > high else [(start, low * size), (high * size, stop)]
        for first, last in edges:
            if last > first:
                page, inside = divmod(first, size)
                overlap = inside, inside, last - first
                src_page = int(_ids(src, stream.src_span, page, page + 1)[0])
                found.parts.append((overlap, src_page, int(_ids(dst, stream.dst_span, page, page + 1)[0])))
    return found


def _ids(table: PageTable, span: Span, low: int, high: int) -> Int64s:
    """Ids of the logical pages `[low, high)`."""
    if span.ring_pages is not None:
        return table.pages[np.arange(low, high) % span.ring_pages]
    return table.pages[low - table.first_page : high - table.first_page]


def direct_copies(sheaf: Sheaf, pages: WholePages, min_framed: int) -> Iterator[Copies]:
    """Whole pages of a sheaf's frame, read directly: one by one from `min_framed` copies on, else neighbours together."""
    frame, num_pages = sheaf.frame, len(pages.src_page)
    if not num_pages:
        return
    src_rank, dst_rank = sheaf.lanes[0].src_rank, sheaf.lanes[0].dst_rank
    joins = sheaf.joins and pages.joined > 0
    num_copies = sheaf.num_runs * (num_pages - pages.joined if joins else num_pages)
    if num_copies >= min_framed and not (joins and pages.joined > MAX_JOINED * num_pages):
        yield PagedCopies(src_rank, dst_rank, frame, pages.src_page, pages.dst_page)
        return
    most_pages = max(1, max_joined_bytes(sheaf.page_bytes * num_pages) // frame.dst_stride) if joins else 1
    src_page, dst_page, run_pages = runs(pages.src_page, pages.dst_page, most_pages)
    each = max(1, MAX_COPIES_PER_LIST // sheaf.num_runs)
    for first in range(0, len(src_page), each):
        part = slice(first, first + each)
        columns = frame_copies(
            (frame.src_start, frame.dst_start, frame.length),
            (frame.src_stride, frame.dst_stride),
            (src_page[part], dst_page[part], run_pages[part]),
        )
        yield CopyList(src_rank, dst_rank, *columns)


def max_joined_bytes(num_bytes: int) -> int:
    """Of how many bytes a copy may be where so many are read together, unless one page has more."""
    if num_bytes < SPLIT_BYTES:
        return MAX_JOINED_BYTES
    return min(MAX_JOINED_BYTES, max(MIN_JOINED_BYTES, num_bytes // SHARED_COPIES))


_NO_PAGES = WholePages(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), 0, 0)


def part_copies(lane: Lane, overlap: Overlap, src_page: int, dst_page: int) -> CopyList:
    """Part of one page, read directly; an empty list where the lane has nothing in it."""
    pattern = lane.pattern(overlap)
    src = pattern.bases.src[:, None] + (pattern.src_offsets + src_page * lane.src_page_stride_bytes)
    dst = pattern.bases.dst[:, None] + (pattern.dst_offsets + dst_page * lane.dst_page_stride_bytes)
    lengths = np.broadcast_to(pattern.lengths, src.shape)
    return CopyList(lane.src_rank, lane.dst_rank, src.reshape(-1), dst.reshape(-1), lengths.reshape(-1))
