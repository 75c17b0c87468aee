"""A load as OpenTelemetry spans, under the trace of the request that vLLM was sent.

1. A load that carries trace headers gets a `LoadSpans`; others cost nothing, and `opentelemetry` is imported with the first one.
2. What the session notes of the load (`LoadObserver.on_event`) is kept with its time.
3. When the load has ended, one span `kvreshard load` and its phases go to the tracer that vLLM has set up in this process: `handshake` until
   the source is met, `bind` until the copies are known, `read` until all transfers have settled, `check lease` until the lease words are read,
   `compare` where digests are compared.

Without `opentelemetry`, or where vLLM has set up no tracer, nothing happens.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from kvreshard.session.commands import Failure, Load
from kvreshard.session.pull import TransferStats

# Phase, and the events that begin and end it. The first event of each name counts.
PHASES: tuple[tuple[str, str, str], ...] = (
    ("handshake", "ordered", "met"),
    ("bind", "met", "bound"),
    ("read", "bound", "settled"),
    ("check lease", "settled", "read"),
    ("compare", "checking", "checked"),
)


class LoadSpans:
    """One load of one rank. `headers`: the request's, with `traceparent`."""

    def __init__(
        self, rank: int, load: Load, headers: Mapping[str, str], clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._rank, self._load, self._headers, self._clock_ns = rank, load, headers, clock_ns
        self._times_ns = {"ordered": clock_ns()}

    def on_event(self, event: str) -> None:
        """Something has happened. On any thread."""
        self._times_ns.setdefault(event, self._clock_ns())

    def on_end(self, outcome: TransferStats | Failure) -> None:
        """Hand the spans to the tracer."""
        tracer, context = _find_tracer(self._headers)
        if tracer is None:
            return
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        times_ns, end_ns = dict(self._times_ns), self._clock_ns()
        span = tracer.start_span(
            "kvreshard load",
            context,
            SpanKind.CLIENT,
            attributes=self._attributes(outcome),
            start_time=times_ns["ordered"],
        )
        if isinstance(outcome, Failure):
            span.set_status(Status(StatusCode.ERROR, f"{outcome.kind}: {outcome.text}"))
        inside = set_span_in_context(span, context)
        for name, begin, end in PHASES:
            if begin in times_ns:
                # A phase that the load did not live to see the end of is the one in which it failed.
                phase = tracer.start_span(name, inside, start_time=times_ns[begin])
                phase.end(times_ns.get(end, end_ns))
            if end not in times_ns:
                break
        span.end(end_ns)

    def _attributes(self, outcome: TransferStats | Failure) -> dict[str, str | int]:
        load = self._load
        found: dict[str, str | int] = {
            "kvreshard.rank": self._rank,
            "gen_ai.request.id": load.request,
            "kvreshard.source.request_id": load.lease.request,
            "kvreshard.source.engine": load.remote.engine,
            "server.address": load.remote.address.host,
            "server.port": load.remote.address.port,
        }
        if isinstance(outcome, Failure):
            return {**found, "error.type": outcome.kind}
        return {
            **found,
            "kvreshard.bytes": outcome.num_bytes,
            "kvreshard.bytes_read": outcome.num_read_bytes,
            "kvreshard.bytes_staged": outcome.num_staged_bytes,
            "kvreshard.copies": outcome.num_copies,
        }


def _find_tracer(headers: Mapping[str, str]) -> tuple[Any, Any]:
    """The tracer of this process and the context that the headers name; (None, None) without `opentelemetry`.

    vLLM seeds `random` alike in every worker (0.32.0, `set_random_seed`), from which the usual generator takes its ids: two ranks would give
    their spans the same ones.
    """
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return None, None
    tracer = trace.get_tracer("kvreshard")
    if hasattr(tracer, "id_generator"):  # of the SDK; without one no span goes anywhere
        tracer.id_generator = _unique_ids()
    return tracer, TraceContextTextMapPropagator().extract(headers)


@cache
def _unique_ids() -> Any:
    from opentelemetry.sdk.trace.id_generator import IdGenerator

    class UniqueIds(IdGenerator):  # type: ignore[misc]  # it has no types where `make check` runs
        def generate_span_id(self) -> int:
            return secrets.randbelow(2**64 - 1) + 1

        def generate_trace_id(self) -> int:
            return secrets.randbelow(2**128 - 1) + 1

    return UniqueIds()
