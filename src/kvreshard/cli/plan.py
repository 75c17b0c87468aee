"""`kvreshard plan`: who reads what from whom, what a request costs, and exactly which bytes it copies.

1. Both layouts, from a model and two engines or from files that `describe` wrote. A decode layout that lacks ranks, heads or fields
   is refused, since the rest of it would be proved all the same; with `--incomplete` it is a warning.
2. The route of every decode rank, proved.
3. A request: from `--tables FILE`; or of `--tokens N --hit H` (pages in order in a fresh pool, the first H tokens present at the decode
   engine); or else of a size that both engines hold.
4. Either the explanation of the routes with what the request costs, or with `--copies` the request's copy list as JSON lines: one object
   per copy, in no promised order. `--fills` adds the ranges that are zeroed; `--explain` writes in words what each copy is. The whole
   request is checked before the first line. With `--html FILE` the explanation is a page for a browser (`plan_page`), with the request in
   sizes from one page to 128k tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from kvreshard.catalog import EngineSpec
from kvreshard.cli.cells import name_copy
from kvreshard.cli.inputs import (
    SIDES,
    AsJson,
    CostModelFile,
    Draft,
    InputError,
    Pages,
    Pair,
    engine_option,
    model_option,
    read_cost_model,
    read_pair,
    warn,
    write_whole,
)
from kvreshard.cli.order_note import order_note
from kvreshard.cli.output import bytes_text, show_line, write_json
from kvreshard.cli.plan_page import LARGEST_TOKENS, plan_page, request_sizes
from kvreshard.cli.plan_view import RequestCost, plan_document, show_plan
from kvreshard.cli.tables_file import TablesError, read_tables
from kvreshard.cli.totals import count_totals
from kvreshard.model import BindError
from kvreshard.model.tables import Request
from kvreshard.model.text import MAX_NAME, counted, escaped
from kvreshard.plan import CopyList, Route, bind, compile_routes, find_unwritten
from kvreshard.plan.cost import CostModel, Way
from kvreshard.plan.explain import explain
from kvreshard.plan.request_check import check_request
from kvreshard.testing.scenario import plain_request

WayOption = Annotated[Way | None, typer.Option(help="Read everything this way.")]
LayoutFile = Annotated[Path | None, typer.Option(help="Layout file of `kvreshard describe`, instead of an engine.")]
# Of a request without options; fewer where a pool holds no more.
USUAL_TOKENS = 1024
NO_REQUEST = "none fits these engines; --tokens 1 says why"
# Block tables of more would take gigabytes.
MAX_TOKENS = 1 << 20


def plan(
    layouts: Annotated[
        list[Path] | None,
        typer.Argument(help="Two layout files of `kvreshard describe`: prefill, then decode.", show_default=False),
    ] = None,
    model: Annotated[str | None, model_option()] = None,
    prefill: Annotated[
        EngineSpec | None, engine_option("--prefill", "Prefill engine, as in tp=4,pp=2,page=16.")
    ] = None,
    decode: Annotated[EngineSpec | None, engine_option("--decode", "Decode engine, as in tp=8,order=HND.")] = None,
    prefill_layout: LayoutFile = None,
    decode_layout: LayoutFile = None,
    draft: Draft = None,
    pages: Pages = None,
    rank: Annotated[list[int] | None, typer.Option(help="Only this decode rank; may be given again.")] = None,
    way: WayOption = None,
    device: Annotated[
        str, typer.Option(help="Where the caches are, for what copies cost: cpu, or a device as cuda:0.")
    ] = "cpu",
    cost_model: CostModelFile = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, max=MAX_TOKENS, help="Make up a request of so many tokens.")
    ] = None,
    hit: Annotated[int, typer.Option(min=0, help="With --tokens: how many the decode engine has already.")] = 0,
    tables: Annotated[
        Path | None, typer.Option(help="JSON file with the request's block tables (docs/wire.md).")
    ] = None,
    copies: Annotated[
        bool, typer.Option("--copies", help="Print the copy list of a request: --tables or --tokens.")
    ] = False,
    fills: Annotated[bool, typer.Option("--fills", help="Print the ranges of new pages that are zeroed.")] = False,
    in_words: Annotated[
        bool, typer.Option("--explain", help="With --copies: which field, tokens and heads each copy is.")
    ] = False,
    page_file: Annotated[
        Path | None,
        typer.Option("--html", help="Write a page for a browser: who reads what, at sizes up to 128k tokens."),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="Show every field, run and reason.")] = False,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Plan a decode layout that lacks ranks, heads or fields.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show who reads what from whom between two engines, or exactly which bytes a request copies."""
    _check_options(copies, fills, in_words, page_file, tables, tokens, hit)
    if layouts and (len(layouts) != 2 or prefill_layout or decode_layout):
        shown = ", ".join(f"'{escaped(path, MAX_NAME)}'" for path in layouts[:3]) + (", ..." if layouts[3:] else "")
        raise InputError(
            f"arguments: {shown}, taken as {counted(len(layouts), 'layout file')}; give two, prefill then decode, and no options for them, or one "
            "with --prefill-layout or --decode-layout. Engines of a model go with --model, --prefill and --decode"
        )
    files = layouts or (prefill_layout, decode_layout)
    most = max(tokens or USUAL_TOKENS, LARGEST_TOKENS if page_file else 0)
    room = None if tables is not None else most
    pair = read_pair(model, (prefill, decode), files, pages, draft, may_lack=incomplete, num_tokens=room)
    cost = read_cost_model(cost_model, device)
    routes = compile_routes(pair.prefill, pair.decode, rank, cost=cost, way=way)
    warn(pair.warnings)
    request, what = _request(pair, routes, tables, tokens, hit)
    if copies or fills:
        if request is None:  # `_check_options` has refused what leads here
            raise InputError("--copies and --fills need a request")
        _print_request(_tell_unmoved(pair, routes), routes, request, copies, fills, in_words, as_json)
        return
    priced = _price(routes, request, what, cost, is_asked=tables is not None or tokens is not None)
    if priced is None:
        pair = replace(pair, notes=(*pair.notes, f"no request is shown: {NO_REQUEST}"))
    if page_file is not None:
        sizes = [] if tables is not None else request_sizes(pair)
        steps, first = _price_sizes(pair, routes, cost, request, priced, sizes, hit)
        page = plan_page(pair, explain(routes), steps, first, cost)
        _write_page(page_file, _tell_unmoved(pair, routes), page.encode(), steps, as_json)
    elif as_json:
        write_json(plan_document(explain(routes), pair, priced))
    else:
        note = ""
        engines = [engine for engine in (prefill, decode) if engine is not None and engine.order is None]
        if priced is not None and request is not None and tables is None and len(engines) == len(SIDES):
            num_tokens = max(table.num_tokens for table in request.dst_tables.values())

            def in_order(order: str) -> tuple[Pair, RequestCost]:
                ordered = [replace(engine, order=order) for engine in engines]
                other = read_pair(model, ordered, pages=pages, draft=draft, num_tokens=most)
                found = compile_routes(other.prefill, other.decode, rank, cost=cost, way=way)
                made = plain_request(other.prefill, other.decode, num_tokens, hit)
                return other, RequestCost(what, tuple(count_totals(found, made, cost)))

            note = order_note(pair, priced, in_order)
        show_plan(Console(), explain(routes), pair, priced, details, note)
        if details and priced is not None:
            source = (
                f"those of {cost_model}"
                if cost_model
                else "the defaults; `kvreshard bench --calibrate` measures this host's"
            )
            show_line(Console(), f"constants of the predictions: {source}")


