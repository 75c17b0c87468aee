"""Row e: how costs grow. That of a request is linear in its tokens and flat in the size of the pool; that of one event is flat in what waits beside it.

Processor time of the preparation, from 1k to 128k tokens in one pool, and at 8k tokens from 1k to 100k pages in the pool. The bar
looks at the exponent of the growth (1 is linear, 0 is flat) and at the ratio of the largest pool to the smallest.

Events are those of `bench.events`: beside ever more leases, requests, sources or transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bench.arena import Arena
from bench.bars import Bar
from bench.compare import median_s
from bench.events import EVENTS
from bench.prepare import Listed, Prepared
from bench.results import Result
from bench.shapes import Shape, pool_for, request
from kvreshard.plan.compile import compile_route

ROW = "e growth"
SHAPE = Shape("DeepSeek-V3 TP 8 -> 4", "deepseek-v3", "tp=8", "tp=4")
TOKENS = (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
MAX_TOKEN_SLOPE, MAX_POOL_RATIO = 1.1, 1.5
# A larger heap of objects costs a little in caches and in Python's garbage collector.
MAX_EVENT_SLOPE = 0.3
POOLS = (1000, 3000, 10_000, 30_000, 100_000)


def run(full: bool) -> Iterator[Result]:
    """Two curves, and one per event. The points are in the details, for the plots."""
    tokens = list(TOKENS if full else (*TOKENS[::2], TOKENS[-1]))
    pool = pool_for(SHAPE, tokens[-1])
    points = {kind: _prepare_ms(tokens, pool, kind) for kind in ("fresh", "random")}
    slope = float(np.polyfit(np.log(tokens[-3:]), np.log(points["random"][-3:]), 1)[0])
    yield Result(
        ROW, f"{SHAPE.name}: exponent of the growth in tokens, random tables", slope,
        bars=(Bar("cost of a request linear in tokens: exponent below 1.1", slope < MAX_TOKEN_SLOPE),), details={"tokens": tokens, "ms": points},
    )  # fmt: skip
    pools = list(POOLS if full else POOLS[::2])
    flat = [ms for pool in pools for ms in _prepare_ms([8192], pool, "random")]
    ratio = flat[-1] / flat[0]
    yield Result(
        ROW, f"{SHAPE.name}: 8k tokens, pool of {pools[-1]} pages", flat[-1], "ms CPU", f"a pool of {pools[0]}", flat[0], flat[0] / flat[-1],
        bars=(Bar("cost of a request flat in the pool: below 1.5 times", ratio < MAX_POOL_RATIO),), details={"pools": pools, "ms": flat},
    )  # fmt: skip
    yield from (_event(name, cost, counts) for name, (cost, counts) in EVENTS.items())


def _event(name: str, cost: Callable[[int], float], counts: Sequence[int]) -> Result:
    """The exponent with which an event's cost grows in what waits beside it."""
    us = [cost(count) * 1e6 for count in counts]
    slope = float(np.polyfit(np.log(counts), np.log(us), 1)[0])
    return Result(
        ROW, f"exponent of the growth: {name}", slope, bars=(Bar("cost of an event flat: exponent below 0.3", slope < MAX_EVENT_SLOPE),),
        note=f"{us[-1]:.1f} us of processor time where there are {counts[-1]}, {us[0]:.1f} where there are {counts[0]}",
        details={"event": name, "counts": list(counts), "us": us},
    )  # fmt: skip


def _prepare_ms(lengths: Sequence[int], pool: int, kind: str) -> list[float]:
    src, dst = SHAPE.layouts(max(pool, pool_for(SHAPE, max(lengths))))
    with Arena(src, dst, 0, compile_route(src, dst, 0).src_ranks) as arena:
        route = compile_route(arena.src, arena.dst, 0)
        arena.mover()
        prepared, spent = Prepared(arena), []
        for num_tokens in lengths:
            listed = Listed.of(request(arena.src, arena.dst, num_tokens, kind))

            def once() -> None:
                prepared.prepare(route, listed)  # noqa: B023 (called here)
                prepared.release()

            spent.append(median_s(once, 25) * 1e3)
        return spent
