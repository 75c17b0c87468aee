"""Transfers that share both block tables, and what each pair of their pages means.

1. A `GroupPair` is all transfers between two groups that cut the sequence alike: a request is checked and cut once for them.
2. `cut` divides token indices at the pages of both sides. Stretches that overlap alike are a `PageRange`: a strided slice of both tables.
3. Where a source page and a destination page overlap in one way, all transfers from one source rank are one `Page` per length: their copies differ
   between requests by page ids only. Pages are computed at first use and kept (`pattern_cache`).
4. `GroupPair.copies` looks up the page ids of every page range: here block tables become `PagedCopies`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from kvreshard.model.address import AxisMap
from kvreshard.model.field import Axis
from kvreshard.model.ownership import Ownership
from kvreshard.model.rank import Group
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan.budget import PAGE_ENTRIES, RequestBudget, nest_entries
from kvreshard.plan.copies import (
    MAX_COPY_BYTES,
    MIN_JOINED_BYTES,
    Int64s,
    Page,
    PagedCopies,
    continues,
    cut_long,
    first_joined,
)
from kvreshard.plan.cost import Way
from kvreshard.plan.cover import count_in_windows
from kvreshard.plan.pattern import Pattern
from kvreshard.plan.transfer import Overlap, RankTransfer, Span

# Of a page, beside its entries: its objects, and its key among those that groups share.
PAGE_BYTES = 1200


class Side(msgspec.Struct, frozen=True):
    """One side of a pair: `name` is "source" or "destination", `owned` what the rank has of the sequence, None for a state."""

    name: str
    group: Group
    span: Span
    owned: Ownership | None
    indices_per_page: int


class PageRange(msgspec.Struct, frozen=True):
    """Where a request has one overlap: at the indices `first`, `first + step`, ..., `count` of them.

    `recurs`: whether the overlap ends where pages do on both sides, so that other requests have it too.
    """

    overlap: Overlap
    first: int
    count: int
    step: int
    recurs: bool
    src: PageTable
    dst: PageTable

    def page_ids(self, table: PageTable, span: Span, page_step: int) -> Int64s:
        """The ids of page `page_step` of every span in which a page range lies, shape (count,)."""
        at, every = self.first // span.indices * span.pages + page_step, self.step // span.indices * span.pages
        if span.ring_pages is None:
            at -= table.first_page
        else:
            at %= span.ring_pages
            if at + every * (self.count - 1) >= span.ring_pages:
                return table.pages[(at + every * np.arange(self.count)) % span.ring_pages]
        if at < 0 or at + every * (self.count - 1) >= len(table.pages):
            raise AssertionError(f"page {at} of a table of {len(table.pages)}")  # a bug: requests are checked before
        return table.pages[at : at + every * (self.count - 1) + 1 : every]


class OverlapPage(msgspec.Struct, frozen=True, eq=False):
    """A page of an overlap: whose it is, and in which page of either side's span it lies.

    `budget_entries`: what it counts in a request's budget: its pieces, itself, and its share of finding the overlap.
    """

    src_rank: int
    dst_rank: int
    src_step: int
    dst_step: int
    page: Page
    budget_entries: int


SharedPages = WeakValueDictionary[object, Page]
"""By their content: groups that overlay one another have equal pages, whose copies are posted together."""


@dataclass(frozen=True, eq=False)
class GroupPair:
    """Transfers between two groups that cut the sequence alike. `sequence`: its axis, None for a state."""

    src: Side
    dst: Side
    sequence: Axis | None
    transfers: tuple[RankTransfer, ...]
    shared_pages: SharedPages = field(default_factory=WeakValueDictionary)

    @property
    def is_state(self) -> bool:
        return self.sequence is None

    @cached_property
    def by_way(self) -> tuple[tuple[Way | None, tuple[RankTransfer, ...]], ...]:
        """The transfers by how they are read; None where a request decides."""
        found: dict[Way | None, list[RankTransfer]] = {}
        for transfer in self.transfers:
            found.setdefault(None if transfer.choice.is_open else transfer.choice.way, []).append(transfer)
        return tuple((way, tuple(transfers)) for way, transfers in found.items())

    def page_ranges(self, request: Request) -> list[PageRange]:
        """What a checked request moves of the pair."""
        intervals = request.intervals[self.dst.group.name]
        if not intervals:
            return []
        tables = request.src_tables[self.src.group.name], request.dst_tables[self.dst.group.name]
        if self.sequence is None:
            return [PageRange(Overlap(0, 0, 1), 0, 1, 1, True, *tables)]
        sizes = self.src.span.indices, self.dst.span.indices
        step = math.lcm(*sizes)
        return [
            PageRange(overlap, first, count, step, recurs, *tables)
            for start, stop in self.sequence.index_ranges(intervals)
            for overlap, first, count, recurs in cut(start, stop, *sizes)
        ]

    @cached_property
    def _are_shared(self) -> bool:
        """Whether ranks share the sequence, so that a transfer may have nothing of a page range."""
        alongs = [transfer.along for transfer in self.transfers]
        return any(along and not along.chosen.period == along.dst.owned.period == 1 for along in alongs)

    def holders(
        self, page_range: PageRange, transfers: tuple[RankTransfer, ...], budget: RequestBudget | None = None
    ) -> Sequence[int]:
        """Which of some transfers have anything of a page range: of many ranks that share the sequence, each has a few. No pattern is made.
        Raises BindError where looking is more than the budget.
        """
        if not self._are_shared:
            return range(len(transfers))
        if budget is not None:
            budget.look(len(transfers))
        key = "holders", page_range.overlap, tuple([transfer.bases for transfer in transfers])
        found: tuple[int, ...] = transfers[0].pattern_cache.get(
            self,
            key,
            lambda: tuple(n for n, transfer in enumerate(transfers) if _holds(transfer, page_range)),
            lambda held: 8 * len(held),
        )
        return found

    def pages(self, page_range: PageRange, transfers: tuple[RankTransfer, ...]) -> tuple[OverlapPage, ...]:
        """What some of the transfers copy where two spans overlap as in this page range; kept for the next request."""
        key = page_range.overlap, tuple([transfer.bases for transfer in transfers])
        return transfers[0].pattern_cache.get(self, key, lambda: self._make_pages(page_range, transfers), _cached_bytes)

    def copies(
        self, page_ranges: Iterable[PageRange], transfers: tuple[RankTransfer, ...], budget: RequestBudget | None = None
    ) -> Iterator[PagedCopies]:
        """What some of the transfers copy of some page ranges, page by page. Raises BindError where it is more than the budget."""
        budget = budget or RequestBudget()
        for page_range in page_ranges:
            held = self.holders(page_range, transfers, budget)
            if not held:
                continue
            budget.spend(len(held), 0)
            src_ids: dict[int, Int64s] = {}
            dst_ids: dict[int, Int64s] = {}
            for of in self.pages(page_range, transfers):
                budget.spend(0, of.budget_entries)
                if of.src_step not in src_ids:
                    src_ids[of.src_step] = page_range.page_ids(page_range.src, self.src.span, of.src_step)
                if of.dst_step not in dst_ids:
                    dst_ids[of.dst_step] = page_range.page_ids(page_range.dst, self.dst.span, of.dst_step)
                yield PagedCopies(of.src_rank, of.dst_rank, of.page, src_ids[of.src_step], dst_ids[of.dst_step])

    def _make_pages(self, page_range: PageRange, transfers: tuple[RankTransfer, ...]) -> tuple[OverlapPage, ...]:
        together: dict[tuple[int, ...], list[Pattern]] = {}
        budget = RequestBudget()  # of its own: what is kept for the next request must not depend on this one
        nests_in_all, made = 0, list[tuple[int, int, int, int, Page]]()
        for transfer in [transfers[number] for number in self.holders(page_range, transfers)]:
            ranks, strides = (
                (transfer.src_rank, transfer.dst_rank),
                (transfer.src_page_stride_bytes, transfer.dst_page_stride_bytes),
            )
            pattern = transfer.pattern(page_range.overlap)
            nests = nest_entries(len(pattern.runs))
            budget.spend(0, nests)
            nests_in_all += nests
            for src_step, dst_step, runs in pattern.by_page():
                together.setdefault((*ranks, src_step, dst_step, *strides), []).append(runs)
        counts = self.src.group.num_pages, self.dst.group.num_pages
        for (src_rank, dst_rank, src_step, dst_step, src_stride, dst_stride), found in together.items():
            budget.spend(1, sum(len(runs.bases.src) * len(runs.lengths) for runs in found))
            for src, dst, length, region in _by_length(*_entries(found)):
                page = Page(src, dst, int(length[0]), region, src_stride, dst_stride, *counts, page_range.recurs)
                columns = tuple(column.tobytes() for column in (src, dst))
                content = src_rank, src_stride, dst_stride, *counts, page.run_bytes, page.recurs, *columns
                made.append((src_rank, dst_rank, src_step, dst_step, self.shared_pages.setdefault(content, page)))
        each = PAGE_ENTRIES + -(-nests_in_all // max(1, len(made)))
        return tuple(OverlapPage(*of, each + of[-1].num_entries) for of in made)


Entries = tuple[Int64s, Int64s, Int64s, Int64s]
"""Of a page, at both sides in page 0, and the lengths and regions; shape (n,) each."""


def _entries(found: Sequence[Pattern]) -> Entries:
    """The runs of all fields in the source's order. Those that continue one another on both sides are joined, up to `MIN_JOINED_BYTES`."""
    src = np.concatenate([(runs.bases.src[:, None] + runs.src_offsets).reshape(-1) for runs in found])
    dst = np.concatenate([(runs.bases.dst[:, None] + runs.dst_offsets).reshape(-1) for runs in found])
    length = np.concatenate([np.tile(runs.lengths, len(runs.bases.src)) for runs in found])
    region = np.concatenate([np.repeat(runs.bases.region, len(runs.lengths)) for runs in found])
    order = np.lexsort((src, region))
    src, dst, length, region = src[order], dst[order], length[order], region[order]
    first = first_joined(length, continues(src, dst, length) & (region[1:] == region[:-1]), MIN_JOINED_BYTES)
    src, dst, length, region = src[first], dst[first], np.add.reduceat(length, first), region[first]
    if int(length.max()) > MAX_COPY_BYTES:
        src, dst, length, row = cut_long(src, dst, length, max_bytes=MAX_COPY_BYTES)
        region = region[row]
    return src, dst, length, region


