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
        array = np.array(self.pages)
        if array.dtype != np.int64 or array.ndim != 1:
            if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
                raise BindError(
                    f"a block table must be a flat list of page ids, got {array.dtype} of shape {array.shape}"
                )
            if array.dtype == np.uint64 and array.size and int(array.max()) > MAX_SIZE:
                raise BindError(f"a block table names page {int(array.max())}, which no pool has")
            array = array.astype(np.int64)
        expect_whole(self.num_tokens, "num_tokens of a block table")
        expect_whole(self.first_page, "first_page of a block table")
        if self.num_tokens < 0 or self.first_page < 0:
            raise BindError(
                f"a block table holds {self.num_tokens} tokens from page {self.first_page}: must not be negative"
            )
        force_setattr(self, "pages", array)


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
        for name, tables in (("src_tables", self.src_tables), ("dst_tables", self.dst_tables)):
            expect(tables, Mapping, name, "block tables by the name of their group")
            for group, table in tables.items():
                expect(table, PageTable, f"{name}['{group}']", "PageTable(pages, num_tokens)")
        expect(self.intervals, Mapping, "intervals", "lists of token intervals by the name of their group")
        expect(self.dst_new_pages, Mapping, "dst_new_pages", "page ids by the name of their group")
        # Of its own: what a caller does to its lists later is not checked.
        intervals = {group: _checked(group, held) for group, held in self.intervals.items()}
        force_setattr(self, "intervals", intervals)


def _checked(group: str, intervals: Sequence[Any]) -> list[Tokens]:
    expect(intervals, (list, tuple), f"the intervals of group '{group}'", "[(first token, token behind the last), ...]")
    end, found = 0, list[Tokens]()
    for interval in intervals:
        if not isinstance(interval, (tuple, list)) or len(interval) != 2:
            raise UsageError(
                f"an interval of group '{group}' is {interval!r:.80}, and must be (first token, token behind the last)"
            )
        start, stop = interval
        expect_whole(start, f"a token of an interval of group '{group}'")
        expect_whole(stop, f"a token of an interval of group '{group}'")
        if start < end or stop <= start:
            raise BindError(
                f"group '{group}': token intervals {list(intervals)} must be ascending, disjoint and not empty"
            )
        end = stop
        found.append((int(start), int(stop)))
    return found
