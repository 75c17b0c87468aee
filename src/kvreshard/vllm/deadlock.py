"""Detects engines that wait for one another in a circle.

Engines that are prefill and decode engine at once (`kv_both`) can fill their pools with finished prefills that others shall read,
while those others wait for blocks that are held in the same way. Readers that wait renew their leases, so nobody's would ever run
out. An engine stands still when nothing is computed and nothing loaded, requests wait to be loaded, and blocks are held for others; one
that is paused, where vLLM does not look at what waits, does not.
After `patience_s` of that one of the waiting gives its source back and is computed here; each time that long again, the next.

Engines that only read, or are only read from, cannot be part of a circle.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class DeadlockDetector:
    """Of one engine. `patience_s`: seconds."""

    def __init__(self, patience_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience_s, self._clock = patience_s, clock
        self._since_s: float | None = None

    def step(self, is_still: bool) -> bool:
        """Whether one of the waiting shall give up, after a step in which the engine stood still or did not."""
        now_s = self._clock()
        if not is_still:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
        elif now_s >= self._since_s + self._patience_s:
            self._since_s = now_s
            return True
        return False
