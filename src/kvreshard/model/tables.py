"""Block tables and requests: where the tokens of a request lie in both engines, and which of them to move.

A `PageTable` is one group's block table for one request. It has the logical page of its first entry and the number of
valid tokens, because two tables cannot be aligned by their ends: lookahead adds pages behind, windows drop pages in front.
A `Request` has the token intervals to move per destination group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import force_setattr
from numpy.typing import ArrayLike, NDArray

from kvreshard.model.errors import BindError, UsageError
from kvreshard.model.expect import expect, expect_whole
from kvreshard.model.ownership import MAX_SIZE


def page_ids(given: ArrayLike, what: str) -> NDArray[np.int64]:
    """A copy of some page ids. Raises BindError unless they are a flat list of whole numbers."""
    try:
        array = np.array(given)
    except ValueError:
        raise BindError(f"{what} must be a flat list of page ids, got lists of different lengths") from None
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise BindError(f"{what} must be a flat list of page ids, got {array.dtype} of shape {array.shape}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > MAX_SIZE:
        raise BindError(f"{what}: there is page {int(array.max())}, which no pool has")
    return array.astype(np.int64)


class PageTable(msgspec.Struct, frozen=True, eq=False):
    """One group's pages of one request.

    `pages`: page ids, shape (n,), in logical order. `first_page`: logical index of `pages[0]`, ignored for states and rings, which
    start at page 0. `num_tokens`: tokens of the request that the pages hold (source) or hold once loaded (destination); for a
    state, the tokens it has absorbed.
    """

    pages: NDArray[np.int64]
    num_tokens: int
    first_page: int = 0

    if TYPE_CHECKING:  # what `__post_init__` makes of it

        def __init__(self, pages: ArrayLike, num_tokens: int, first_page: int = 0) -> None: ...

    def __post_init__(self) -> None:
        force_setattr(self, "pages", page_ids(self.pages, "a block table"))
        if not (type(self.num_tokens) is type(self.first_page) is int):
            for name in ("num_tokens", "first_page"):
                expect_whole(getattr(self, name), f"{name} of a block table")
                force_setattr(self, name, int(getattr(self, name)))  # NumPy's may be of a few bits, and wrap around
        if self.num_tokens < 0 or self.first_page < 0:
            raise BindError(
                f"a block table holds {self.num_tokens} tokens from page {self.first_page}: must not be negative"
            )
        if self.num_tokens > MAX_SIZE or self.first_page > MAX_SIZE:
            raise BindError(
                f"a block table holds more than {MAX_SIZE} tokens, or begins beyond that page; no engine does"
            )


Tokens = tuple[int, int]
"""Half-open token interval [start, stop)."""


class Request(msgspec.Struct, frozen=True):
    """What to move for one request.

    `src_tables`, `dst_tables`: block table of each group, by the group's name in its own engine. `intervals`: per
    *destination* group the token intervals to move, ascending and disjoint; an empty list moves nothing, and a state
    moves whole when its list is not empty. `dst_new_pages`: page ids per destination group that were allocated for
    this request and hold nothing yet: bytes that no copy writes are zeroed there.
    """

    src_tables: Mapping[str, PageTable]
    dst_tables: Mapping[str, PageTable]
    intervals: Mapping[str, Sequence[Tokens]]
    dst_new_pages: Mapping[str, NDArray[np.int64]]

    def __post_init__(self) -> None:
        src, dst = self.src_tables, self.dst_tables
        # Asked first: nearly all requests are made of dictionaries.
        parts = src, dst, self.intervals, self.dst_new_pages
        if [type(part) for part in parts] != [dict] * 4:
            for name, what in _PARTS:
                expect(getattr(self, name), Mapping, name, f"{what} by the name of their group")
        for name, tables in (("src_tables", src), ("dst_tables", dst)):
            for group, table in tables.items():
                if type(table) is not PageTable:
                    expect(table, PageTable, f"{name}['{group}']", "PageTable(pages, num_tokens)")
        # Of its own: what a caller does to its lists later is not checked.
        intervals = {group: _checked(group, held) for group, held in self.intervals.items()}
        force_setattr(self, "intervals", intervals)


_PARTS = (
    ("src_tables", "block tables"),
    ("dst_tables", "block tables"),
    ("intervals", "lists of token intervals"),
    ("dst_new_pages", "page ids"),
)


def _checked(group: str, intervals: Sequence[Any]) -> list[Tokens]:
    if type(intervals) is not list:
        expect(
            intervals, (list, tuple), f"the intervals of group '{group}'", "[(first token, token behind the last), ...]"
        )
    end, found = 0, list[Tokens]()
    for interval in intervals:
        if type(interval) is not tuple or len(interval) != 2 or not (type(interval[0]) is type(interval[1]) is int):
            interval = _tokens(group, interval)
        start, stop = interval
        if start < end or stop <= start:
            raise BindError(
                f"group '{group}': token intervals {list(intervals)} must be ascending, disjoint and not empty"
            )
        end = stop
        found.append(interval)
    return found


def _tokens(group: str, interval: Any) -> Tokens:
    """An interval of other types. Raises UsageError unless it is two whole numbers."""
    if not isinstance(interval, (tuple, list)) or len(interval) != 2:
        raise UsageError(
            f"an interval of group '{group}' is {interval!r:.80}, and must be (first token, token behind the last)"
        )
    start, stop = interval
    expect_whole(start, f"a token of an interval of group '{group}'")
    expect_whole(stop, f"a token of an interval of group '{group}'")
    return int(start), int(stop)