def _by_length(src: Int64s, dst: Int64s, length: Int64s, region: Int64s) -> Iterator[Entries]:
    """The entries, parted by length: those of one length are a page."""
    order = np.argsort(length, kind="stable")
    src, dst, length, region = src[order], dst[order], length[order], region[order]
    edges = [0, *(1 + np.flatnonzero(length[1:] != length[:-1])).tolist(), len(length)]
    for low, high in pairwise(edges):
        yield src[low:high], dst[low:high], length[low:high], region[low:high]


def _holds(transfer: RankTransfer, page_range: PageRange) -> bool:
    """Whether a transfer has anything of a page range."""
    along, low = transfer.along, np.array([page_range.first])
    return along is None or bool(
        count_in_windows(along.chosen, along.dst.owned, low, low + page_range.overlap.length)[0] > 0
    )


def _cached_bytes(pages: tuple[OverlapPage, ...]) -> int:
    """About what they take in memory."""
    return sum(PAGE_BYTES + 10 * one.page.src_start.nbytes for one in pages)


def make_pairs(transfers: Iterable[RankTransfer]) -> tuple[GroupPair, ...]:
    """Every transfer in one pair, in the order of the first of each."""
    together: dict[tuple[Side, Side, Axis | None], list[RankTransfer]] = {}
    for transfer in transfers:
        along = transfer.along
        together.setdefault((*_sides(transfer), along.axis if along else None), []).append(transfer)
    known: SharedPages = WeakValueDictionary()
    return tuple(GroupPair(*key, tuple(found), known) for key, found in together.items())


