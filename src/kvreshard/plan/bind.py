"""From a request's block tables to the copies that are posted directly.

No loop over pages, no geometry: `GroupPair.copies` gives `PagedCopies`, a page and two arrays of page ids wherever a request overlaps alike.

1. `group_aligned` puts pages together whose entries lie alike, in the source's order: a copy of one may continue a copy of another.
2. Copies that are many and scattered, or too long to be joined, stay pages: one `PagedCopies` for each. Few are listed, and so are neighbours
   that are joined (`AlignedPages.listed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.tables import Request
from kvreshard.plan.budget import RequestBudget
from kvreshard.plan.copies import (
    MIN_JOINED_BYTES,
    Copies,
    CopyList,
    Int64s,
    Page,
    PagedCopies,
    coalesce,
    continues,
    joined,
    joined_lists,
)
from kvreshard.plan.request_check import check_request
from kvreshard.plan.route import Route

# A prepared page costs a transport some calls of its own, worth it from a few hundred copies on.
MIN_PAGED_COPIES = 256
# Listing a joined copy costs about three times a copy of a prepared page; NIXL joins neighbouring pages by itself.
MAX_JOINED = 0.67
# A transport's threads share a post of many copies: 84 MB in 80 take 11.5 ms, in 320 of them 7. So neighbours are joined up to
# the 256th part of what is read, and `MIN_JOINED_BYTES` in any case (docs/design/0020).
SHARED_COPIES = 256
MAX_JOINED_BYTES = 1 << 20
SPLIT_BYTES = 64 * MIN_JOINED_BYTES  # too few copies for any share below it


class FirstEntries(msgspec.Struct, frozen=True, eq=False):
    """The first entry of every pair of pages, in the source's order: addresses and lengths, shape (n,).

    `joins`: which but the first continue the one before on both sides; then all entries do. `order`: of the pairs as they were found, None
    where that is the source's.
    """

    src: Int64s
    dst: Int64s
    length: Int64s
    joins: NDArray[np.bool_]
    order: NDArray[np.intp] | None


class AlignedPages:
    """Pages from one source rank whose entries lie alike: `num_pages` pairs of them with `num_entries` each.

    `num_joined`: how many copies of an entry continue the one before, and are joined with it: long ones are not.
    """

    def __init__(self, found: Sequence[PagedCopies]) -> None:
        self.found = found
        self.num_entries = found[0].page.num_entries
        self.num_pages = sum([len(one.src_page) for one in found])
        self.num_bytes = sum([one.num_bytes for one in found])
        shortest = min([one.page.run_bytes for one in found])
        may_join = self.num_pages > 1 and shortest < max_joined_bytes(self.num_bytes)
        self.num_joined = int(np.count_nonzero(self.first_entries.joins)) if may_join else 0

    @property
    def num_copies(self) -> int:
        """When neighbours are joined."""
        return self.num_entries * (self.num_pages - self.num_joined)

    @cached_property
    def first_entries(self) -> FirstEntries:
        """See there."""
        found = self.found
        columns = np.array([one.page.first_entry for one in found]).T
        src_start, src_stride, dst_start, dst_stride, length = np.repeat(
            columns, [len(one.src_page) for one in found], axis=1
        )
        src = joined([one.src_page for one in found]) * src_stride
        src += src_start
        dst = joined([one.dst_page for one in found]) * dst_stride
        dst += dst_start
        order = _source_order(src, apart=int(columns[-1].min()))
        if order is not None:
            src, dst, length = src[order], dst[order], length[order]
        return FirstEntries(src, dst, length, continues(src, dst, length), order)

    def copies(self, min_paged: int, budget: RequestBudget) -> Iterator[Copies]:
        """Neighbours that join are listed where they are most, or all are fewer than `min_paged`; else pages stay pages from `min_paged` copies
        on. Raises BindError before it lists more than the budget has.
        """
        if self.num_joined and (self.num_copies < min_paged or self.num_joined > MAX_JOINED * self.num_pages):
            budget.spend_listed(self.num_copies)
            yield self.listed()
            return
        for paged in self._by_page():
            if paged.page.recurs and paged.num_copies >= min_paged:
                yield paged
            else:
                budget.spend_listed(paged.num_copies)
                yield paged.flat()

    def listed(self, max_bytes: int | None = None) -> CopyList:
        """Every copy, neighbours joined. `max_bytes`: as in `coalesce`; None: so that a transport's threads have enough to share."""
        one, page, firsts = self.found[0], self.found[0].page, self.first_entries
        most = max_joined_bytes(self.num_bytes) if max_bytes is None else max_bytes
        src, dst, length = coalesce(firsts.src, firsts.dst, firsts.length, max_bytes=most, joins=firsts.joins)
        return CopyList(
            one.src_rank,
            one.dst_rank,
            ((page.src_start - page.src_start[0])[:, None] + src).reshape(-1),
            ((page.dst_start - page.dst_start[0])[:, None] + dst).reshape(-1),
            (np.zeros((page.num_entries, 1), dtype=np.int64) + length).reshape(-1),
        )

    def _by_page(self) -> Iterator[PagedCopies]:
        """The pairs of each page together. Where some are neighbours they are in the source's order, since NIXL joins them."""
        members: defaultdict[Page, list[PagedCopies]] = defaultdict(list)
        for one in self.found:
            members[one.page].append(one)
        for page, same in members.items():
            src, dst = joined([one.src_page for one in same]), joined([one.dst_page for one in same])
            order = None
            if self.num_joined:
                order = self.first_entries.order if len(members) == 1 else _source_order(src, apart=1)
            if order is not None:
                src, dst = src[order], dst[order]
            yield PagedCopies(same[0].src_rank, same[0].dst_rank, page, src, dst)


