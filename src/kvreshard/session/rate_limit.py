"""How much may all strangers together ask of the listener per second?

A token bucket that delays and does not drop. While it is empty nothing is read; ZeroMQ's queues fill, TCP pushes back, and
because a ROUTER takes turns between its connections, one that asks without end does not keep another from its turn.
"""

from __future__ import annotations


class RateLimit:
    """`per_s` units a second, at most `burst` of them saved up. Seconds are of the caller's clock."""

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._left, self._at_s = burst, now_s

    def wait_s(self, now_s: float) -> float:
        """How long until something may be served; 0.0: now."""
        self._refill(now_s)
        return max(0.0, -self._left / self._per_s)

    def spend(self, units: float, now_s: float) -> None:
        """Something has been served. It may cost more than there is: then the next waits."""
        self._refill(now_s)
        self._left -= units

    def _refill(self, now_s: float) -> None:
        self._left = min(self._burst, self._left + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = now_s
