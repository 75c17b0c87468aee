"""Two servers as an operator sees them: does every expression of the dashboard return data in a real Prometheus, are all rules healthy, does
`kvreshard top` show both, and does a traced request carry the load's spans?

`KVRESHARD_DASHBOARD=FILE`: what the panels show goes there, for `python -m tests.prometheus`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests import prometheus
from tests.e2e.cases import OURS
from tests.e2e.engine import RELEASE
from tests.e2e.engines import EngineSpec, Nursery
from tests.e2e.http_engine import ROOT, HttpEngine
from tests.e2e.models import folder as model_folder
from tests.e2e.prompts import ladder
from tests.e2e.router import PREFILL_PARAMS, route
from tests.promtool import dashboard_expressions

pytestmark = pytest.mark.e2e_ci

TRACE = "0af7651916cd43dd8448eb211c80319c"
PATIENCE_S = 60.0


class Collector:
    """What an OpenTelemetry collector gets: spans, as their protocol has them."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                spans.extend(span for of in body.resource_spans for scope in of.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def await_traced(self, name: str, count: int) -> list[Any]:
        """The spans of this name in the trace, once there are so many. Each process exports its own in batches, in any order."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [span for span in self.spans if span.name == name and span.trace_id.hex() == TRACE]
            if len(found) >= count or time.monotonic() > deadline:
                return found
            time.sleep(0.2)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.proto")
    found = Collector()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture(scope="module")
def pair(nursery: Nursery, collector: Collector) -> Iterator[tuple[HttpEngine, HttpEngine]]:
    nursery.ask((RELEASE, False), "make_model", "llama")
    nursery.stop_all()
    specs = [
        EngineSpec(
            "llama",
            tp=tp,
            connector=OURS,
            role=role,
            prefix_caching=True,
            recompute=True,
            extra=(("digest_share", 1.0),),
            arguments=(("otlp_traces_endpoint", collector.url),),
            environment=(("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf"),),
        )
        for tp, role in ((1, "kv_producer"), (2, "kv_consumer"))
    ]
    folder = nursery.folder / "watch"
    with HttpEngine(specs[0], folder / "p") as prefill, HttpEngine(specs[1], folder / "d") as decode:
        yield prefill, decode


def make_trouble(prefill: HttpEngine, decode: HttpEngine) -> None:
    """A load that fails, and a request that is computed although it was prefilled."""
    words = ladder(128, seed=5)[-2:]
    for change in ({"slot": 10**6}, {"slot": "none"}):
        outputs = prefill.generate(words, 1, [dict(PREFILL_PARAMS) for _ in words])
        wrong = [json.loads(json.dumps(output.kv_transfer_params)) for output in outputs]
        for params in wrong:
            params["kvreshard"].update(change)
        decode.generate(words, 4, wrong)


@pytest.mark.timeout(900)
def test_every_expression_of_the_dashboard_has_data(pair: tuple[HttpEngine, HttpEngine], tmp_path: Path) -> None:
    program = prometheus.find_server(tmp_path)
    if program is None:
        pytest.skip("prometheus is not here, and Debian's package cannot be fetched")
    targets = [f"127.0.0.1:{engine.port}" for engine in pair]
    with prometheus.prometheus(program, targets) as server:
        began_s = time.time()
        for number in range(20):
            route(*pair, ladder(128, seed=100 + number)[-4:])
            if number in (7, 8):
                make_trouble(*pair)
        time.sleep(3)
        # A panel of what must not happen shows nothing while it does not: what it compares must be there.
        for expression in dashboard_expressions():
            assert server.query(expression.removesuffix("> 0")), expression
        rules = [rule for group in server.ask("rules")["groups"] for rule in group["rules"]]
        assert len(rules) > 10
        assert {rule["health"] for rule in rules} == {"ok"}
        for rule in rules:
            assert rule["type"] == "alerting" or server.query(rule["name"]), rule["name"]
        failed = {series["metric"]["cause"] for series in server.query("kvreshard_failures_total > 0")}
        assert failed == {"seal"}, [line for line in pair[1].log.read_text().splitlines() if "was not loaded" in line]
        if path := os.environ.get("KVRESHARD_DASHBOARD"):
            Path(path).write_text(json.dumps(prometheus.collect(server, began_s)))


@pytest.mark.timeout(900)
def test_top_shows_both_engines(pair: tuple[HttpEngine, HttpEngine]) -> None:
    route(*pair, ladder(128, seed=1)[-2:])
    addresses = [f"127.0.0.1:{engine.port}" for engine in pair]
    command = [sys.executable, "-m", "kvreshard", "top", *addresses, "--interval", "3", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}
    ) as process:
        while process.poll() is None:
            route(*pair, ladder(128, seed=time.time_ns() % 10**6)[-2:])
        assert process.stdout is not None
        prefill, decode = json.load(process.stdout)
    assert decode["loads_per_s"] > 0
    assert decode["read_bytes_per_s"] > 0
    assert decode["load_seconds"]["0.5"] > 0
    assert decode["peers"] == 2
    assert (prefill["state"], decode["state"]) == ("ok", "ok")
    assert prefill["pool_blocks"] > 0
    assert prefill["build"]["vllm"] == RELEASE


@pytest.mark.timeout(900)
def test_the_doctor_says_whether_an_engine_that_is_not_started_could_read_from_one_that_runs(
    pair: tuple[HttpEngine, HttpEngine],
) -> None:
    """vLLM names fields by its modules, the catalog by its own pattern."""
    (address,) = set(re.findall(r"hands out its layout at (\S+) without keys", pair[0].log.read_text()))
    command = [sys.executable, "-m", "kvreshard", "doctor", "--no-loopback", "--json", "--peer", address]
    config = str(model_folder("llama") / "config.json")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "--model", config, "--decode", "tp=2,order=HND,dtype=float32"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    (route_line,) = [line for line in json.loads(done.stdout)["lines"] if line["check"].startswith("route")]
    assert route_line["status"] == "ok", route_line


@pytest.mark.timeout(900)
def test_a_traced_request_carries_the_spans_of_its_load(
    pair: tuple[HttpEngine, HttpEngine], collector: Collector
) -> None:
    prefill, decode = pair
    words = ladder(128, seed=77)[-1]
    (prefilled,) = prefill.generate([words], 1, [dict(PREFILL_PARAMS)])
    body = {
        "model": str(model_folder("llama")),
        "prompt": list(words),
        "max_tokens": 4,
        "kv_transfer_params": prefilled.kv_transfer_params,
    }
    headers = {"Content-Type": "application/json", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{decode.port}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200
    loads = collector.await_traced("kvreshard load", 2)
    assert {a.value.int_value for span in loads for a in span.attributes if a.key == "kvreshard.rank"} == {0, 1}
    assert len({span.span_id for span in loads}) == 2
    for load in loads:
        assert load.parent_span_id.hex() == "b7ad6b7169203331"
        inside = [span for span in collector.spans if span.parent_span_id == load.span_id]
        assert {span.name for span in inside} == {"handshake", "bind", "read", "check lease", "compare"}
    # vLLM's own.
    assert collector.await_traced("llm_request", 1)
