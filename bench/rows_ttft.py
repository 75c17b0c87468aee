"""Time to first token of two real engines, with our connector and with the in-tree one, on pairs that both run.

The place for it: the engines are started by `tests/e2e`, and the figures are put in here once that harness measures them.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.results import Result, skipped

ROW = "f first token"
BAR = "lower bound >= 0.95 of in-tree's"


def run(full: bool) -> Iterator[Result]:
    """Not measured here yet."""
    yield skipped(ROW, "time to first token, two real engines", "not measured by this bench yet", BAR)
