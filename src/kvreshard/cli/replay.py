"""`kvreshard replay FILE`: repeats a load that failed, without the engines, and shows its flight record (docs/flight-recorder.md).

Exit codes: 0 the outcome explains the failure (the same refusal, or nothing wrong in the plan), 1 something differs, 2 no record.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.table import Column

from kvreshard.cli.inputs import AsJson, InputError, read_bytes
from kvreshard.cli.output import bytes_text, number_column, show_line, show_table, write_json
from kvreshard.cli.scale import available_bytes
from kvreshard.model import EngineLayout, KvReshardError, WireError
from kvreshard.model.tables import PageTable, Request
from kvreshard.model.text import counted
from kvreshard.plan.explain import number_ranges
from kvreshard.tools.flight import MAX_FLIGHT_BYTES, Flight, decode_flight
from kvreshard.tools.replay import ReplayError, ReplayResult, replay

EXIT_DIFFERENT = 1


def replay_file(
    file: Annotated[Path, typer.Argument(help="Flight record of a failed load.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="Of the random contents.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Repeat a recorded load on the memory transport, and compare the outcome."""
    flight = read_flight(file)
    try:
        replayed = replay(flight, seed, available_bytes())
    except ReplayError:
        raise
    except KvReshardError as error:
        raise WireError(f"flight record '{file}': {error}") from None
    if as_json:
        write_json(replay_document(flight, replayed))
    else:
        show_replay(Console(), file.name, flight, replayed)
    if replayed.outcome == "different":
        raise typer.Exit(EXIT_DIFFERENT)


def read_flight(path: Path) -> Flight:
    """The record in a file. Raises InputError or WireError naming the file."""
    content = read_bytes(path, MAX_FLIGHT_BYTES, "flight record")
    if content.lstrip()[:1] in (b"{", b"["):  # no record begins so
        raise InputError(f"flight record '{path}': holds JSON; give what an engine with flight_recorder_dir has left")
    try:
        return decode_flight(content)
    except WireError as error:
        raise WireError(f"flight record '{path}': {error}") from None


def show_replay(console: Console, name: str, flight: Flight, replayed: ReplayResult) -> None:
    """The record, then the outcome."""
    _show_load(console, name, flight, replayed)
    _show_request(console, replayed.request)
    _show_copies(console, replayed)
    _show_events(console, flight)
    show_line(console, f"failed: ({flight.failure.kind}) {flight.failure.text}")
    if replayed.refusal and replayed.refusal != flight.failure.text:
        show_line(console, f"refused: {replayed.refusal}")
    show_line(console, f"{replayed.outcome}: {replayed.reason}")


def _show_load(console: Console, name: str, flight: Flight, replayed: ReplayResult) -> None:
    source = "never met" if flight.src is None else f"'{flight.src.engine}'{_size(replayed.src)}"
    rows = [
        ("request", f"{flight.request}, at its source {flight.source_request}"),
        (
            "written",
            f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(flight.written_at_s))} by {flight.kvreshard}",
        ),
        ("source", f"{source} at {flight.source_address}"),
        ("destination", f"'{flight.dst.engine}'{_size(replayed.dst)}, rank {flight.rank} loaded"),
    ]
    compatibility = flight.src.compatibility if flight.src is not None else {}
    for fact in sorted({*compatibility, *flight.dst.compatibility}):
        here, there = flight.dst.compatibility.get(fact, "not said"), compatibility.get(fact, "not said")
        rows.append((fact, here if here == there else f"{there} at the source, {here} at the destination"))
    if replayed.num_bytes:
        rows.append(("replayed", f"{bytes_text(replayed.num_bytes)} moved and compared"))
    show_table(console, name, (Column("what"), Column("value")), rows)


def _size(layout: EngineLayout | None) -> str:
    if layout is None:
        return ""
    fields, groups = counted(len(layout.fields), "field"), counted(len(layout.groups), "group")
    return f", {counted(len(layout.ranks), 'rank')}, {fields} in {groups}"


def _show_request(console: Console, request: Request) -> None:
    rows = []
    for name, table in request.src_tables.items():
        rows.append(("source", name, *_table_cells(table), "", ""))
    for name, table in request.dst_tables.items():
        tokens = ", ".join(f"[{start}, {stop})" for start, stop in request.intervals.get(name, [])) or "none"
        new_pages = np.asarray(request.dst_new_pages.get(name, [])).tolist()
        rows.append(("destination", name, *_table_cells(table), tokens, _ids(new_pages)))
    columns = (
        Column("side"), Column("group"), Column("pages"), number_column("first"), number_column("tokens"), Column("to be moved"), Column("new pages"),
    )  # fmt: skip
    if rows:
        show_table(console, "request", columns, rows)


def _table_cells(table: PageTable) -> tuple[str, str, str]:
    return _ids(table.pages.tolist()), str(table.first_page), str(table.num_tokens)


def _ids(pages: list[int], most: int = 8) -> str:
    """Page ids; the first few of many, in the table's order."""
    if not pages:
        return "none"
    if pages == sorted(set(pages)):
        return number_ranges(pages)
    more = f" and {len(pages) - most} more" if len(pages) > most else ""
    return ", ".join(map(str, pages[:most])) + more


def _show_copies(console: Console, replayed: ReplayResult) -> None:
    copies = replayed.copies
    if copies is None or not copies.by_rank:
        return
    columns = [number_column(name) for name in ("source rank", "copies", "bytes")]
    rows = [(str(rank), f"{count:,}", bytes_text(size)) for rank, (count, size) in copies.by_rank.items()]
    show_table(console, "copies", columns, rows, (f"digest {copies.digest}",))


def _show_events(console: Console, flight: Flight) -> None:
    rows = [(f"{event.at_s:.6f}", event.name, event.text) for event in flight.events]
    forgotten = flight.num_events_forgotten
    notes = (f"{forgotten} earlier {'event was' if forgotten == 1 else 'events were'} forgotten",) if forgotten else ()
    if rows:
        show_table(console, "events", (number_column("seconds"), Column("event"), Column("what")), rows, notes)


def replay_document(flight: Flight, replayed: ReplayResult) -> dict[str, Any]:
    """The same for a program, without the layouts."""
    copies = replayed.copies
    return {
        "outcome": replayed.outcome,
        "reason": replayed.reason,
        "refusal": replayed.refusal or None,
        "request": flight.request,
        "rank": flight.rank,
        "source": None if flight.src is None else flight.src.engine,
        "destination": flight.dst.engine,
        "failure": asdict(flight.failure),
        "copies": None
        if copies is None
        else {"num_copies": copies.num_copies, "num_bytes": copies.num_bytes, "digest": copies.digest},
        "num_bytes_compared": replayed.num_bytes,
        "written_at_s": flight.written_at_s,
        "kvreshard": flight.kvreshard,
        "events": [msgspec.structs.asdict(event) for event in flight.events],
    }
