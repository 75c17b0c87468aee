"""`kvreshard plan`: who reads what from whom, and with block tables, exactly which bytes.

1. Both layouts, from a model and two engines or from files that `describe` wrote. A decode layout that lacks ranks, heads or fields
   is refused, since the rest of it is proved all the same; with `--incomplete` it is told.
2. The route of every decode rank, proved.
3. Either their explanation, or with `--copies` and a tables file the copy list of one request, as JSON lines: one object per
   copy, in no promised order. `--fills` adds the ranges that are zeroed. The whole request is checked before the first line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvreshard.cli.inputs import Asked, CostModelFile, InputError, Pair, read_cost_model, read_pair, warn
from kvreshard.cli.plan_view import explanation_document, show_explanation
from kvreshard.cli.tables_file import read_tables
from kvreshard.cli.terminal import write_json
from kvreshard.model import LayoutMismatch
from kvreshard.model.tables import Request
from kvreshard.model.text import counted
from kvreshard.plan import CopyList, Route, bind, compile_route, elect, find_unwritten, match_fields
from kvreshard.plan.cost import CostModel
from kvreshard.plan.explain import explain

LayoutFile = Annotated[Path | None, typer.Option(help="Layout file of `kvreshard describe`, instead of an engine.")]
# Lines are joined before they are written: one write per line would cost more than binding.
LINES_PER_WRITE = 4096


class WayOption(StrEnum):
    """How lanes are read."""

    DIRECT = "direct"
    STAGED = "staged"


def plan(
    layouts: Annotated[
        list[Path] | None,
        typer.Argument(help="Two layout files of `kvreshard describe`: prefill, then decode.", show_default=False),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Id of the catalog, or path of a config.json.")] = None,
    prefill: Annotated[str | None, typer.Option(help="Prefill engine, as in tp=4,pp=2,page=16.")] = None,
    decode: Annotated[str | None, typer.Option(help="Decode engine, as in tp=8,order=HND.")] = None,
    prefill_layout: LayoutFile = None,
    decode_layout: LayoutFile = None,
    draft: Annotated[str | None, typer.Option(help="Model of a draft whose caches come behind: id or path.")] = None,
    pages: Annotated[int | None, typer.Option(min=1, help="Pages of each pool.")] = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this decode rank; may be given again.")] = None,
    way: Annotated[WayOption | None, typer.Option(help="Read everything this way.")] = None,
    device: Annotated[
        str, typer.Option(help="Where the caches are, for what copies cost: cpu, or a device as cuda:0.")
    ] = "cpu",
    cost_model: CostModelFile = None,
    copies: Annotated[bool, typer.Option("--copies", help="Print the copy list of a request; needs --tables.")] = False,
    tables: Annotated[
        Path | None, typer.Option(help="JSON file with the request's block tables (docs/wire.md).")
    ] = None,
    fills: Annotated[bool, typer.Option("--fills", help="Print the ranges of new pages that are zeroed.")] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Plan a decode layout that lacks ranks, heads or fields.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show who reads what from whom between two engines, or exactly which bytes a request copies."""
    if (copies or fills) != (tables is not None):
        raise InputError("--copies and --fills need the request's --tables FILE, and --tables needs one of them")
    if layouts and (len(layouts) != 2 or prefill_layout or decode_layout):
        raise InputError(
            f"arguments: {counted(len(layouts), 'layout file')}; give two, prefill then decode, and no options for them"
        )
    sides = [layouts[0], layouts[1]] if layouts else [prefill_layout, decode_layout]
    asked = Asked("prefill", prefill, sides[0]), Asked("decode", decode, sides[1])
    pair = read_pair(model, *asked, pages, draft, may_lack=incomplete)
    routes = compile_pair(pair, rank, way.value if way else None, read_cost_model(cost_model, device))
    warn(pair.warnings)
    if tables is not None:
        request = read_tables(tables, pair.prefill, pair.decode)
        _print_request(pair, routes, request, copies, fills, as_json)
        return
    explanation = explain(routes)
    if as_json:
        write_json(explanation_document(explanation, pair.warnings))
    else:
        show_explanation(Console(), explanation, pair.title)


def compile_pair(
    pair: Pair, ranks: list[int] | None = None, way: Any = None, cost: CostModel | None = None
) -> list[Route]:
    """Proved routes of the decode ranks (all unless some are named). Raises LayoutMismatch."""
    known = pair.decode.rank_by_number
    for number in ranks or ():
        if number not in known:
            raise LayoutMismatch(f"engine '{pair.decode.engine}' has no rank {number}; its ranks are {sorted(known)}")
    election = elect(pair.prefill, pair.decode, match_fields(pair.prefill, pair.decode).names)
    chosen = dict.fromkeys(ranks) if ranks else known
    return [
        compile_route(pair.prefill, pair.decode, number, election=election, cost=cost or CostModel(), way=way)
        for number in chosen
    ]


def _print_request(pair: Pair, routes: list[Route], request: Request, copies: bool, fills: bool, as_json: bool) -> None:
    # bind checks the request when it is called, before its first list: so nothing is printed of a request that is refused.
    bound = [bind(route, request) for route in routes]
    if as_json:
        document: dict[str, Any] = {"copies": []} if copies else {}
        document["warnings"] = list(pair.warnings)
        if fills:
            document["fills"] = []
        for kind, line in _lines(pair, routes, bound, request, copies, fills):
            document[kind].append(line)
        write_json(document)
        return
    waiting: list[str] = []
    for kind, line in _lines(pair, routes, bound, request, copies, fills):
        del kind
        waiting.append("{" + ",".join(f'"{key}":{value}' for key, value in line.items()) + "}\n")
        if len(waiting) == LINES_PER_WRITE:
            sys.stdout.write("".join(waiting))
            waiting.clear()
    sys.stdout.write("".join(waiting))


def _lines(
    pair: Pair, routes: list[Route], bound: list[Iterator[CopyList]], request: Request, copies: bool, fills: bool
) -> Iterator[tuple[str, dict[str, int]]]:
    """What is printed, one entry per line: ("copies" or "fills", numbers)."""
    for route, lists in zip(routes, bound, strict=True):
        written: list[CopyList] = []
        for chunk in lists:
            if fills:
                written.append(chunk)
            if copies:
                yield from (("copies", line) for line in _copy_lines(chunk))
        if fills:
            holes = find_unwritten(pair.decode, route.dst_rank, request, written)
            for start, stop in zip(holes.start.tolist(), holes.stop.tolist(), strict=True):
                yield "fills", {"dst_rank": route.dst_rank, "dst_address": start, "length": stop - start}


def _copy_lines(chunk: CopyList) -> Iterator[dict[str, int]]:
    columns = (chunk.src_address.tolist(), chunk.dst_address.tolist(), chunk.length.tolist())
    for src_address, dst_address, length in zip(*columns, strict=True):
        yield {
            "src_rank": chunk.src_rank,
            "src_address": src_address,
            "dst_rank": chunk.dst_rank,
            "dst_address": dst_address,
            "length": length,
        }
