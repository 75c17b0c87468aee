"""Is a load of a traced request one span with its phases, under the request's own trace, and does anything happen without?"""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from tests.unit.session.world import World, make_world, meet, order_load

from kvreshard.session.commands import Load
from kvreshard.testing.oracle import write_values
from kvreshard.tools.observer import ObserverOptions

pytestmark = pytest.mark.vllm

TRACE, PARENT = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """What a process of vLLM has with `--otlp-traces-endpoint`, with spans kept instead of sent."""
    found, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(found))
    trace.set_tracer_provider(provider)
    return found


@pytest.fixture(params=[0.0, 1.0], ids=["plain", "compared"])
def world(request: pytest.FixtureRequest, exporter: InMemorySpanExporter) -> Iterator[World]:
    exporter.clear()
    made = make_world(2, 3, watched=ObserverOptions(digest_share=request.param, digest_timeout_s=20.0))
    yield made
    made.close()


def run(world: World, headers: dict[str, str] | None, *, is_published: bool = True) -> None:
    if is_published:
        world.acquire_and_publish()
    for endpoint in world.dst.endpoints.values():
        submit = endpoint.submit
        endpoint.submit = lambda command, submit=submit: submit(  # type: ignore[method-assign]
            dataclasses.replace(command, trace_headers=headers) if isinstance(command, Load) else command
        )
    wanted = order_load(world)
    write_values(world.src.layout, world.dst.layout, world.src.memory, wanted, 3)
    world.turn()
    meet(world)
    for _ in range(20):
        world.turn()
        world.fabric.step()


def loads(exporter: InMemorySpanExporter) -> dict[int, ReadableSpan]:
    """The span of each rank's load."""
    spans = [span for span in exporter.get_finished_spans() if span.name == "kvreshard load"]
    return {int(span.attributes["kvreshard.rank"]): span for span in spans}  # type: ignore[index,arg-type]


def phases(exporter: InMemorySpanExporter, load: ReadableSpan) -> list[ReadableSpan]:
    inside = [one for one in exporter.get_finished_spans() if one.parent and one.parent.span_id == load.context.span_id]
    return sorted(inside, key=lambda span: span.start_time or 0)


def test_each_rank_s_load_is_a_span_with_its_phases_under_the_request(
    world: World, exporter: InMemorySpanExporter
) -> None:
    run(world, HEADERS)
    found = loads(exporter)
    assert set(found) == set(world.dst.endpoints)
    is_compared = next(iter(world.dst.endpoints.values()))._observer.options.digest_share > 0  # type: ignore[attr-defined]
    for load in found.values():
        assert (load.context.trace_id, load.parent and load.parent.span_id) == (TRACE, PARENT)
        assert load.status.status_code is not StatusCode.ERROR
        attributes = load.attributes or {}
        assert attributes["server.port"] == 1
        assert int(attributes["kvreshard.bytes"]) > 0  # type: ignore[arg-type]
        inside = phases(exporter, load)
        expected = ["handshake", "bind", "read", "check lease", *(["compare"] if is_compared else [])]
        assert [span.name for span in inside] == expected
        for before, after in itertools.pairwise(inside):
            assert (before.end_time or 0) <= (after.start_time or 0)
        assert inside[0].start_time == load.start_time
        assert (inside[-1].end_time or 0) <= (load.end_time or 0)


def test_processes_that_are_seeded_alike_have_ids_of_their_own(world: World, exporter: InMemorySpanExporter) -> None:
    """As vLLM seeds its workers: `random` is where OpenTelemetry's own generator takes ids from."""
    random.seed(0)
    run(world, HEADERS)
    first = {span.context.span_id for span in exporter.get_finished_spans()}
    again = make_world(2, 3, watched=ObserverOptions(digest_timeout_s=20.0))
    random.seed(0)
    run(again, HEADERS)
    again.close()
    spans = [span.context.span_id for span in exporter.get_finished_spans()]
    assert first
    assert len(set(spans)) == len(spans) > len(first)


def test_a_load_that_fails_says_why_and_in_which_phase(world: World, exporter: InMemorySpanExporter) -> None:
    run(world, HEADERS, is_published=False)
    for load in loads(exporter).values():
        assert load.status.status_code is StatusCode.ERROR
        assert (load.attributes or {})["error.type"] == "stale lease"
        assert phases(exporter, load)[-1].name == "check lease"
    assert set(loads(exporter)) == set(world.dst.endpoints)


@pytest.mark.parametrize("headers", [None, {}])
def test_without_a_trace_there_is_no_span(
    world: World, exporter: InMemorySpanExporter, headers: dict[str, str] | None
) -> None:
    run(world, headers)
    assert not exporter.get_finished_spans()


def test_headers_that_say_nothing_begin_a_trace_of_their_own(world: World, exporter: InMemorySpanExporter) -> None:
    run(world, {"traceparent": "00-\n-zz", "tracestate": "x" * 100_000})
    assert {load.parent for load in loads(exporter).values()} == {None}


def test_nothing_is_imported_while_nothing_is_traced() -> None:
    code = "import sys, kvreshard.tools.observer; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
