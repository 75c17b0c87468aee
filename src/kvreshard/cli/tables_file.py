"""Reader of a tables file: one request's block tables, token intervals and new pages, as JSON (`docs/wire.md`).

    {"prefill": {"full": {"pages": [3, 9], "num_tokens": 24}},
     "decode": {"full": {"pages": [5, 2], "num_tokens": 24, "new_pages": [5, 2]}},
     "intervals": {"full": [[0, 24]]}}

1. Decoded strictly by type: unknown keys, negative numbers and words in place of numbers are refused with their path.
2. Compared with both layouts: group names, every page id inside its pool, every new page once.
3. The planner checks the rest: lengths, null pages, positions, pages used twice.

Raises TablesError with the file, the side, the group, both values and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from kvreshard.cli.inputs import read_bytes
from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.model.expect import did_you_mean
from kvreshard.model.ownership import MAX_SIZE
from kvreshard.model.tables import PageTable, Request

VERSION = 1
# A million tokens in pages of one token, in a hundred groups, take less.
MAX_TABLES_BYTES = 1 << 30
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]


class TablesError(KvReshardError):
    """A file is no tables file, or does not fit the two layouts."""


class _SrcTable(msgspec.Struct, forbid_unknown_fields=True):
    pages: list[Count]
    num_tokens: Count
    first_page: Count = 0


class _DstTable(_SrcTable, forbid_unknown_fields=True):
    new_pages: list[Count] = []


class _Tables(msgspec.Struct, forbid_unknown_fields=True):
    prefill: dict[str, _SrcTable]
    decode: dict[str, _DstTable]
    intervals: dict[str, list[tuple[Count, Count]]]
    version: Annotated[int, msgspec.Meta(ge=1)] = VERSION


def read_tables(path: Path, prefill: EngineLayout, decode: EngineLayout) -> Request:
    """The request of a tables file, for this pair of engines. Raises TablesError."""
    content = read_bytes(path, MAX_TABLES_BYTES, "tables file")
    try:
        return parse_tables(content, prefill, decode)
    except KvReshardError as error:
        raise TablesError(f"tables file '{path}': {error}") from None


def parse_tables(content: bytes, prefill: EngineLayout, decode: EngineLayout) -> Request:
    """`read_tables` from bytes."""
    try:
        tables = msgspec.json.decode(content, type=_Tables)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TablesError(f"not a tables file: {error}{did_you_mean(error, _Tables)}") from None
    if tables.version != VERSION:
        raise TablesError(
            f"is of version {tables.version}; this command reads version {VERSION}: rewrite it as docs/wire.md says"
        )
    _check_side("prefill", tables.prefill, prefill)
    _check_side("decode", tables.decode, decode)
    _check_names("intervals", tables.intervals, decode)
    missing = [group.name for group in decode.groups if group.name not in tables.intervals]
    if missing:
        raise TablesError(
            f"intervals: group '{missing[0]}' is missing; give the token intervals to move, or [] to move nothing"
        )
    return Request(
        {name: PageTable(_ids(t.pages), t.num_tokens, t.first_page) for name, t in tables.prefill.items()},
        {name: PageTable(_ids(t.pages), t.num_tokens, t.first_page) for name, t in tables.decode.items()},
        tables.intervals,
        {name: _ids(t.new_pages) for name, t in tables.decode.items()},
    )


def _ids(pages: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(pages, dtype=np.int64)


def _check_names(where: str, names: Iterable[str], layout: EngineLayout) -> None:
    for name in names:
        if name not in layout.group_by_name:
            raise TablesError(
                f"{where}: group '{name}' is not one of engine '{layout.engine}'; its groups are "
                f"{', '.join(sorted(layout.group_by_name))}"
            )


def _check_side(side: str, tables: Mapping[str, _SrcTable], layout: EngineLayout) -> None:
    _check_names(side, tables, layout)
    for name, table in tables.items():
        group = layout.group_by_name[name]
        for key, pages in (("pages", table.pages), ("new_pages", getattr(table, "new_pages", []))):
            largest = max(pages, default=0)
            if largest >= group.num_pages:
                raise TablesError(
                    f"{side}, group '{name}': {key} names page {largest}, but pool '{group.pool}' of engine "
                    f"'{layout.engine}' has pages [0, {group.num_pages})"
                )
    new = [
        (layout.group_by_name[name].pool, page, name)
        for name, t in tables.items()
        for page in getattr(t, "new_pages", [])
    ]
    given: dict[tuple[str, int], str] = {}
    for pool, page, name in new:
        if (pool, page) in given:
            raise TablesError(
                f"{side}, group '{name}': new_pages names page {page} of pool '{pool}', which new_pages of group '{given[pool, page]}' "
                "names too; a page is new once"
            )
        given[pool, page] = name
