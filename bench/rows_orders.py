"""Row o: one request with its pages outermost in memory on both sides, beside vLLM's order of this connector. By the clock, ours both.

`BLHNC` puts the layers of a page side by side, `BHLNC` also its heads outside them: what one rank reads of a page is then one copy
instead of one per layer. Bytes of both are compared with their sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from bench.arena import Arena
from bench.compare import compare
from bench.results import Result, compared
from bench.shapes import Shape, pool_for, request
from kvreshard.plan.compile import compile_route
from kvreshard.plan.reads import plan_reads
from kvreshard.session.transfer import pull

ROW = "o orders"
USUAL = "LBHNC"
# Model, sizes of both sides, order.
CASES = (
    ("llama-3.1-70b", "tp=8", "tp=8", "BLHNC"),
    ("llama-3.1-70b", "tp=8", "tp=4", "BHLNC"),
    ("llama-3.1-70b", "tp=4", "tp=8", "BHLNC"),
    ("deepseek-v3", "tp=8", "tp=4", "BLHNC"),
)


def run(full: bool) -> Iterator[Result]:
    """One result per case and block table; `theirs` is the usual order."""
    for case in CASES:
        for table in ("fresh", "random"):
            yield _case(*case, table, full)


def _case(model: str, src: str, dst: str, order: str, table: str, full: bool) -> Result:
    num_tokens = 8192 if full else 2048
    counts, works = [], []
    with ExitStack() as stack:
        for each in (order, USUAL):
            shape = Shape(model, model, f"{src},order={each}", f"{dst},order={each}")
            layouts = shape.layouts(pool_for(shape, num_tokens))
            arena = stack.enter_context(Arena(*layouts, 0, compile_route(*layouts, 0).src_ranks))
            route, mover = compile_route(arena.src, arena.dst, 0), arena.mover()
            assert mover.staging is not None
            wanted = request(arena.src, arena.dst, num_tokens, table)
            arena.fill(wanted)
            arena.wipe(wanted)
            work = partial(pull, mover, route, wanted, arena.dst)
            work()
            arena.check_arrived(route, wanted)
            plan = plan_reads(route, wanted, mover.staging.half_bytes)
            reads = (*plan.direct, *(batch.reads for batch in plan.batches))
            counts.append(sum(copies.num_copies for copies in reads))
            works.append(work)
        found = compare(*works, pairs=21 if full else 11, budget_s=15 if full else 3)
    name = f"{model}, {src} -> {dst}, {num_tokens // 1024}k tokens, {table}: {order}, {counts[0]:,} copies"
    return compared(ROW, name, f"{USUAL}, {counts[1]:,} copies", found, (), cpu=False)