def bind(route: Route, request: Request) -> Iterator[CopyList]:
    """Every copy of a request as lists, transfer by transfer, as a person reads them. Checks everything before the first one. Raises BindError."""
    check_request(route, request)
    return _bind(route, request)


def _bind(route: Route, request: Request) -> Iterator[CopyList]:
    for pair in route.pairs:
        page_ranges = pair.page_ranges(request)
        for transfer in pair.transfers:
            for aligned in group_aligned(pair.copies(page_ranges, (transfer,))):
                yield aligned.listed(1 << 62)


def group_aligned(bound: Iterable[PagedCopies]) -> list[AlignedPages]:
    """The same pages, together where their entries lie alike."""
    together: defaultdict[object, list[PagedCopies]] = defaultdict(list)
    for one in bound:
        together[one.src_rank, one.page.shape].append(one)
    return [AlignedPages(found) for found in together.values()]


def _source_order(src: Int64s, apart: int) -> NDArray[np.intp] | None:
    """The order that sorts them, None where they are sorted. `apart`: the least that any two differ by; a rank reads each cell once."""
    if len(src) < 2 or int((src[1:] - src[:-1]).min()) >= 0:
        return None
    # Bits below `apart` never decide between two. NumPy sorts by radix where the others are at most 16, in a tenth of the time.
    coarse = (src - src.min()) >> (apart.bit_length() - 1)
    return np.argsort(coarse.astype(np.uint16), kind="stable") if int(coarse.max()) < 1 << 16 else np.argsort(src)


def max_joined_bytes(num_bytes: int) -> int:
    """How long a joined copy may be where so many bytes are read together."""
    if num_bytes < SPLIT_BYTES:
        return MAX_JOINED_BYTES
    return min(MAX_JOINED_BYTES, max(MIN_JOINED_BYTES, num_bytes // SHARED_COPIES))


def gathered(direct: Iterable[Copies]) -> Iterator[Copies]:
    """The same copies, with all lists of one source rank as one: a post costs as much as a hundred copies."""
    lists: defaultdict[tuple[int, int], list[CopyList]] = defaultdict(list)
    for copies in direct:
        if isinstance(copies, PagedCopies):
            yield copies
        else:
            lists[copies.src_rank, copies.dst_rank].append(copies)
    yield from map(joined_lists, lists.values())
