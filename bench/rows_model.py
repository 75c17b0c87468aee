"""Does the cost model pick the right way? Over a grid of pairs, block tables and lengths, with constants measured just before.

Every case is carried out directly and staged, in turn, some times over. The model is right when the way that it took is within 10 % of
the faster one by the clock, which its constants are measured by too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from bench.arena import Arena
from bench.compare import spend
from bench.results import Result
from bench.shapes import Shape, pool_for, request
from kvreshard.plan.cost import CostModel
from kvreshard.plan.reads import plan_reads
from kvreshard.plan.route import compile_route
from kvreshard.session.transfer import pull
from kvreshard.testing.calibrate import MEMORY_BYTES, calibrate
from kvreshard.testing.ranks import ProcessRanks

ROW = "m model"
WITHIN = 1.10
PAIRS = (
    ("HND 2 -> 1 heads", "tp=4,order=HND", "tp=8,order=HND"),
    ("HND 1 -> 2 heads", "tp=8,order=HND", "tp=4,order=HND"),
    ("HND 2 -> 4 heads", "tp=4,order=HND", "tp=2,order=HND"),
    ("NHD 2 -> 1 heads", "tp=4,order=NHD", "tp=8,order=NHD"),
    ("HND -> NHD", "tp=8,order=HND", "tp=4,order=NHD"),
    ("equal", "tp=8,order=HND", "tp=8,order=HND"),
)
MORE_PAIRS = (
    ("NHD 4 -> 1 heads", "tp=2,order=NHD", "tp=8,order=NHD"),
    ("HND 8 -> 2 heads", "tp=1,order=HND", "tp=4,order=HND"),
    ("page 16 -> 64", "tp=8,order=HND,page=16", "tp=8,order=HND,page=64"),
)


def run(full: bool) -> Iterator[Result]:
    """The constants, and the share of cases where the model was right."""
    with ProcessRanks(2, MEMORY_BYTES) as ranks:
        ranks.connect_all()
        model = calibrate(ranks)
    cases = []
    for name, src, dst in (*PAIRS, *(MORE_PAIRS if full else ())):
        for num_tokens in (512, 2048, 8192) if full else (1024,):
            cases += list(_cases(Shape(name, "llama-3.1-70b", src, dst, None), num_tokens, model, full))
    right = [case for case in cases if case["loss"] <= WITHIN]
    share = len(right) / len(cases)
    worst = max(cases, key=lambda case: case["loss"])
    yield Result(
        ROW, f"cases of {len(cases)} where the model's way is within 10 % of the faster", share, 0.95, "", share, None, "at least 95 %",
        share >= 0.95, "", {"constants": asdict(model), "cases": cases, "worst": worst},
    )  # fmt: skip


def _cases(shape: Shape, num_tokens: int, model: CostModel, full: bool) -> Iterator[dict[str, float | str]]:
    src, dst = shape.layouts(pool_for(shape, num_tokens))
    first = compile_route(src, dst, 0)
    with Arena(src, dst, 0, first.src_ranks) as arena:
        mover = arena.mover()
        routes = {
            "direct": compile_route(arena.src, arena.dst, 0, cost=model, way="direct"),
            "staged": compile_route(arena.src, arena.dst, 0, cost=model, way="staged"),
        }
        free = compile_route(arena.src, arena.dst, 0, cost=model)
        for table in ("fresh", "half", "random") if full else ("fresh", "random"):
            wanted = request(arena.src, arena.dst, num_tokens, table)
            arena.fill(wanted)
            spent: dict[str, list[float]] = {way: [] for way in routes}
            for number in range(12 if full else 8):
                for way, route in routes.items():
                    arena.wipe(wanted) if not number else None
                    found = spend(lambda r=route: pull(mover, r, wanted, arena.dst))  # type: ignore[misc]  # noqa: B023
                    if not number:
                        arena.check_arrived(free, wanted)
                        continue
                    spent[way].append(found.wall_s)
            medians = {way: float(np.median(values)) for way, values in spent.items()}
            assert mover.staging is not None
            plan = plan_reads(free, wanted, mover.staging.half_bytes)
            took = "staged" if plan.batches and not plan.direct else "direct"
            yield {
                "name": f"{shape.name}, {num_tokens} tokens, {table}", "took": took, "direct_ms": medians["direct"] * 1e3,
                "staged_ms": medians["staged"] * 1e3, "loss": medians[took] / min(medians.values()),
            }  # fmt: skip