def _sides(transfer: RankTransfer) -> tuple[Side, Side]:
    def side(name: str, group: Group, span: Span, mapped: AxisMap | None) -> Side:
        return Side(name, group, span, mapped.owned if mapped else None, mapped.indices_per_page if mapped else 1)

    along = transfer.along
    return (
        side("source", transfer.src_group, transfer.src_span, along.src if along else None),
        side("destination", transfer.dst_group, transfer.dst_span, along.dst if along else None),
    )


def cut(start: int, stop: int, src_size: int, dst_size: int) -> Iterator[tuple[Overlap, int, int, bool]]:
    """Cut indices at the edges of both sides' spans: overlap, first index, count, and whether both ends are edges.

    Between its first and its last edge a range repeats every lcm(src_size, dst_size). Pages of 16 and of 32:

    >>> for overlap, first, count, recurs in cut(5, 70, 16, 32):
    ...     print(first, count, recurs, overlap)
    5 1 False Overlap(src_start=5, dst_start=5, length=11)
    16 2 True Overlap(src_start=0, dst_start=16, length=16)
    32 1 True Overlap(src_start=0, dst_start=0, length=16)
    64 1 False Overlap(src_start=0, dst_start=0, length=6)
    """
    low = min(-(-start // src_size) * src_size, -(-start // dst_size) * dst_size)
    high = max(stop // src_size * src_size, stop // dst_size * dst_size)
    if low > high:
        low, high = stop, stop
    if low > start:
        yield Overlap(start % src_size, start % dst_size, low - start), start, 1, False
    step, first = math.lcm(src_size, dst_size), low
    while first < min(high, low + step):
        last = min((first // src_size + 1) * src_size, (first // dst_size + 1) * dst_size)
        yield Overlap(first % src_size, first % dst_size, last - first), first, (high - last) // step + 1, True
        first = last
    if stop > high:
        yield Overlap(high % src_size, high % dst_size, stop - high), high, 1, False
