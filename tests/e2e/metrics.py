"""What has an engine counted, by the name of a series? Of a server and of a forked engine alike."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from tests.e2e.engine import Output

PATIENCE_S = 60.0


class Counts(Protocol):
    """An engine that has a page `/metrics`."""

    def get(self, path: str) -> str: ...

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = ...) -> list[Output]: ...


def total(engine: Counts, series: str) -> float:
    """The sum of a series over its labels; a label given in `series` must be among a line's."""
    name, _, label = series.partition("{")
    lines = [line for line in engine.get("/metrics").splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if label in line)


def await_total(engine: Counts, series: str, least: float) -> float:
    """The same, once it is that much; an engine reports what it has counted with its next step."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := total(engine, series)) < least and time.monotonic() < deadline:
        engine.generate([[5, 6, 7]], 1)
    return found
