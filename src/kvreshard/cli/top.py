"""`kvreshard top`: what one or more engines do now, read from their `/metrics` again and again.

1. Each engine's `/metrics` is read at once with the others', every `--interval` seconds.
2. Two readings make rates and quantiles; gauges are shown as they are. A counter that goes down was started anew, and counts from 0.
3. A terminal shows a table that is drawn over; a pipe or `--once` gets one table, `--json` one document.

An engine that cannot be read, or has no series of kvreshard, is a row that says so. Refused: what is no address.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import math
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Column
from rich.text import Text

from kvreshard.cli.inputs import AsJson
from kvreshard.cli.output import bytes_text, number_column, show_table, write_json
from kvreshard.model.text import escaped

TIMEOUT_S = 5.0
MAX_BYTES = 1 << 26
MAX_ENGINES = 256
PREFIX = "kvreshard_"
# Counters by cause that are shown below the table.
CAUSES = {
    "failures": ("failed loads of ranks", "cause"),
    "fallbacks": ("computed here", "cause"),
    "partial_loads": ("loaded in part", "cause"),
    "handshakes": ("handshakes", "outcome"),
    "digest_checks": ("compared with their source", "result"),
    "leases": ("leases ended", "end"),
    "stuck_calls": ("calls that did not come back", "call"),
}
# What is usual is not shown as a cause.
USUAL = {("handshakes", "met"), ("leases", "reported"), ("digest_checks", "equal")}
COLUMNS = (
    Column("engine", no_wrap=True),
    *map(
        number_column,
        ("loads/s", "failed/s", "read/s", "load p50", "p99", "wait p99", "waiting", "loading", "held", "pool", "peers"),
    ),
    Column("state"),
)

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A series: its name and its labels, without those that tell engines of one process apart."""


@dataclass(frozen=True)
class Reading:
    """One engine's series at one time; `error` says why there are none."""

    at_s: float
    values: Mapping[Key, float] = field(default_factory=dict)
    error: str = ""

    def total(self, name: str, **labels: str) -> float:
        """The sum of a series over all labels but those given."""
        wanted = labels.items()
        return sum(
            value for (found, has), value in self.values.items() if found == PREFIX + name and wanted <= set(has)
        )


@dataclass(frozen=True)
class Window:
    """Two readings of one engine, and what has happened between them."""

    before: Reading
    now: Reading

    @property
    def seconds(self) -> float:
        return self.now.at_s - self.before.at_s

    def gained(self, name: str, **labels: str) -> float:
        """By how much a counter has grown."""
        low, high = self.before.total(name, **labels), self.now.total(name, **labels)
        return high - low if high >= low else high

    def rate(self, name: str, **labels: str) -> float | None:
        """The same for each second; None without two readings."""
        return self.gained(name, **labels) / self.seconds if self.seconds > 0 else None

    def quantile(self, name: str, share: float) -> float | None:
        """Of a histogram, as Prometheus' `histogram_quantile` finds it; None where nothing was counted."""
        bounds = {dict(has)["le"] for found, has in self.now.values if found == f"{PREFIX}{name}_bucket"}
        counts = [(float(bound), self.gained(f"{name}_bucket", le=bound)) for bound in sorted(bounds, key=float)]
        return find_quantile(counts, share)

    def causes(self) -> list[tuple[str, str, int, int]]:
        """(what, cause, since the engine's start, between the readings) of each cause that is not usual and was ever counted."""
        found = []
        for name, (what, label) in CAUSES.items():
            values = {
                dict(has).get(label, "")
                for has in (has for key, has in self.now.values if key == f"{PREFIX}{name}_total")
            }
            for value in sorted(values):
                count = self.now.total(f"{name}_total", **{label: value})
                if count and (name, value) not in USUAL:
                    found.append((what, value, int(count), int(self.gained(f"{name}_total", **{label: value}))))
        return found


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
    with ThreadPoolExecutor(min(32, len(urls))) as pool:

        def read() -> list[Reading]:
            return list(pool.map(read_engine, urls))

        before = read()
        time.sleep(interval)
        if as_json or once or not console.is_terminal:
            windows = dict(zip(urls, map(Window, before, read()), strict=True))
            if as_json:
                write_json([document(url, window) for url, window in windows.items()])
            else:
                show(console, windows)
            return
        with contextlib.suppress(KeyboardInterrupt):
            watch(console, urls, before, read, interval)


def watch(
    console: Console, urls: Sequence[str], before: list[Reading], read: Callable[[], list[Reading]], interval_s: float
) -> None:
    """Draw the table over itself until the reader interrupts."""
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = read()
            page = Console(file=io.StringIO(), force_terminal=True, width=console.width, color_system="standard")
            show(page, dict(zip(urls, map(Window, before, now), strict=True)))
            page.print(f"every {interval_s:g} s; Ctrl-C ends", style="dim")
            live.update(Text.from_ansi(page.file.getvalue()), refresh=True)  # type: ignore[attr-defined]
            before = now
            time.sleep(interval_s)


