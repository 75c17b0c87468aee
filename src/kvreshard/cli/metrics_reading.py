"""The `/metrics` of engines, read at once and parsed: series of kvreshard, rates and quantiles between two readings.

Whatever an engine answers, or does not, is a `Reading` with an `error`; nothing raises. An answer may come from anybody: its size, time, series and
values are bounded, and texts are escaped.
"""

from __future__ import annotations

import http.client
import math
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import typer
from prometheus_client.parser import text_string_to_metric_families

from kvreshard.model.text import escaped

TIMEOUT_S = 5.0
MAX_BYTES = 1 << 26
# Causes of one kind that are shown, and characters of one: an answer may come from anybody.
MAX_CAUSES, MAX_LABEL, MAX_SERIES, MAX_VALUE = 32, 60, 10_000, 1e18
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

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A series: its name and its labels, without those that tell engines of one process apart."""


class _WithinHttp(urllib.request.HTTPRedirectHandler):
    """An engine may send us on, but not to another protocol."""

    def redirect_request(self, *given: Any) -> urllib.request.Request | None:
        if urlsplit(given[-1]).scheme not in ("http", "https"):
            raise urllib.error.URLError("it redirects to what is not http")
        return super().redirect_request(*given)


_opener = urllib.request.build_opener(_WithinHttp)


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
        """By how much a counter has grown; nothing is known without a reading before."""
        if self.before.error:
            return 0.0
        low, high = self.before.total(name, **labels), self.now.total(name, **labels)
        return high - low if high >= low else high

    def rate(self, name: str, **labels: str) -> float | None:
        """The same for each second; None without two readings."""
        if self.before.error or self.seconds <= 0:
            return None
        return self.gained(name, **labels) / self.seconds

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
            for value in sorted(values)[:MAX_CAUSES]:
                count = self.now.total(f"{name}_total", **{label: value})
                if count and (name, value) not in USUAL:
                    gained = int(self.gained(f"{name}_total", **{label: value}))
                    found.append((what, escaped(value, MAX_LABEL), int(count), gained))
        return found


def read_all(urls: Sequence[str]) -> list[Reading]:
    """One reading of each engine, at once. Threads that hang, in a resolver say, are left behind: they end with the program."""
    found = [Reading(time.monotonic(), error=f"did not answer within {2 * TIMEOUT_S:g} s")] * len(urls)

    def read(number: int) -> None:
        found[number] = read_engine(urls[number])

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(urls))]
    for thread in threads:
        thread.start()
    ends_s = time.monotonic() + 2 * TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, ends_s - time.monotonic()))
    return list(found)


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
            and (found.port is not None or "://" in engine)
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
        ends_s, text = time.monotonic() + TIMEOUT_S, b""
        with _opener.open(url, timeout=TIMEOUT_S) as reply:
            while len(text) <= MAX_BYTES and (part := reply.read1(1 << 20)):
                text += part
                if time.monotonic() > ends_s:  # the timeout of the socket is that of each part
                    raise TimeoutError("timed out")
        if len(text) > MAX_BYTES:
            return Reading(time.monotonic(), error=f"its metrics are larger than {MAX_BYTES >> 20} MiB")
        if reply.length:
            return Reading(time.monotonic(), error="cannot be read: it hung up in the middle of its answer")
        values = parse(text.decode())
    except urllib.error.HTTPError as error:
        return Reading(time.monotonic(), error=f"answers {error.code} {_reason(error.reason)}")
    except urllib.error.URLError as error:
        return Reading(time.monotonic(), error=f"cannot be reached: {_reason(error.reason)}")
    except (OSError, http.client.HTTPException) as error:
        return Reading(time.monotonic(), error=f"cannot be read: {_reason(error)}")
    except UnicodeDecodeError:
        return Reading(time.monotonic(), error="its answer is no text of metrics")
    except UnicodeError:  # of the host, before anybody is asked
        return Reading(time.monotonic(), error="cannot be reached: its host name is not valid")
    except (ValueError, IndexError):  # the parser raises the second for a label without a name
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
            if sample.name.endswith("_bucket"):
                bound = float(sample.labels.get("le", ""))  # what is no number is a ValueError, too
                if not (abs(bound) <= MAX_VALUE or bound == math.inf):
                    raise ValueError("the bound of a bucket is no number to count with")
            labels = tuple(
                sorted((name, value) for name, value in sample.labels.items() if name not in ("engine", "model_name"))
            )
            value = float(sample.value)
            key = sample.name, labels
            if abs(value) <= MAX_VALUE and (key in found or len(found) < MAX_SERIES):
                found[key] = found.get(key, 0.0) + value
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
        if math.isinf(bound):
            return low
        if count >= rank:
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low


def _reason(reason: object) -> str:
    return escaped(getattr(reason, "strerror", None) or reason, 100)