def _check_options(
    copies: bool, fills: bool, in_words: bool, page_file: Path | None, tables: Path | None, tokens: int | None, hit: int
) -> None:
    """Raises InputError for options that do not go together."""
    if page_file is not None and (copies or fills):
        raise InputError(f"--html {page_file} shows the sums of a request; give --copies and --fills without --html")
    if (copies or fills) and tables is None and tokens is None:
        raise InputError("--copies and --fills need a request: give --tables FILE, or --tokens N to make one up")
    if tables is not None and tokens is not None:
        raise InputError(f"--tables {tables} and --tokens {tokens} are two requests; give one of them")
    if in_words and not copies:
        raise InputError("--explain describes copies, and none are printed; give --copies too")
    if hit and (tokens is None or hit >= tokens):
        of = "no --tokens" if tokens is None else f"--tokens {tokens}"
        raise InputError(
            f"--hit {hit} with {of}: of N tokens, the decode engine may have up to N - 1 already; give --tokens above {hit}"
        )


def _request(
    pair: Pair, routes: list[Route], tables: Path | None, tokens: int | None, hit: int
) -> tuple[Request | None, str]:
    """The request, and what it is; None if the pools of these engines hold no request at all. Raises TablesError or BindError."""
    if tables is not None:
        request = read_tables(tables, pair.prefill, pair.decode)
        try:
            for route in routes:
                check_request(route, request)
        except BindError as error:
            raise TablesError(f"tables file '{escaped(tables, MAX_NAME)}': {error}") from None
        return request, f"the request of {tables}"
    if tokens is not None:
        return _invent(pair, tokens, hit)
    tokens = USUAL_TOKENS
    while tokens:
        try:
            return _invent(pair, tokens, hit)
        except BindError:
            tokens //= 2
    return None, ""


