"""What does planning cost: describe, compile per destination rank, bind per request?

Prints medians of CPU time, with the number of copies. Run by `make bench`, or alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.model import EngineLayout, wire
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import bind, compile_route


def median_ms(work: Callable[[], object], times: int = 7) -> float:
    """Median CPU milliseconds of `work`, after one run to warm up."""
    work()
    took = []
    for _ in range(times):
        started = time.process_time()
        work()
        took.append(time.process_time() - started)
    return statistics.median(took) * 1e3


def say(what: str, milliseconds: float, note: str = "") -> None:
    """One line of the report."""
    sys.stdout.write(f"{what:<78} {milliseconds:9.2f} ms  {note}\n")


def bench_compile(model: str, prefill: str, decode: str) -> None:
    """Describe both engines, decode the wire form, compile for every destination rank."""
    loaded = load(model)
    src, dst = (
        describe(loaded, parse_engine(prefill), "prefill", 5000),
        describe(loaded, parse_engine(decode), "decode", 5000),
    )
    message = wire.encode(src)
    name = f"{model} {prefill} -> {decode}"
    say(f"describe the source, {name}", median_ms(lambda: describe(loaded, parse_engine(prefill), "prefill", 5000), 3))
    say(f"decode the source's layout, {name}", median_ms(lambda: wire.decode(message)), f"{len(message)} bytes")
    worst = max(median_ms(lambda rank=rank: compile_route(src, dst, rank), 3) for rank in dst.rank_by_number)  # type: ignore[misc]
    say(f"compile and prove, slowest destination rank, {name}", worst)


def bench_bind(model: str, prefill: str, decode: str, num_tokens: int) -> None:
    """Bind one request of one group, with fresh and with random tables."""
    loaded = load(model)
    pages = num_tokens // 16 * 5 // 4
    src, dst = (describe(loaded, parse_engine(e), n, pages) for e, n in ((prefill, "prefill"), (decode, "decode")))
    route = compile_route(src, dst, 0)
    for tables in ("fresh", "random"):
        request = one_request(src, dst, num_tokens, tables == "random")
        copies = sum(part.num_copies for part in bind(route, request))

        def run(request: Request = request) -> None:
            for _ in bind(route, request):
                pass

        name = f"{model} {prefill} -> {decode}, {num_tokens} tokens"
        say(f"bind, rank 0, {tables} tables, {name}", median_ms(run), f"{copies} copies")


def one_request(src: EngineLayout, dst: EngineLayout, num_tokens: int, shuffled: bool) -> Request:
    """A request over the only group of both engines."""
    rng = np.random.default_rng(0)
    tables = []
    for layout in (src, dst):
        (group,) = layout.groups
        needed = -(-num_tokens // (group.tokens_per_page or 1))
        free = np.arange(1, group.num_pages)
        tables.append({group.name: PageTable((rng.permutation(free) if shuffled else free)[:needed], num_tokens)})
    return Request(tables[0], tables[1], {dst.groups[0].name: [(0, num_tokens)]}, {})


if __name__ == "__main__":
    bench_compile("deepseek-v3", "tp=16,pp=4", "tp=8")
    bench_compile("nemotron-3-nano-30b-a3b", "tp=4", "tp=2")
    bench_compile("deepseek-v4-flash", "tp=8", "tp=4")
    for order in ("HND", "NHD"):
        bench_bind("llama-3.1-70b", f"tp=8,order={order}", f"tp=4,order={order}", 131072)
    bench_bind("llama-3.1-70b", "tp=8,page=16", "tp=4,page=24", 131072)
    bench_bind("deepseek-v3", "tp=8", "tp=4", 131072)
