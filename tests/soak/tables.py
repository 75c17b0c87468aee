"""Which pages does a request of so many tokens need in an engine, and which tokens does a reader still want?"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from tests.soak.content import Tokens
from tests.soak.pages import Pool

from kvreshard.model import EngineLayout, Group
from kvreshard.model.tables import PageTable, Request


def first_token(group: Group, num_tokens: int) -> int:
    """The first token that a group keeps: a window forgets what lies before it."""
    return 0 if group.window_tokens is None else max(0, num_tokens - group.window_tokens)


def kept_tokens(layout: EngineLayout, num_tokens: int) -> dict[str, tuple[int, int]]:
    """Group -> the tokens that it holds of a request."""
    return {group.name: (first_token(group, num_tokens), num_tokens) for group in layout.groups}


def _span(group: Group, num_tokens: int) -> tuple[int, int]:
    """Half-open range of logical pages."""
    if group.tokens_per_page is None:
        return 0, 1
    return first_token(group, num_tokens) // group.tokens_per_page, -(-num_tokens // group.tokens_per_page)


def count_pages(layout: EngineLayout, num_tokens: int) -> int:
    """Pages of all groups together."""
    return sum(last - first for first, last in (_span(group, num_tokens) for group in layout.groups))


def allocate(layout: EngineLayout, pool: Pool, num_tokens: int) -> dict[str, PageTable] | None:
    """A table per group, None while there are too few pages."""
    if pool.num_free < count_pages(layout, num_tokens):
        return None
    tables = {}
    for group in layout.groups:
        first, last = _span(group, num_tokens)
        tables[group.name] = PageTable(pool.take(last - first), num_tokens, first)
    return tables


def all_pages(tables: Mapping[str, PageTable]) -> list[int]:
    """The pages of all groups."""
    return [page for table in tables.values() for page in table.pages.tolist()]


def aligned_prefix(layout: EngineLayout, num_tokens: int, wanted: int) -> int:
    """The largest prefix of whole pages of every group, shorter than the request and not above `wanted` tokens."""
    unit = math.lcm(*(group.tokens_per_page or 1 for group in layout.groups))
    return min(wanted, num_tokens - 1) // unit * unit


def present_tokens(layout: EngineLayout, num_tokens: int, prefix: int) -> Tokens:
    """What a reader that has a prefix holds before it loads: no state, and of a window what lies in it."""
    found = {}
    for group in layout.groups:
        first = first_token(group, num_tokens)
        found[group.name] = (first, max(first, prefix)) if group.tokens_per_page is not None else (0, 0)
    return found


def make_request(
    layout: EngineLayout,
    src_tables: Mapping[str, PageTable],
    dst_tables: Mapping[str, PageTable],
    num_tokens: int,
    prefix: int,
) -> Request:
    """Everything behind the prefix, with all pages that hold nothing yet as new."""
    intervals, new = {}, {}
    for group in layout.groups:
        table, (first, last) = dst_tables[group.name], kept_tokens(layout, num_tokens)[group.name]
        start = first if group.tokens_per_page is None else max(first, prefix)
        intervals[group.name] = [(start, last)] if start < last else []
        skipped = 0 if group.tokens_per_page is None else max(0, prefix // group.tokens_per_page - table.first_page)
        new[group.name] = np.array(table.pages[skipped:], np.int64)
    return Request(src_tables, dst_tables, intervals, new)