def _invent(pair: Pair, tokens: int, hit: int) -> tuple[Request, str]:
    what = f"a request of {tokens:,} token{'s' * (tokens != 1)}" + (f", {hit:,} of them there already" if hit else "")
    return plain_request(pair.prefill, pair.decode, tokens, hit), what


def _tell_unmoved(pair: Pair, routes: list[Route]) -> Pair:
    """Write the routes' warnings to stderr, for a view that does not end with them; returns the pair with these among its own."""
    unmoved = tuple(dict.fromkeys(warning for route in routes for warning in route.warnings))
    warn(unmoved)
    return replace(pair, warnings=(*pair.warnings, *unmoved))


def _price(
    routes: list[Route], request: Request | None, what: str, cost: CostModel, *, is_asked: bool
) -> RequestCost | None:
    """The cost of a request; None without one, or where forced staging has no room for a page of one that nobody has asked for. Raises BindError."""
    try:
        return None if request is None else RequestCost(what, tuple(count_totals(routes, request, cost)))
    except BindError:
        if is_asked:
            raise
        return None


def _price_sizes(
    pair: Pair,
    routes: list[Route],
    cost: CostModel,
    request: Request | None,
    priced: RequestCost | None,
    sizes: list[int],
    hit: int,
) -> tuple[list[RequestCost], int]:
    """The request among made-up ones of other sizes, as far as the pools hold them; and its place. Raises InputError."""
    if request is None or priced is None:
        raise InputError(f"--html shows a request: {NO_REQUEST}")
    steps: list[RequestCost] = []
    first = 0
    own = max((table.num_tokens for table in request.dst_tables.values()), default=0)
    for size in sorted({own, *sizes}):
        if size == own:
            first = len(steps)
            steps.append(priced)
        elif size > hit:
            try:
                made, what = _invent(pair, size, hit)
            except BindError:
                break
            steps.append(RequestCost(what, tuple(count_totals(routes, made, cost))))
    return steps, first


def _write_page(page_file: Path, pair: Pair, content: bytes, steps: list[RequestCost], as_json: bool) -> None:
    """Write the page, and a line or a document about it."""
    if write_whole(page_file, content):
        return
    if as_json:
        about = {"output": str(page_file), "bytes": len(content), "title": pair.title}
        write_json({**about, "requests": [step.what for step in steps], "warnings": list(pair.warnings)})
    else:
        first, *last = [step.what for step in (steps[0], *steps[1:][-1:])]
        sizes = " to ".join([first, *(what.removeprefix("a request of ") for what in last)])
        sys.stdout.write(f"{page_file}: {pair.title}; {sizes}; {bytes_text(len(content))}\n")


def _print_request(
    pair: Pair, routes: list[Route], request: Request, copies: bool, fills: bool, in_words: bool, as_json: bool
) -> None:
    # `bind` checks the request when it is called, before its first list: nothing is printed of a request that is refused.
    bound = [bind(route, request) for route in routes]
    lines = _lines(pair, routes, bound, request, copies, fills)
    if not as_json:
        write = partial(_in_words, pair, request) if in_words else _json_line
        sys.stdout.writelines(write(kind, line) for kind, line in lines)
        return
    document: dict[str, Any] = {"copies": []} if copies else {}
    document["warnings"] = list(pair.warnings)
    if fills:
        document["fills"] = []
    for kind, line in lines:
        what = {"what": _name(pair, request, line)} if in_words and kind == "copies" else {}
        document[kind].append({**line, **what})
    write_json(document)


def _json_line(_: str, line: dict[str, int]) -> str:
    return msgspec.json.encode(line).decode() + "\n"


def _in_words(pair: Pair, request: Request, kind: str, line: dict[str, int]) -> str:
    who = f"decode {line['dst_rank']} <- " + (f"prefill {line['src_rank']}" if kind == "copies" else "zeros")
    what = _name(pair, request, line)
    source = f"from {line['src_address']:#x} " if kind == "copies" else ""
    return f"{who}  {line['length']:>9,} B  {what or 'padding'}  {source}to {line['dst_address']:#x}\n"


def _name(pair: Pair, request: Request, line: dict[str, int]) -> str:
    rank = pair.decode.rank_by_number[line["dst_rank"]]
    return name_copy(pair.decode, request, rank, line["dst_address"], line["length"])


def _lines(
    pair: Pair, routes: list[Route], bound: list[Iterator[CopyList]], request: Request, copies: bool, fills: bool
) -> Iterator[tuple[str, dict[str, int]]]:
    """Copies and fills, one entry per line: ("copies" or "fills", numbers)."""
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
