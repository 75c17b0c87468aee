"""Row m: the way that a request takes, directly or through the staging buffer, beside the other way. By the clock.

A grid of pairs, block tables and lengths. Each case is carried out in both ways, in turn, and the bytes of both are compared with their
sources. The choice is that of the default constants.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench import bars
from bench.arena import Arena
from bench.compare import Comparison, compare
from bench.results import Result, compared
from bench.shapes import Shape, pool_for, request
from kvreshard.plan.compile import compile_route
from kvreshard.plan.reads import plan_reads
from kvreshard.plan.route import Route
from kvreshard.session.transfer import pull

ROW = "m staging"
PAIRS = (
    ("HND, 2 -> 1 heads", "tp=4,order=HND", "tp=8,order=HND"),
    ("HND, 1 -> 2 heads", "tp=8,order=HND", "tp=4,order=HND"),
    ("HND, 2 -> 4 heads", "tp=4,order=HND", "tp=2,order=HND"),
    ("NHD, 2 -> 1 heads", "tp=4,order=NHD", "tp=8,order=NHD"),
    ("HND -> NHD", "tp=8,order=HND", "tp=4,order=NHD"),
    ("page 16 -> 64", "tp=8,order=HND,page=16", "tp=8,order=HND,page=64"),
    ("HND page 64 -> NHD page 16", "tp=4,order=HND,page=64", "tp=4,order=NHD,page=16"),
    ("equal", "tp=8,order=HND", "tp=8,order=HND"),
)
MORE_PAIRS = (
    ("NHD, 4 -> 1 heads", "tp=2,order=NHD", "tp=8,order=NHD"),
    ("HND, 8 -> 2 heads", "tp=1,order=HND", "tp=4,order=HND"),
)


def run(full: bool) -> Iterator[Result]:
    """One result per case; `theirs` is the other way."""
    for name, src, dst in (*PAIRS, *(MORE_PAIRS if full else ())):
        for num_tokens in (512, 2048, 8192) if full else (1024,):
            yield from _cases(Shape(f"Llama-3.1-70B {name}", "llama-3.1-70b", src, dst), num_tokens, full)


def _cases(shape: Shape, num_tokens: int, full: bool) -> Iterator[Result]:
    src, dst = shape.layouts(pool_for(shape, num_tokens))
    with Arena(src, dst, 0, compile_route(src, dst, 0).src_ranks) as arena:
        mover = arena.mover()
        assert mover.staging is not None
        free = compile_route(arena.src, arena.dst, 0)
        routes = {way: compile_route(arena.src, arena.dst, 0, way=way) for way in ("direct", "staged")}  # type: ignore[arg-type]
        for table in ("fresh", "half", "random") if full else ("fresh", "random"):
            wanted = request(arena.src, arena.dst, num_tokens, table)
            arena.fill(wanted)
            plan = plan_reads(free, wanted, mover.staging.half_bytes)
            is_staged = bool(plan.batches) and not plan.direct
            taken, other = ("staged", "direct") if is_staged else ("direct", "staged")

            def carry(route: Route) -> None:
                pull(mover, route, wanted, arena.dst)  # noqa: B023 (called here)

            for route in routes.values():
                arena.wipe(wanted)
                carry(route)
                arena.check_arrived(free, wanted)
            found = compare(
                lambda: carry(free),
                lambda: carry(routes[other]),  # noqa: B023
                pairs=21 if full else 9,
                budget_s=10 if full else 2,
            )
            yield _result(f"{shape.name}, {num_tokens} tokens, {table}: {taken}", other, found)


def _result(name: str, other: str, found: Comparison) -> Result:
    judged = bars.staging(other == "direct", found.wall_ratio[1:])
    return compared(ROW, name, other, found, judged, cpu=False)
