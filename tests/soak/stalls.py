"""When did the machine stand still? A thread that sleeps for a moment, over and over, and notes when it woke up much too late.

What was due then is late for no fault of an engine's. Every such time is told with the figures of the soak.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

REST_S = 0.05
# Two busy cores give a thread its turn within some tenths of a second.
LATE_S = 1.0

Interval = tuple[float, float]
"""First and last moment, in seconds of the monotonic clock."""


class Stalls:
    """Watches until `close`. `intervals`: the times in which nothing here ran."""

    def __init__(self) -> None:
        self.intervals: list[Interval] = []
        self._seen_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no more."""
        self._is_over.set()
        self._thread.join()

    def until(self, now_s: float) -> list[Interval]:
        """The intervals, with one that has just ended and whose end the thread has not seen yet."""
        return [*self.intervals, *([(self._seen_s, now_s)] if now_s - self._seen_s > LATE_S else [])]

    def _run(self) -> None:
        while not self._is_over.wait(REST_S):
            now_s = time.monotonic()
            self.intervals = self.until(now_s)
            self._seen_s = now_s


def covered_s(intervals: Iterable[Interval], first_s: float, last_s: float) -> float:
    """Seconds between two moments that lie in at least one of the intervals."""
    total_s, end_s = 0.0, first_s
    for start, stop in sorted(intervals):
        start, stop = max(start, end_s), min(stop, last_s)
        if stop > start:
            total_s, end_s = total_s + stop - start, stop
    return total_s
