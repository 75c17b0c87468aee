"""The cost model's constants for this device, and whether it then chooses the faster way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from bench.gpu.findings import Bench
from bench.gpu.pair import Pair, in_turn
from bench.rows_staging import MORE_PAIRS, PAIRS
from bench.shapes import Shape
from kvreshard.plan.cost import CostModel, usual_cost
from kvreshard.plan.reads import plan_reads
from kvreshard.testing.calibrate import MEMORY_BYTES, calibrate
from kvreshard.testing.ranks import ProcessRanks

LENGTHS, REHEARSAL_LENGTHS = (512, 3072), (256,)
WITHIN, WANTED_SHARE = 1.10, 0.95
# A pair takes some 15 s on a device.
LEAST_S = 20.0


def run(bench: Bench) -> None:
    """Calibrate, then every case of the benchmark's grid both ways."""
    cost = usual_cost(bench.device)
    with bench.check("constants") as found, ProcessRanks(2, MEMORY_BYTES, devices=[bench.device] * 2) as ranks:
        ranks.connect_all()
        ranks.attend(1, True)
        cost = calibrate(ranks)
        found.figure(**asdict(cost))
    losses: dict[str, float] = {}
    defaults: dict[str, float] = {}
    lengths = REHEARSAL_LENGTHS if bench.is_rehearsal else LENGTHS
    for name, src, dst in PAIRS[:2] if bench.is_rehearsal else (*PAIRS, *MORE_PAIRS):
        with (
            bench.check(f"both ways: {name}") as found,
            Pair(Shape(name, "llama-3.1-70b", src, dst, None), max(lengths), bench.device) as pair,
        ):
            pair.fill()
            for num_tokens in lengths:
                for table in ("fresh", "random"):
                    ms = _case(pair, num_tokens, table)
                    case = f"{name}, {num_tokens} tokens, {table}"
                    losses[case] = ms[_took(pair, cost, num_tokens, table)] / min(ms.values())
                    defaults[case] = ms[_took(pair, usual_cost(bench.device), num_tokens, table)] / min(ms.values())
                    found.figure(**{f"{num_tokens}_{table}_{way}_ms": value for way, value in ms.items()})
    if not losses:
        bench.skip("the model's way", "no pair was measured")
        return
    with bench.check(f"the model's way is within {WITHIN:g} of the faster") as found:
        share, default_share = (
            sum(loss <= WITHIN for loss in each.values()) / len(each) for each in (losses, defaults)
        )
        worst = max(losses, key=lambda case: losses[case])
        found.ratio = share
        found.figure(cases=len(losses), share_with_defaults=default_share, worst=f"{worst}: {losses[worst]:.2f}")
        if share < WANTED_SHARE and not bench.is_rehearsal:
            wrong = "; ".join(f"{case} {loss:.2f}" for case, loss in losses.items() if loss > WITHIN)
            found.fail(f"right in {share:.0%} of the cases: {wrong}")


def _case(pair: Pair, num_tokens: int, table: str) -> dict[str, float]:
    mover, wanted = pair.mover(), pair.request(num_tokens, table)
    routes = {way: pair.route(way) for way in ("direct", "staged")}
    works: list[Callable[[], object]] = [lambda r=route: pair.load(mover, r, wanted) for route in routes.values()]  # type: ignore[misc]
    return {way: s * 1e3 for way, s in zip(routes, in_turn(works, 3), strict=True)}


def _took(pair: Pair, cost: CostModel, num_tokens: int, table: str) -> str:
    mover = pair.mover()
    assert mover.staging is not None
    plan = plan_reads(pair.route(cost=cost), pair.request(num_tokens, table), mover.staging.half_bytes)
    return "staged" if plan.batches and not plan.direct else "direct"
