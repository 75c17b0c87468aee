"""`kvreshard replay FILE`: what happened to a load that failed, done again without the engines.

1. Read the record (docs/flight-recorder.md). 2. Do the load again (`tools.replay`). 3. Show the record and the outcome.

Exit codes: 0 the outcome explains the failure (the same refusal, or nothing wrong in the plan), 1 something differs, 2 no record.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvreshard.cli.inputs import AsJson, InputError, read_bytes
from kvreshard.cli.output import write_json
from kvreshard.cli.replay_view import replay_document, show_replay
from kvreshard.cli.scale import available_bytes
from kvreshard.model import KvReshardError, WireError
from kvreshard.tools.flight import MAX_FLIGHT_BYTES, Flight, decode_flight
from kvreshard.tools.replay import ReplayError, replay

EXIT_DIFFERENT = 1


def replay_file(
    file: Annotated[Path, typer.Argument(help="A record that a failed load left.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="Of the contents.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Do a recorded load again on the memory transport, and say whether the same comes out."""
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
        sys.stdout.flush()
        raise typer.Exit(EXIT_DIFFERENT)


def read_flight(path: Path) -> Flight:
    """The record in a file. Raises InputError or WireError naming the file."""
    content = read_bytes(path, MAX_FLIGHT_BYTES, "flight record")
    if content.lstrip()[:1] in (b"{", b"["):  # no message of MessagePack that holds a record begins so
        raise InputError(f"flight record '{path}': holds JSON; give what an engine with flight_recorder_dir has left")
    try:
        return decode_flight(content)
    except WireError as error:
        raise WireError(f"flight record '{path}': {error}") from None
