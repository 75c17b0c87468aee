"""`kvreshard doctor`: is this machine fit to move caches, and can it with that engine? If not, what is to be done?

1. This machine (`doctor_host`), then NIXL and UCX on it (`doctor_nixl`), a transfer between two processes included.
2. With `--peer`: reach it, read its card, compare, route (`doctor_peer`). This side is a layout file, or `--model` with `--decode`
   (or `--prefill`, if the peer decodes), with the warnings that `plan` gives; with two peers, the first is the prefill engine.
3. Every line is ok, a warning, an error with its remedy, or skipped with the reason.

Exit codes: 0 no error, 1 at least one, 2 options that do not go together. Every check is bounded in time; nothing is changed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kvreshard.catalog import load
from kvreshard.cli import doctor_host as host
from kvreshard.cli.doctor_line import Check, Line, bounded
from kvreshard.cli.doctor_nixl import check_loopback, check_nixl, check_ucx
from kvreshard.cli.doctor_peer import Peer, check_pair, check_peer, check_route, parse_peer
from kvreshard.cli.inputs import Described, InputError, called, describe_side, find_lacking, read_layout
from kvreshard.cli.terminal import Column, Sheet, show_line, show_sheet, write_json
from kvreshard.model.text import counted

if TYPE_CHECKING:
    from kvreshard.session.keys import Keys

CHECK_S = 20.0
SLOW_CHECK_S = 90.0
EXIT_ERROR = 1
# A mismatch names every field that differs; a terminal shows the first ones.
MAX_CELL = 240


def doctor(
    peer: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of an engine's listener; twice: prefill, then decode.")
    ] = None,
    layout: Annotated[
        Path | None, typer.Option(help="This side's layout, of `kvreshard describe`; it decodes.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="This side's model: id of the catalog, or a config.json.")] = None,
    draft: Annotated[str | None, typer.Option(help="Model of this side's draft, where it has one: id or path.")] = None,
    decode: Annotated[str | None, typer.Option(help="This side decodes, as in tp=8; the peer prefills.")] = None,
    prefill: Annotated[str | None, typer.Option(help="This side prefills, as in tp=4; the peer decodes.")] = None,
    key: Annotated[Path | None, typer.Option(help="This side's .key_secret file, for engines that want keys.")] = None,
    trusted: Annotated[Path | None, typer.Option(help="Directory of .key files to trust besides.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to be free here.")] = None,
    loopback: Annotated[bool, typer.Option(help="Move bytes between two processes.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check this machine, NIXL on it, and whether it can work with an engine."""
    keys = read_key_options(key, trusted)
    peers = [replace(parse_peer(text), keys=keys) for text in peer or ()]
    mine = read_side(peers, layout, model, draft, decode, prefill)
    lines = [*check_host(port, loopback), *check_peers(peers, mine, prefill is not None)]
    num_errors = sum(line.status == "error" for line in lines)
    if as_json:
        found = [
            {"check": line.check, "status": line.status, "text": line.text, "remedy": line.remedy or None}
            for line in lines
        ]
        write_json({"healthy": not num_errors, "lines": found})
    else:
        show_lines(Console(), lines)
    if num_errors:
        sys.stdout.flush()
        raise typer.Exit(EXIT_ERROR)


def read_key_options(key: Path | None, trusted: Path | None) -> Keys | None:
    """The keys to knock with, None without. Raises InputError, or KvReshardError for files that are no keys."""
    if key is None:
        if trusted is not None:
            raise InputError("--trusted goes with --key: this side needs a key of its own")
        return None
    from kvreshard.session.keys import read_keys

    return read_keys(key, trusted)


def read_side(
    peers: list[Peer],
    layout: Path | None,
    model: str | None,
    draft: str | None,
    decode: str | None,
    prefill: str | None,
) -> Described | None:
    """This side, None if nothing says what it is. Raises InputError or what the catalog refuses."""
    given = [
        name for name, value in (("layout", layout), ("decode", decode), ("prefill", prefill)) if value is not None
    ]
    if len(peers) > 2 or len(given) > 1 or (given and len(peers) != 1):
        raise InputError(
            "give one --peer with one of --layout, --decode or --prefill for this side, or two peers and nothing of this side"
        )
    if (model is None) == bool(decode or prefill):
        raise InputError("--model goes with --decode or --prefill tp=..., and they with --model")
    if draft is not None and model is None:
        raise InputError(f"--draft {draft}: goes with --model; a layout file says all there is")
    if layout is not None:
        mine = called(read_layout(layout), "this side", layout)
        return Described(mine, find_lacking(mine))
    if model is None:
        return None
    return describe_side(load(model, draft), "decode" if decode else "prefill", str(decode or prefill), None)


def check_host(port: int | None, loopback: bool) -> Iterator[Line]:
    """This machine."""
    checks: list[tuple[str, Check, float]] = [
        ("python", host.check_python, CHECK_S),
        ("locked memory", host.check_memlock, CHECK_S),
        ("shared memory", host.check_shm, CHECK_S),
        ("file descriptors", host.check_files, CHECK_S),
        ("ptrace", host.check_ptrace, CHECK_S),
        ("port", partial(host.check_port, port), CHECK_S),
        ("clock", host.check_clock, CHECK_S),
        ("nixl", check_nixl, SLOW_CHECK_S),
        ("ucx", check_ucx, SLOW_CHECK_S),
    ]
    if loopback:
        checks.append(("loopback", check_loopback, SLOW_CHECK_S))
    for name, check, timeout_s in checks:
        yield from bounded(name, check, timeout_s)


def check_peers(peers: list[Peer], mine: Described | None, is_prefill: bool) -> Iterator[Line]:
    """The engines that were named, what is odd about ours, and whether caches can go between them."""
    for found in mine.warnings if mine is not None else ():
        yield Line("this side", "warning", found, "intended? then nothing needs to be done")
    for peer in peers:
        yield from bounded(peer.name, partial(check_peer, peer), SLOW_CHECK_S)
    if len(peers) == 2:
        yield from bounded("pair", partial(check_pair, *peers), SLOW_CHECK_S)
    elif peers and mine is None:
        yield Line(
            "route", "skipped", "nothing is known of this side; give --layout FILE, or --model with --decode tp=..."
        )
    elif peers and mine is not None:
        theirs = peers[0].layout
        if theirs is None:
            yield Line("route", "skipped", "the peer's layout is not known")
        else:
            src, dst = (mine.layout, theirs) if is_prefill else (theirs, mine.layout)
            yield from bounded("route", partial(check_route, src, dst), SLOW_CHECK_S)


def show_lines(console: Console, lines: list[Line]) -> None:
    """A table, and the sum of it."""
    columns = (Column("check"), Column("status", whole=True), Column("what was found"), Column("what to do"))
    rows = tuple(
        (line.check, line.status, shorten(line.text) if console.is_terminal else line.text, line.remedy)
        for line in lines
    )
    show_sheet(console, Sheet("kvreshard doctor", columns, rows))
    counts = {status: sum(line.status == status for line in lines) for status in ("error", "warning")}
    errors, warnings = counted(counts["error"], "error"), counted(counts["warning"], "warning")
    if counts["error"]:
        show_line(console, f"wrong: {errors} and {warnings} in {len(lines)} checks")
    else:
        show_line(console, f"right: no errors in {len(lines)} checks, {warnings}")


def shorten(text: str) -> str:
    """Text for a terminal's cell.

    >>> shorten("as it is"), len(shorten("x" * 10_000)) < 300
    ('as it is', True)
    """
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]} ... (all of it: --json)"
