"""How fast is a load where pages lie outermost in memory on both sides, so that what is read of a page is one piece (docs/design/0072)?"""

from __future__ import annotations

from bench.gpu.findings import Bench
from bench.gpu.pair import Pair
from bench.gpu.parts.figures import MODEL, measure_load
from bench.shapes import Shape

CASES = ((8, 8, "BLHNC"), (8, 4, "BHLNC"), (4, 8, "BHLNC"))
TOKENS, REHEARSAL_TOKENS = 8192, 256


def run(bench: Bench) -> None:
    """Loads of the pairs of `figures` in other orders."""
    num_tokens = REHEARSAL_TOKENS if bench.is_rehearsal else TOKENS
    for src_tp, dst_tp, order in CASES[1:2] if bench.is_rehearsal else CASES:
        ends = f"tp={src_tp},order={order}", f"tp={dst_tp},order={order}"
        shape = Shape(f"Llama-3.1-70B {order} TP {src_tp} -> {dst_tp}", MODEL, *ends)
        with bench.check(f"{shape.name}: all of it"), Pair(shape, num_tokens, bench.device) as pair:
            pair.fill()
            for table in ("fresh", "random"):
                measure_load(bench, shape, pair, num_tokens, table)
