"""How fairly do many readers share one source? Jain's index: 1 where all got as much, 1/6 where one of six got everything.

A figure and no test: on a machine that others use too, which of seven processes gets its turn in a second is not for us to say. That
everybody gets all that it asks for is a test (`tests/faults/test_incast.py`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from bench.incast import CASES, GREEDY, measure
from bench.results import Result, skipped

ROW = "h incast"
# A greedy reader has four times the slices of the others on their way, and may get more.
FAIR, FAIR_BESIDE_GREEDY = 0.8, 0.6


def run(full: bool) -> Iterator[Result]:
    """Six readers, over shared memory and over TCP, one of them greedy or none."""
    if importlib.util.find_spec("nixl") is None:
        yield skipped(ROW, "readers of one source", "NIXL is not installed")
        return
    for case in CASES if full else CASES[:4]:
        shares = measure(case, 3.0 if full else 1.5)
        bar = FAIR_BESIDE_GREEDY if case.depths == GREEDY else FAIR
        yield Result(
            ROW, f"{len(case.depths)} readers of one source, {case.name}: Jain's index", shares.jain, 1.0, "", shares.jain, None,
            f"fair: {bar} or more", shares.jain >= bar, "", {"num_bytes": list(shares.num_bytes), "seconds": shares.seconds},
        )  # fmt: skip
