"""When does each source hear next that its leases are still wanted?

How long a lease lasts is its source's own affair, which its engine metadata says: a reader that went by its own option would let the leases of a
source with a shorter one run out while it waits or reads.

1. A source is told `RENEWALS_PER_LEASE` times in the time of its leases, of all that are wanted there at once.
2. One that has just been met is told at once, and so is one that was not told anything for so long: its lease may be old when the
   request gets here.
3. One that is not known yet is asked for as often as this side's own option has it.

It only keeps time, in a heap: who is told what, and how, is for `remote_leases`.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass

from kvreshard.session.commands import RemoteEngine
from kvreshard.session.engine_metadata import EngineMetadata

# Five of them may be late or lost.
RENEWALS_PER_LEASE = 6
# What engine metadata says must not make a reader busy: leases of less than a second are not published (`vllm.options`).
MIN_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class _Next:
    """`is_known`: the source had been met when this time was set."""

    at_s: float
    is_known: bool


class Renewals:
    """The times of one rank's renewals, in seconds of the caller's clock. `usual_s`: between two, to a source that is not known yet."""

    def __init__(self, usual_s: float) -> None:
        self._usual_s = usual_s
        self._next: dict[RemoteEngine, _Next] = {}
        # One entry for each of `_next`, and some of before: an entry whose time is not the source's is passed over.
        self._heap: list[tuple[float, int, RemoteEngine]] = []
        self._numbers = itertools.count()

    def expect(self, remote: RemoteEngine) -> None:
        """A lease is wanted. A source whose time is set keeps it: one that gets its next request soon is not told more often for it."""
        if remote not in self._next:
            self._set(remote, _Next(-math.inf, False))

    def met(self, remote: RemoteEngine) -> None:
        """A source is met: it is told now, unless it was told since it is known."""
        found = self._next.get(remote)
        if found is not None and not found.is_known:
            self._set(remote, _Next(-math.inf, False))

    def due(self, now_s: float) -> list[RemoteEngine]:
        """The sources to be told, or asked for, now. Each must be `told`, or is forgotten."""
        found: list[RemoteEngine] = []
        while self._drop_former() <= now_s:
            remote = heapq.heappop(self._heap)[2]
            del self._next[remote]
            found.append(remote)
        return found

    def told(self, remote: RemoteEngine, engine_metadata: EngineMetadata | None, now_s: float) -> None:
        """A source was told, or asked for where it has no engine metadata yet."""
        self._set(remote, _Next(now_s + self._interval_s(engine_metadata), engine_metadata is not None))

    def rest_s(self, now_s: float) -> float:
        """How long until a source must be told, or asked for. One that is met sooner must be told then."""
        return max(0.0, self._drop_former() - now_s)

    def _set(self, remote: RemoteEngine, at: _Next) -> None:
        self._next[remote] = at
        heapq.heappush(self._heap, (at.at_s, next(self._numbers), remote))

    def _drop_former(self) -> float:
        """The earliest time that is set; infinite if none is."""
        while self._heap:
            at_s, _, remote = self._heap[0]
            found = self._next.get(remote)
            if found is not None and found.at_s == at_s:
                return at_s
            heapq.heappop(self._heap)
        return math.inf

    def _interval_s(self, engine_metadata: EngineMetadata | None) -> float:
        if engine_metadata is None:
            return self._usual_s
        return max(MIN_INTERVAL_S, engine_metadata.lease_s / RENEWALS_PER_LEASE)
