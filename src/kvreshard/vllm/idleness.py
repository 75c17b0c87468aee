"""May the ranks wait a moment in this step, or would a request be computed later for it?

A step without tokens is not enough to know: with several steps under way at once, another one may hold a request that goes on
next. So every request that was ever scheduled counts until it is finished.
"""

from __future__ import annotations

from collections.abc import Iterable


class Idleness:
    """Of one engine. Engines of one data-parallel group step together, so that one that waits would hold up the others."""

    def __init__(self, data_parallel_size: int) -> None:
        self._may_wait = data_parallel_size == 1
        self._computing: set[str] = set()

    def step(self, scheduled: Iterable[str], finished: Iterable[str]) -> bool:
        """Whether this engine computes nothing: `scheduled` in this step, `finished` since the one before."""
        self._computing.difference_update(finished)
        self._computing.update(scheduled)
        return self._may_wait and not self._computing
