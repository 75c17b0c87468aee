"""The form of one request between processes and in files: block tables, intervals, new pages.

`to_form` and `from_form` are inverses. The form is strict data for msgspec: numbers are not negative and stay far from where
an int64 wraps around. Bad block tables raise BindError (`tables`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
import numpy as np

from kvreshard.model.ownership import MAX_SIZE
from kvreshard.model.tables import PageTable, Request

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class TableForm(msgspec.Struct):
    """A `PageTable` in a message or file."""

    pages: list[Count]
    num_tokens: Count
    first_page: Count


class RequestForm(msgspec.Struct):
    """A `Request` in a message or file."""

    src_tables: dict[str, TableForm]
    dst_tables: dict[str, TableForm]
    intervals: dict[str, list[tuple[Count, Count]]]
    dst_new_pages: dict[str, list[Count]]


def to_form(request: Request) -> RequestForm:
    """The form of a request."""

    def tables(of: Mapping[str, PageTable]) -> dict[str, TableForm]:
        return {name: TableForm(table.pages.tolist(), table.num_tokens, table.first_page) for name, table in of.items()}

    return RequestForm(
        tables(request.src_tables),
        tables(request.dst_tables),
        {name: [(int(start), int(stop)) for start, stop in intervals] for name, intervals in request.intervals.items()},
        {name: np.asarray(pages).tolist() for name, pages in request.dst_new_pages.items()},
    )


def from_form(form: RequestForm) -> Request:
    """The request of a form. Raises BindError."""

    def tables(of: dict[str, TableForm]) -> dict[str, PageTable]:
        return {name: PageTable(table.pages, table.num_tokens, table.first_page) for name, table in of.items()}

    new_pages = {name: np.array(pages, dtype=np.int64) for name, pages in form.dst_new_pages.items()}
    return Request(tables(form.src_tables), tables(form.dst_tables), form.intervals, new_pages)
