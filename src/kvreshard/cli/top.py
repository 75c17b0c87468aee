"""`kvreshard top`: what one or more engines do now, read from their `/metrics` again and again.

1. Each engine's `/metrics` is read at once with the others', every `--interval` seconds.
2. Two readings make rates and quantiles; gauges are shown as they are. An engine whose counter goes down was started anew: it counts from 0.
3. A terminal shows a table that is drawn over; a pipe or `--once` gets one table, `--json` one document.

An engine that cannot be read, or has no series of kvreshard, is a row that says so. Refused: what is no address.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Column
from rich.text import Text

from kvreshard.cli.inputs import AsJson
from kvreshard.cli.metrics_reading import PREFIX, Reading, Window, read_all, read_url
from kvreshard.cli.output import bytes_text, number_column, seconds_text, show_table, write_json
from kvreshard.model.text import counted

MAX_ENGINES = 256
COLUMNS = (
    Column("engine", no_wrap=True),
    *map(
        number_column,
        ("loads/s", "failed/s", "read/s", "load p50", "p99", "wait p99", "waiting", "loading", "held", "pool", "peers"),
    ),
    Column("state"),
)


def top(
    engines: Annotated[
        list[str],
        typer.Argument(
            help="Engines to watch: HOST:PORT of their HTTP server, or the URL of their metrics.", show_default=False
        ),
    ],
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1, max=3600.0)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one table, after two readings, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch engines: loads, times, blocks that are held, and causes of failures."""
    urls = list(dict.fromkeys(read_url(engine) for engine in engines))
    if len(urls) > MAX_ENGINES:
        raise typer.BadParameter(f"{len(urls)} engines: at most {MAX_ENGINES} are watched at once")
    console = Console()
    before = read_all(urls)
    time.sleep(interval)
    if not (as_json or once) and console.is_terminal:
        with contextlib.suppress(KeyboardInterrupt):
            watch(console, urls, before, interval)
        return
    windows = dict(zip(urls, map(Window, before, read_all(urls)), strict=True))
    if as_json:
        write_json([document(url, window) for url, window in windows.items()])
    else:
        show(console, windows)
    if all(window.now.error for window in windows.values()):
        raise typer.Exit(1)


def watch(console: Console, urls: Sequence[str], before: list[Reading], interval_s: float) -> None:
    """Draw the table over itself until the reader interrupts."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = read_all(urls)
            text = io.StringIO()
            page = Console(file=text, force_terminal=True, width=console.width, color_system="standard")
            show(page, dict(zip(urls, map(Window, before, now), strict=True)))
            page.print(f"every {interval_s:g} s; Ctrl-C ends", style="dim")
            live.update(Text.from_ansi(text.getvalue()), refresh=True)
            # Rates are from the last good reading on.
            before = [old if new.error else new for old, new in zip(before, now, strict=True)]
            time.sleep(interval_s)


def show(console: Console, windows: Mapping[str, Window]) -> None:
    """The table, and the causes below it."""
    show_table(console, "engines", COLUMNS, [row(url, window) for url, window in windows.items()])
    causes = [
        (_short(url), what, cause, f"{count:,}", f"{gained:,}")
        for url, window in windows.items()
        for what, cause, count, gained in window.causes()
    ]
    if causes:
        columns = (
            Column("engine", no_wrap=True),
            Column("what"),
            Column("cause"),
            number_column("since start"),
            number_column("now"),
        )
        show_table(console, "causes", columns, causes)


def row(url: str, window: Window) -> tuple[str, ...]:
    """One engine's row."""
    now = window.now
    if now.error:
        return (_short(url), *([""] * 11), now.error)
    held, pool = now.total("blocks_held"), now.total("pool_blocks")
    return (
        _short(url),
        _text(window.rate("load_seconds_count"), "{:,.1f}".format),
        _text(failed_rate(window), "{:,.1f}".format),
        _text(window.rate("read_bytes_total"), lambda size: bytes_text(round(size))),
        _text(window.quantile("load_seconds", 0.5), seconds_text),
        _text(window.quantile("load_seconds", 0.99), seconds_text),
        _text(window.quantile("wait_seconds", 0.99), seconds_text),
        f"{now.total('loads_waiting'):,.0f}",
        f"{now.total('loads_in_flight'):,.0f}",
        _share_text(held / pool) if pool else "",
        f"{pool:,.0f}",
        f"{now.total('peers'):,.0f}",
        state(window),
    )


def _share_text(share: float) -> str:
    """Some is not shown as none."""
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def state(window: Window) -> str:
    """What a person on call must know at once."""
    now = window.now
    found = [
        text
        for is_so, text in (
            (window.gained("digest_checks_total", result="different") > 0, "WRONG CACHE LOADED"),
            (now.total("stuck_threads") > 0, "a call does not come back"),
            (
                now.total("quarantine_blocks_held") > 0,
                f"{counted(round(now.total('quarantine_blocks_held')), 'block')} quarantined",
            ),
            (window.before.error == "" and started_anew(window), "started anew"),
        )
        if is_so
    ]
    return ", ".join(found) or "ok"


def started_anew(window: Window) -> bool:
    """Whether a counter has gone down."""
    before = window.before.values
    return any(
        key[0].endswith(("_total", "_count")) and value < before.get(key, 0.0)
        for key, value in window.now.values.items()
    )


def failed_rate(window: Window) -> float | None:
    """Loads of ranks that failed in a second, cancelled ones aside."""
    every, cancelled = window.rate("failures_total"), window.rate("failures_total", cause="cancelled")
    return None if every is None or cancelled is None else max(0.0, every - cancelled)


def document(url: str, window: Window) -> dict[str, Any]:
    """One engine for programs."""
    now = window.now
    if now.error:
        return {"engine": url, "error": now.error}
    (build,) = [dict(has) for name, has in now.values if name == f"{PREFIX}build_info"][:1] or [{}]
    return {
        "engine": url,
        "build": build,
        "seconds": round(window.seconds, 3),
        "loads_per_s": window.rate("load_seconds_count"),
        "failures_per_s": failed_rate(window),
        "read_bytes_per_s": window.rate("read_bytes_total"),
        "load_seconds": {share: window.quantile("load_seconds", float(share)) for share in ("0.5", "0.99")},
        "wait_seconds": {share: window.quantile("wait_seconds", float(share)) for share in ("0.5", "0.99")},
        **{
            name: int(now.total(name))
            for name in (
                "loads_waiting", "loads_in_flight", "leases_held", "blocks_held", "pool_blocks", "quarantine_blocks_held", "peers", "stuck_threads",
            )
        },
        "state": state(window),
        "causes": [dict(zip(("what", "cause", "since_start", "now"), one, strict=True)) for one in window.causes()],
    }  # fmt: skip


def _short(url: str) -> str:
    found = urlsplit(url)
    return found.netloc if found.path == "/metrics" else url.partition("://")[2]


def _text(value: float | None, text: Callable[[float], str]) -> str:
    """A value in words; empty if it is not known."""
    return "" if value is None else text(value)
