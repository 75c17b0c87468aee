"""Does `kvreshard top` show what engines did between two readings, whatever they answer?"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from typer import BadParameter

from kvreshard.cli.metrics_reading import Reading, Window, find_quantile, parse, read_all, read_engine, read_url
from kvreshard.cli.top import document, row, state


class Engine:
    """An engine's series, made by Prometheus' own client."""

    def __init__(self, names: Sequence[str] = ("0",)) -> None:
        self.registry, self.names = CollectorRegistry(), names
        labels = ["model_name", "engine"]
        self.loads = Histogram("kvreshard_load_seconds", "t", labels, registry=self.registry, buckets=(0.01, 0.1, 1.0))
        self.failures = Counter("kvreshard_failures", "t", [*labels, "cause"], registry=self.registry)
        self.read = Counter("kvreshard_read_bytes", "t", [*labels, "way"], registry=self.registry)
        self.checks = Counter("kvreshard_digest_checks", "t", [*labels, "result"], registry=self.registry)
        self.gauges = {
            name: Gauge(f"kvreshard_{name}", "t", labels, registry=self.registry)
            for name in (
                "blocks_held",
                "pool_blocks",
                "peers",
                "stuck_threads",
                "quarantine_blocks_held",
                "loads_waiting",
            )
        }
        Gauge("vllm:num_requests_running", "t", registry=self.registry).set(7)

    def reading(self, at_s: float) -> Reading:
        return Reading(at_s, parse(generate_latest(self.registry).decode()))


def test_rates_quantiles_and_gauges_are_those_between_two_readings() -> None:
    engine = Engine(("0", "1"))
    for name in engine.names:
        engine.loads.labels("m", name).observe(0.5)
        engine.failures.labels("m", name, "timeout").inc(100)
        engine.gauges["blocks_held"].labels("m", name).set(30)
        engine.gauges["pool_blocks"].labels("m", name).set(100)
    before = engine.reading(10.0)
    for name in engine.names:
        for seconds in (0.02, 0.02, 0.05, 0.05):
            engine.loads.labels("m", name).observe(seconds)
        engine.failures.labels("m", name, "timeout").inc(2)
        engine.failures.labels("m", name, "cancelled").inc(8)
        engine.read.labels("m", name, "direct").inc(3 << 20)
        engine.read.labels("m", name, "staged").inc(1 << 20)
    window = Window(before, engine.reading(14.0))
    found = document("http://e/metrics", window)
    assert found["loads_per_s"] == 8 / 4
    assert found["failures_per_s"] == 4 / 4
    assert found["read_bytes_per_s"] == 2 * (4 << 20) / 4
    assert found["load_seconds"] == {"0.5": pytest.approx(0.055), "0.99": pytest.approx(0.0991)}
    assert (found["blocks_held"], found["pool_blocks"]) == (60, 200)
    assert {(one["cause"], one["since_start"], one["now"]) for one in found["causes"]} == {
        ("timeout", 204, 4),
        ("cancelled", 16, 16),
    }
    cells = row("http://e:8000/metrics", window)
    assert cells[0] == "e:8000"
    assert cells[1:4] == ("2.0", "1.0", "2 MiB")
    assert "30%" in cells
    assert state(window) == "ok"
    json.dumps(found)


def test_a_few_blocks_of_a_large_pool_are_not_shown_as_none() -> None:
    engine = Engine()
    engine.gauges["pool_blocks"].labels("m", "0").set(10_000)
    for held, shown in ((0, "0%"), (1, "<1%"), (99, "<1%"), (100, "1%"), (10_000, "100%")):
        engine.gauges["blocks_held"].labels("m", "0").set(held)
        assert shown in row("http://e:8000/metrics", Window(engine.reading(0.0), engine.reading(1.0)))


def test_what_is_wrong_is_said_at_once() -> None:
    engine = Engine()
    engine.checks.labels("m", "0", "equal").inc()
    before = engine.reading(0.0)
    engine.checks.labels("m", "0", "different").inc()
    engine.gauges["stuck_threads"].labels("m", "0").set(1)
    engine.gauges["quarantine_blocks_held"].labels("m", "0").set(12)
    told = state(Window(before, engine.reading(1.0)))
    assert told == "WRONG CACHE LOADED, a call does not come back, 12 blocks quarantined"
    engine.gauges["quarantine_blocks_held"].labels("m", "0").set(1)
    assert state(Window(before, engine.reading(2.0))).endswith(", 1 block quarantined")


def test_an_engine_that_was_started_anew_counts_from_zero() -> None:
    old, new = Engine(), Engine()
    old.failures.labels("m", "0", "transfer").inc(1000)
    new.failures.labels("m", "0", "transfer").inc(3)
    window = Window(old.reading(0.0), new.reading(1.0))
    assert window.gained("failures_total") == 3
    assert state(window) == "started anew"


def test_without_a_load_there_are_no_times() -> None:
    window = Window(Engine().reading(0.0), Engine().reading(2.0))
    assert row("u", window)[4:7] == ("", "", "")
    assert Window(window.now, window.now).rate("failures_total") is None


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (math.inf, 0.0)], 0.5, None),
        ([(1.0, 0.0), (math.inf, 4.0)], 0.5, 1.0),
        ([(1.0, 4.0), (2.0, 4.0), (math.inf, 4.0)], 1.0, 1.0),
        ([(1.0, 1.0), (2.0, 3.0), (math.inf, 3.0)], 0.5, 1.25),
    ],
)
def test_quantiles(counts: list[tuple[float, float]], share: float, expected: float | None) -> None:
    assert find_quantile(counts, share) == expected


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


def saying(body: bytes, status: int = 200) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        (b"vllm:x 1\n", 200, "has no series of kvreshard"),
        (b"", 200, "has no series of kvreshard"),
        (b"kvreshard_x{ 1\n", 200, "no text of metrics"),
        (b"kvreshard_x abc\n", 200, "no text of metrics"),
        (b"\xff\xfe", 200, "no text of metrics"),
        (b'kvreshard_x{a="1", ="2"} 1\n', 200, "no text of metrics"),
        (b'kvreshard_a_bucket{le="wide"} 1\n', 200, "no text of metrics"),
        (b'kvreshard_a_bucket{le="nan"} 1\n', 200, "no text of metrics"),
        (b'kvreshard_a_bucket{le="-1e308"} 1\n', 200, "no text of metrics"),
        (b"kvreshard_load_seconds_bucket 1\n", 200, "no text of metrics"),
        (b"<html>not found</html>", 404, "answers 404"),
        (b"", 503, "answers 503"),
    ],
)
def test_what_is_no_engine_is_a_row_that_says_so(body: bytes, status: int, told: str) -> None:
    with serving(saying(body, status)) as address:
        found = read_engine(read_url(address))
    assert told in found.error
    assert row("u", Window(found, found))[-1] == found.error
    assert document("u", Window(found, found)) == {"engine": "u", "error": found.error}


def test_what_an_answer_says_cannot_write_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'kvreshard_failures_total{cause="\x1b[2J\\nok"} 3\n# TYPE kvreshard_failures counter\n'
    body += "".join(f'kvreshard_fallbacks_total{{cause="c{number}"}} 1\n' for number in range(20_000))
    with serving(saying(body.encode())) as address:
        found = read_engine(read_url(address))
    window = Window(found, found)
    assert not found.error
    causes = window.causes()
    assert "\\x1b[2J\\nok" in {cause for _, cause, _, _ in causes}
    assert len(causes) <= 2 * 32
    assert all(text.isprintable() for cells in [row("u", window), *causes] for text in map(str, cells))

    def rude(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 404 \x1b[2Jgone\r\nContent-Length: 0\r\n\r\n")

    with serving(rude) as address:
        assert read_engine(read_url(address)).error.isprintable()


def test_nobody_is_there_and_somebody_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be reached" in read_engine("http://127.0.0.1:9/metrics").error

    def hang_up(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf")

    with serving(hang_up) as address:
        assert "cannot be read" in read_engine(read_url(address)).error
    monkeypatch.setattr("kvreshard.cli.metrics_reading.TIMEOUT_S", 0.2)
    stop = threading.Event()
    with serving(lambda handler: bool(stop.wait(10)) and None) as address:
        assert "timed out" in read_engine(read_url(address)).error
        stop.set()


def test_an_answer_that_drips_or_leads_elsewhere_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreshard.cli.metrics_reading.TIMEOUT_S", 0.5)
    stop = threading.Event()

    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not stop.wait(0.05):
            handler.wfile.write(b"#")

    with serving(drip) as slow, serving(saying(b"kvreshard_peers 2\n")) as good:
        bad, fine = read_all([read_url(slow), read_url(good)])
        stop.set()
    assert "timed out" in bad.error
    assert fine.total("peers") == 2

    def lead(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "ftp://127.0.0.1/metrics")
        handler.end_headers()

    with serving(lead) as address:
        assert "redirects to what is not http" in read_engine(read_url(address)).error


def test_numbers_that_mean_nothing_are_left_out() -> None:
    text = "".join(
        f'kvreshard_failures_total{{cause="a",engine="{n}"}} {value}\n'
        for n, value in enumerate(("1e308", "1e308", "NaN", "+Inf", "3"))
    )
    window = Window(Reading(0.0, parse("kvreshard_peers 1\n")), Reading(1.0, parse(text)))
    assert document("u", window)["failures_per_s"] == 3
    assert row("u", window)[2] == "3.0"


def test_after_a_reading_that_failed_nothing_is_said_of_what_happened_since() -> None:
    engine = Engine()
    engine.checks.labels("m", "0", "different").inc()
    engine.failures.labels("m", "0", "seal").inc(10**6)
    window = Window(Reading(0.0, error="timed out"), engine.reading(2.0))
    assert state(window) == "ok"
    assert row("u", window)[1:4] == ("", "", "")
    assert document("u", window)["causes"] == [
        {"what": "failed loads of ranks", "cause": "seal", "since_start": 10**6, "now": 0},
        {"what": "compared with their source", "cause": "different", "since_start": 1, "now": 0},
    ]


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvreshard.cli.metrics_reading.MAX_BYTES", 1000)
    with serving(saying(b"# " + b"x" * 2000)) as address:
        assert "larger than" in read_engine(read_url(address)).error


@pytest.mark.parametrize(
    "engine",
    [
        "",
        "file:///etc/passwd",
        "foo",
        "http://",
        "ftp://h/x",
        "h:notaport",
        "h:0",
        "h:99999",
        "a b:1",
        "h:1\n",
        "http://[::1",
    ],
)
def test_what_is_no_address_is_refused(engine: str) -> None:
    with pytest.raises(BadParameter):
        read_url(engine)


def test_the_command_shows_engines_side_by_side() -> None:
    numbers = itertools.count(1)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        count = next(numbers)
        saying(
            f'# TYPE kvreshard_failures_total counter\nkvreshard_failures_total{{cause="seal"}} {count * 10}\n'.encode()
        )(handler)

    with serving(answer) as address:
        command = [sys.executable, "-m", "kvreshard", "top", address, "127.0.0.1:9", "--interval", "0.2"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        as_json = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True, timeout=60)
    lines = shown.stdout.splitlines()
    assert any(line.startswith(address) and line.rstrip().endswith("ok") for line in lines)
    assert any(line.startswith("127.0.0.1:9") and "cannot be reached" in line for line in lines)
    assert any("seal" in line for line in lines)
    first, second = json.loads(as_json.stdout)
    assert first["failures_per_s"] > 0
    assert first["causes"][0]["cause"] == "seal"
    assert "cannot be reached" in second["error"]
    refused = subprocess.run([*command[:4], "ftp://x"], capture_output=True, text=True, check=False, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is no engine to watch" in refused.stderr


def test_where_nobody_answers_the_exit_code_says_so() -> None:
    command = [sys.executable, "-m", "kvreshard", "top", "127.0.0.1:9", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be reached" in done.stdout


def test_a_host_name_that_cannot_be_looked_up_is_said() -> None:
    assert read_engine(read_url("a..b:8000")).error == "cannot be reached: its host name is not valid"


def test_a_quantile_is_a_number_whatever_bounds_and_counts_there_are() -> None:
    """A last bound in two forms, of which the first has fewer."""
    assert find_quantile([(0.5, 1), (math.inf, 2), (math.inf, 9)], 0.99) == 0.5