def read_url(engine: str) -> str:
    """The URL of an engine's metrics. Raises BadParameter.

    >>> read_url("10.0.0.1:8000"), read_url("https://decode.example/v1/metrics")
    ('http://10.0.0.1:8000/metrics', 'https://decode.example/v1/metrics')
    """
    text = engine if "://" in engine else f"http://{engine}"
    try:
        found = urlsplit(text)
        if (
            found.scheme in ("http", "https")
            and found.hostname
            and found.port != 0
            and text.isprintable()
            and " " not in text
        ):
            return text if found.path.strip("/") else f"{text.rstrip('/')}/metrics"
    except ValueError:
        pass
    raise typer.BadParameter(f"'{escaped(engine, 100)}' is no engine to watch; give HOST:PORT, or an http or https URL")


def read_engine(url: str) -> Reading:
    """One reading. Whatever goes wrong is its `error`."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            text = reply.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            return Reading(time.monotonic(), error=f"its metrics are larger than {MAX_BYTES >> 20} MiB")
        if reply.length:
            return Reading(time.monotonic(), error="cannot be read: it hung up in the middle of its answer")
        values = parse(text.decode())
    except urllib.error.HTTPError as error:
        return Reading(time.monotonic(), error=f"answers {error.code} {error.reason}")
    except urllib.error.URLError as error:
        return Reading(time.monotonic(), error=f"cannot be reached: {_reason(error.reason)}")
    except (OSError, http.client.HTTPException) as error:
        return Reading(time.monotonic(), error=f"cannot be read: {_reason(error)}")
    except ValueError:
        return Reading(time.monotonic(), error="its answer is no text of metrics")
    if not values:
        return Reading(time.monotonic(), error="has no series of kvreshard: is ReshardConnector its connector?")
    return Reading(time.monotonic(), values)


def parse(text: str) -> dict[Key, float]:
    """The series of kvreshard, added up over the engines of one process. Raises ValueError."""
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families(text):
        if not family.name.startswith(PREFIX):
            continue
        for sample in family.samples:
            float(sample.labels.get("le", 0))  # a bound is a number, or the answer is no text of metrics
            labels = tuple(
                sorted((name, value) for name, value in sample.labels.items() if name not in ("engine", "model_name"))
            )
            value = float(sample.value)
            if math.isfinite(value):
                found[sample.name, labels] = found.get((sample.name, labels), 0.0) + value
    return found


def find_quantile(counts: Sequence[tuple[float, float]], share: float) -> float | None:
    """The value below which a share of all lies. `counts`: upper bound and how many lie below it, in order.

    >>> find_quantile([(1.0, 0), (2.0, 10), (math.inf, 10)], 0.5)
    1.5
    """
    if not counts or counts[-1][1] <= 0:
        return None
    rank, low, below = share * counts[-1][1], 0.0, 0.0
    for bound, count in counts:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low


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
        _number(window.rate("load_seconds_count")),
        _number(failed_rate(window)),
        _bytes(window.rate("read_bytes_total")),
        _seconds(window.quantile("load_seconds", 0.5)),
        _seconds(window.quantile("load_seconds", 0.99)),
        _seconds(window.quantile("wait_seconds", 0.99)),
        f"{now.total('loads_waiting'):,.0f}",
        f"{now.total('loads_in_flight'):,.0f}",
        f"{held / pool:.0%}" if pool else "",
        f"{pool:,.0f}",
        f"{now.total('peers'):,.0f}",
        state(window),
    )


def state(window: Window) -> str:
    """What a person on call must know at once."""
    now = window.now
    found = [
        text
        for is_so, text in (
            (window.gained("digest_checks_total", result="different") > 0, "WRONG CACHE LOADED"),
            (now.total("stuck_threads") > 0, "a call does not come back"),
            (now.total("quarantine_blocks_held") > 0, f"{now.total('quarantine_blocks_held'):,.0f} blocks quarantined"),
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


def _reason(reason: object) -> str:
    return escaped(getattr(reason, "strerror", None) or reason, 100)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _bytes(value: float | None) -> str:
    return "" if value is None else bytes_text(round(value))


def _seconds(value: float | None) -> str:
    """
    >>> _seconds(0.0123), _seconds(2.5)
    ('12.3 ms', '2.50 s')
    """
    if value is None:
        return ""
    return f"{value * 1e3:.3g} ms" if value < 1.0 else f"{value:.2f} s"
