"""For one request: which addresses are copied?

The hot path. Block tables and token intervals come in, plain addresses go out; no loop over pages, no geometry.

1. Check the tables once per request: ids inside the pool, no null page, no page twice on the destination, long enough,
   states at one position.
2. Per pair of groups, cut each interval at both sides' spans; every piece lies in one source span and one destination
   span. The distinct overlaps are few.
3. Per lane, look up each overlap's pattern, add page addresses and base addresses, and merge pieces that continue one
   another on both sides.

Refused with BindError, before anything is moved: see `tables`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.plan.copies import CopyList
from kvreshard.plan.cover import count_in_windows
from kvreshard.plan.lane import Lane, Span
from kvreshard.plan.pattern import Pattern
from kvreshard.plan.request_check import check_request, entries
from kvreshard.plan.route import Route
from kvreshard.plan.stream import Stream

Int64s = NDArray[np.int64]
# 2**17 copies are 3 MB of arrays: large enough to amortise a call, small enough to start moving early.
MAX_COPIES_PER_LIST = 1 << 17
# Three numbers below this one fit an int64 side by side.
MAX_CODED = 1 << 21


class Pieces(msgspec.Struct, frozen=True, eq=False):
    """One piece of a request per entry: spans and overlap. Arrays of shape (n,)."""

    src_span: Int64s
    dst_span: Int64s
    src_low: Int64s
    dst_low: Int64s
    length: Int64s


class CutLane(msgspec.Struct, frozen=True, eq=False):
    """A lane and what of it a request moves: its pieces, and both block tables as bind indexes them."""

    lane: Lane
    pieces: Pieces
    src: PageTable
    dst: PageTable


class Runs(msgspec.Struct, frozen=True, eq=False):
    """What a lane moves of each field of a pattern, without the fields' bases: runs that do not continue one another, as byte offsets
    and lengths, shape (n,).
    """

    pattern: Pattern
    src_at: Int64s
    dst_at: Int64s
    lengths: Int64s

    @property
    def num_copies(self) -> int:
        """Of all fields together."""
        return len(self.lengths) * len(self.pattern.bases.src)

    @property
    def num_bytes(self) -> int:
        """Of all fields together."""
        return int(self.lengths.sum()) * len(self.pattern.bases.src)


def bind(route: Route, request: Request, max_copies: int = MAX_COPIES_PER_LIST) -> Iterator[CopyList]:
    """Copy lists of at most about `max_copies` entries, lane by lane. Checks everything before the first one.

    Raises BindError.
    """
    check_request(route, request)
    return _bind_flat(route, request, max_copies)


def _bind_flat(route: Route, request: Request, max_copies: int) -> Iterator[CopyList]:
    for cut in cut_lanes(route, request):
        yield from bind_lane(cut, max_copies)


def cut_lanes(route: Route, request: Request) -> Iterator[CutLane]:
    """Every lane that moves something, for a checked request."""
    for stream in route.streams:
        if request.intervals[stream.dst_group.name]:
            yield from cut_stream(stream, request)


def cut_stream(stream: Stream, request: Request, lanes: Iterable[Lane] | None = None) -> Iterator[CutLane]:
    """The lanes of one stream, or some of them, for a checked request that moves something of it."""
    pieces = cut_pieces(stream, request.intervals[stream.dst_group.name])
    src = entries(request.src_tables[stream.src_group.name], stream.src_span)
    dst = entries(request.dst_tables[stream.dst_group.name], stream.dst_span)
    wanted = stream.lanes if lanes is None else tuple(lanes)
    for lane, held in zip(wanted, held_pieces(wanted, pieces), strict=True):
        yield CutLane(lane, held, src, dst)


def held_pieces(lanes: Sequence[Lane], pieces: Pieces) -> Iterator[Pieces]:
    """For each lane of a stream, the pieces of which it moves something: of many ranks that share the sequence, each has a few.

    Pieces of one overlap hold the same of a lane, so one of each is looked at.
    """
    alongs = [along for along in (lane.along for lane in lanes) if along is not None]  # a stream of states has none
    if all(along.chosen.period == along.dst.owned.period == 1 for along in alongs):
        yield from (pieces for _ in lanes)
        return
    overlaps, which = distinct_overlaps(pieces)
    one = np.zeros(len(overlaps), dtype=np.int64)
    one[which] = np.arange(len(which))
    for lane, along in zip(lanes, alongs, strict=True):
        low = pieces.src_span[one] * lane.src_span.indices + pieces.src_low[one]
        held = count_in_windows(along.chosen, along.dst.owned, low, low + pieces.length[one]) > 0
        if held.all():
            yield pieces
        else:
            yield Pieces(*(getattr(pieces, column)[held[which]] for column in Pieces.__struct_fields__))


def cut_pieces(stream: Stream, intervals: Iterable[Tokens]) -> Pieces:
    """Cut intervals of tokens at the edges of both sides' spans. A state is one piece."""
    if stream.sides is None:
        count = 1 if list(intervals) else 0
        zero = np.zeros(count, dtype=np.int64)
        return Pieces(zero, zero, zero, zero, zero + 1)
    src_size, dst_size = stream.src_span.indices, stream.dst_span.indices
    lows, highs = [], []
    for start, stop in index_ranges(stream, intervals):
        sizes = {src_size, dst_size}
        inner = [np.arange(start // size + 1, -(-stop // size), dtype=np.int64) * size for size in sizes]
        ends = [np.array([start]), *inner, np.array([stop])]
        edges = np.concatenate(ends) if len(sizes) == 1 else np.unique(np.concatenate(ends))
        lows.append(edges[:-1])
        highs.append(edges[1:])
    low = np.concatenate(lows) if lows else np.zeros(0, dtype=np.int64)
    high = np.concatenate(highs) if highs else low
    src_span, src_low = np.divmod(low, src_size)
    dst_span, dst_low = np.divmod(low, dst_size)
    return Pieces(src_span, dst_span, src_low, dst_low, high - low)


def index_ranges(stream: Stream, intervals: Iterable[Tokens]) -> Iterator[tuple[int, int]]:
    """Ranges of indices, without repeats: two intervals may touch the same compressed index."""
    end = 0
    for start_token, stop_token in intervals:
        stop_token += stream.tokens_per_index - 1 if stream.keep_partial else 0
        start, stop = max(end, start_token // stream.tokens_per_index), stop_token // stream.tokens_per_index
        if stop > start:
            yield start, stop
            end = stop


def bind_lane(cut: CutLane, max_copies: int = MAX_COPIES_PER_LIST) -> Iterator[CopyList]:
    """`bind` of one lane of a checked request."""
    for runs in find_runs(cut):
        yield from list_copies(cut.lane, runs, max_copies)


def find_runs(cut: CutLane) -> Iterator[Runs]:
    """What one lane of a checked request moves, before it is written out for every field."""
    lane, pieces, src, dst = cut.lane, cut.pieces, cut.src, cut.dst
    overlaps, which = distinct_overlaps(pieces)
    patterns = [lane.pattern(overlap) for overlap in overlaps]
    together: dict[tuple[int, bytes], list[int]] = {}
    for index, pattern in enumerate(patterns):
        together.setdefault((len(pattern.lengths), pattern.bases.src.tobytes()), []).append(index)
    for (num_runs, _), members in together.items():
        if not num_runs:
            continue
        chosen = np.arange(len(which)) if len(members) == len(patterns) else np.flatnonzero(np.isin(which, members))
        place = np.zeros(len(patterns), dtype=np.int64)
        place[members] = np.arange(len(members))
        runs = _page_runs(lane, pieces, [patterns[m] for m in members], place[which[chosen]], chosen, src, dst)
        yield Runs(patterns[members[0]], *(column.reshape(-1) for column in _merge_pages(*runs)))


def distinct_overlaps(pieces: Pieces) -> tuple[list[tuple[int, int, int]], Int64s]:
    """The distinct overlaps, and for each piece which of them it is."""
    if not len(pieces.length):
        return [], pieces.length
    first = (int(pieces.src_low[0]), int(pieces.dst_low[0]), int(pieces.length[0]))
    columns = (pieces.src_low, pieces.dst_low, pieces.length)
    if all((column == value).all() for column, value in zip(columns, first, strict=True)):
        return [first], np.zeros(len(pieces.length), dtype=np.int64)
    table = np.stack(columns, axis=1)
    scale = int(table.max()) + 1
    if scale > MAX_CODED:
        distinct, which = np.unique(table, axis=0, return_inverse=True)
        return [(int(a), int(b), int(c)) for a, b, c in distinct], which.reshape(-1)
    code = (table[:, 0] * scale + table[:, 1]) * scale + table[:, 2]
    _, found, which = np.unique(code, return_index=True, return_inverse=True)
    return [(int(a), int(b), int(c)) for a, b, c in table[found]], which.reshape(-1)


def _page_runs(
    lane: Lane,
    pieces: Pieces,
    patterns: list[Pattern],
    pattern_of: Int64s,
    chosen: Int64s,
    src: PageTable,
    dst: PageTable,
) -> tuple[Int64s, Int64s, Int64s]:
    """Source offset, destination offset and length of every run of every piece, without bases; shape (pieces, runs)."""
    src_offsets = np.stack([p.src_offsets for p in patterns])[pattern_of]
    dst_offsets = np.stack([p.dst_offsets for p in patterns])[pattern_of]
    lengths = np.stack([p.lengths for p in patterns])[pattern_of]
    src_page = page_ids(src, lane.src_span, pieces.src_span[chosen], [p.src_pages for p in patterns], pattern_of)
    dst_page = page_ids(dst, lane.dst_span, pieces.dst_span[chosen], [p.dst_pages for p in patterns], pattern_of)
    order = np.lexsort((src_offsets[:, 0], src_page[:, 0]))
    src_at = src_page * lane.src_page_stride_bytes + src_offsets
    dst_at = dst_page * lane.dst_page_stride_bytes + dst_offsets
    if (order[1:] < order[:-1]).any():
        return src_at[order], dst_at[order], lengths[order]
    return src_at, dst_at, lengths


def page_ids(table: PageTable, span: Span, spans: Int64s, page_steps: list[Int64s], pattern_of: Int64s) -> Int64s:
    """Page id of every run of every piece: shape (pieces, runs), or (pieces, 1) where a span is one page."""
    if span.pages == 1:
        logical = spans[:, None]
    else:
        logical = spans[:, None] * span.pages + np.stack(page_steps)[pattern_of]
    if span.ring_pages is not None:
        logical = logical % span.ring_pages
    return table.pages[logical - table.first_page]


def _merge_pages(src_at: Int64s, dst_at: Int64s, lengths: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Join neighbouring pieces all of whose runs continue on both sides."""
    if len(lengths) < 2:
        return src_at, dst_at, lengths
    continues = (src_at[:-1] + lengths[:-1] == src_at[1:]) & (dst_at[:-1] + lengths[:-1] == dst_at[1:])
    starts = np.flatnonzero(np.concatenate([[True], ~continues.all(axis=1)]))
    if len(starts) == len(lengths):
        return src_at, dst_at, lengths
    return src_at[starts], dst_at[starts], np.add.reduceat(lengths, starts, axis=0)


def list_copies(lane: Lane, runs: Runs, max_copies: int = MAX_COPIES_PER_LIST) -> Iterator[CopyList]:
    """The runs of every field, with its base, in lists of bounded size."""
    bases = runs.pattern.bases
    for low in range(0, len(runs.lengths), max_copies):
        part = slice(low, low + max_copies)
        per_list = max(1, max_copies // len(runs.lengths[part]))
        for first in range(0, len(bases.src), per_list):
            src_bases, dst_bases = (b[first : first + per_list] for b in (bases.src, bases.dst))
            yield CopyList(
                lane.src_rank,
                lane.dst_rank,
                (src_bases[:, None] + runs.src_at[part]).reshape(-1),
                (dst_bases[:, None] + runs.dst_at[part]).reshape(-1),
                np.tile(runs.lengths[part], len(src_bases)),
            )
