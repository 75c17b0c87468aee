"""Requests for trials and plans, and their block tables.

1. `pages_needed`: how many pages a pool must have for so many requests of so many tokens.
2. `make_requests`: like a busy engine's, deterministic from a seed. Pages are in random order, shared among groups and requests, with
   lookahead pages at the end and pages dropped in front of a window; every third request has a prefix that the destination has already;
   lengths end inside a page.
3. `plain_request`: one request in a fresh pool, its pages in ascending order.

Raises BindError if a pool is too small.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvreshard.model import AxisMap, BindError, EngineLayout, Group
from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.model.text import counted

MAX_LOOKAHEAD_PAGES = 2


@dataclass(frozen=True, slots=True)
class _Shape:
    """The form of a group's block table. `ring_pages`: pages of a ring, or None; `kept_tokens`: tokens that stay of a long request, or None for all.

    `paging`: address map and tokens per index of each distinct way of paging the sequence.
    """

    group: Group
    ring_pages: int | None
    kept_tokens: int | None
    paging: tuple[tuple[AxisMap, int], ...]

    def first_token(self, num_tokens: int) -> int:
        """The first token that the group still has."""
        return 0 if self.kept_tokens is None else max(0, num_tokens - self.kept_tokens)

    def logical_pages(self, num_tokens: int, lookahead: int) -> tuple[int, int]:
        """Half-open range of logical pages of the block table."""
        if self.group.tokens_per_page is None:
            return 0, 1
        if self.ring_pages is not None:
            return 0, self.ring_pages
        first = self.first_token(num_tokens)
        low = min((self._held(paging, first) // paging[0].indices_per_page for paging in self.paging), default=0)
        return low, self.pages_of(num_tokens) + lookahead

    def pages_of(self, num_tokens: int) -> int:
        """Pages that hold something of the first `num_tokens` tokens, on whichever rank has most of them."""
        return max(
            (-(-self._held(paging, num_tokens) // paging[0].indices_per_page) for paging in self.paging), default=0
        )

    @staticmethod
    def _held(paging: tuple[AxisMap, int], num_tokens: int) -> int:
        mapped, tokens_per_index = paging
        return mapped.owned.count_below(-(-num_tokens // tokens_per_index))


def pages_needed(layout: EngineLayout, num_requests: int, num_tokens: int) -> int:
    """Pages that `make_requests` may need in the largest pool, plus a null page and some that stay untouched."""
    per_pool: defaultdict[str, int] = defaultdict(int)
    for shape in _shapes(layout).values():
        first, last = shape.logical_pages(num_tokens, MAX_LOOKAHEAD_PAGES)
        per_pool[shape.group.pool] += last - first + 1
    return max(per_pool.values(), default=0) * num_requests * 5 // 4 + 2


def make_requests(
    src: EngineLayout, dst: EngineLayout, num_requests: int, num_tokens: int, seed: int
) -> tuple[Request, ...]:
    """`num_requests` requests of up to `num_tokens` tokens; the first one has all of them."""
    rng = np.random.default_rng(seed)
    src_shapes, dst_shapes = _shapes(src), _shapes(dst)
    src_pages, dst_pages = _free_pages(src, rng), _free_pages(dst, rng)
    pages = [group.tokens_per_page for group in dst.groups if group.tokens_per_page]
    aligned = math.lcm(*pages) if pages else 1
    requests = []
    for number in range(num_requests):
        length = num_tokens if number == 0 else int(rng.integers(max(1, num_tokens // 2), num_tokens + 1))
        num_hits = (length - 1) // aligned
        present = aligned * int(rng.integers(1, num_hits + 1)) if number % 3 == 1 and num_hits else 0
        dst_tables = _tables(dst, dst_shapes, length, dst_pages, rng)
        intervals = {name: _interval(shape, length, present) for name, shape in dst_shapes.items()}
        new = {name: _new_pages(dst_shapes[name], table, present) for name, table in dst_tables.items()}
        requests.append(Request(_tables(src, src_shapes, length, src_pages, rng), dst_tables, intervals, new))
    return tuple(requests)


def plain_request(src: EngineLayout, dst: EngineLayout, num_tokens: int, num_present: int = 0) -> Request:
    """A request of `num_tokens` tokens, of which the destination has the first `num_present` already."""
    shapes = _shapes(dst)
    src_tables = _tables(src, _shapes(src), num_tokens, _first_pages(src, num_tokens))
    dst_tables = _tables(dst, shapes, num_tokens, _first_pages(dst, num_tokens))
    return Request(
        src_tables,
        dst_tables,
        {name: _interval(shape, num_tokens, num_present) for name, shape in shapes.items()},
        {name: _new_pages(shape, dst_tables[name], num_present) for name, shape in shapes.items()},
    )


def _shapes(layout: EngineLayout) -> dict[str, _Shape]:
    rings: dict[str, int | None] = {}
    capacity: dict[str, int] = {}
    paging: defaultdict[str, dict[tuple[AxisMap, int], None]] = defaultdict(dict)
    for rank in layout.ranks:
        for shard in rank.shards:
            sequence = layout.field_by_name[shard.field].sequence
            if sequence is None:
                continue
            mapped = shard.geometry.axis(sequence.name)
            rings[shard.geometry.group] = mapped.ring_pages
            paging[shard.geometry.group][mapped, sequence.tokens_per_index] = None
            if mapped.ring_pages is not None:
                held = mapped.ring_pages * mapped.indices_per_page * sequence.tokens_per_index
                capacity[shard.geometry.group] = held
    return {
        group.name: _Shape(
            group,
            rings.get(group.name),
            min(capacity.get(group.name, group.window_tokens or 0), group.window_tokens or 1 << 62) or None,
            tuple(paging[group.name]),
        )
        for group in layout.groups
    }


def _free_pages(layout: EngineLayout, rng: np.random.Generator) -> dict[str, list[int]]:
    """All pages of each pool but the null page, in random order."""
    return {
        group.pool: _but_null(layout, group.pool, rng.permutation(group.num_pages).tolist()) for group in layout.groups
    }


def _first_pages(layout: EngineLayout, num_tokens: int) -> dict[str, list[int]]:
    """The first pages of each pool but the null page, as many as a request may need, with the lowest last. A pool may have billions."""
    needed = pages_needed(layout, 1, num_tokens)
    return {
        group.pool: _but_null(layout, group.pool, range(min(group.num_pages, needed))[::-1]) for group in layout.groups
    }


def _but_null(layout: EngineLayout, pool: str, pages: Iterable[int]) -> list[int]:
    nulls = {group.null_page for group in layout.groups if group.pool == pool}
    return [page for page in pages if page not in nulls]


def _tables(
    layout: EngineLayout,
    shapes: Mapping[str, _Shape],
    num_tokens: int,
    free: dict[str, list[int]],
    rng: np.random.Generator | None = None,
) -> dict[str, PageTable]:
    """Block tables of all groups, with a random number of lookahead pages, or none."""
    found = {}
    for group in layout.groups:
        lookahead = 0 if rng is None else int(rng.integers(0, MAX_LOOKAHEAD_PAGES + 1))
        found[group.name] = _table(layout, shapes[group.name], num_tokens, lookahead, free[group.pool])
    return found


def _table(layout: EngineLayout, shape: _Shape, num_tokens: int, lookahead: int, free: list[int]) -> PageTable:
    """One group's block table, its pages taken from the end of `free`."""
    first, last = shape.logical_pages(num_tokens, lookahead)
    if last - first > len(free):
        raise BindError(
            f"pool '{shape.group.pool}' of engine '{layout.engine}' has {counted(len(free), 'free page')}, group '{shape.group.name}' needs "
            f"{last - first}; describe it with more pages, or move fewer tokens"
        )
    pages = [free.pop() for _ in range(last - first)]
    return PageTable(np.array(pages, dtype=np.int64), num_tokens, first)


def _interval(shape: _Shape, num_tokens: int, present: int) -> list[Tokens]:
    if shape.group.tokens_per_page is None:
        return [(0, num_tokens)]
    start = (
        shape.first_token(num_tokens) if shape.ring_pages is not None else max(present, shape.first_token(num_tokens))
    )
    return [(start, num_tokens)] if start < num_tokens else []


def _new_pages(shape: _Shape, table: PageTable, present: int) -> NDArray[np.int64]:
    if shape.group.tokens_per_page is None or shape.ring_pages is not None:
        return table.pages
    return table.pages[max(0, shape.pages_of(present) - table.first_page) :]
