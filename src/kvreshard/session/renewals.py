"""When does each source hear next that its leases are still wanted?

How long a lease lasts is its source's own affair, which its card says: a reader that went by its own option would let the leases of a
source with a shorter one run out while it waits or reads.

1. A source is told `RENEWALS_PER_LEASE` times in the time of its leases, of all that are wanted there at once.
2. One that has just been met is told at once, and so is one that was not told anything for so long: its lease may be old when the
   request gets here.
3. One that does not say how long its leases last is told as often as this side's own option has it, and one that is not known yet is
   asked for as often.

It only keeps time; who is told what, and how, is the endpoint's affair.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from kvreshard.session.card import EngineCard
from kvreshard.session.orders import Load, RemoteEngine, Watch

# Five of them may be late or lost.
RENEWALS_PER_LEASE = 6
# What a card says must not make a reader busy: leases of less than a second are not offered (`vllm.options`).
MIN_INTERVAL_S = 0.1


def by_source(users: Iterable[Watch | Load]) -> dict[RemoteEngine, dict[tuple[str, int], None]]:
    """The leases that are wanted, each once, however many choices of a request share it: (request, word) per source."""
    wanted: dict[RemoteEngine, dict[tuple[str, int], None]] = {}
    for user in users:
        wanted.setdefault(user.remote, {})[user.lease.request, user.lease.word] = None
    return wanted


@dataclass(frozen=True, slots=True)
class _Next:
    """`is_known`: the source had been met when this time was set."""

    at_s: float
    is_known: bool


class Renewals:
    """The times of one rank's renewals, in seconds of the caller's clock. `usual_s`: between two, where a source says nothing."""

    def __init__(self, usual_s: float) -> None:
        self._usual_s = usual_s
        self._next: dict[RemoteEngine, _Next] = {}
        self._is_complete = True
        self._rests_until_s = math.inf

    def expect(self) -> None:
        """A lease is wanted that was not before."""
        self._is_complete = False

    def rest_s(self, now_s: float) -> float:
        """How long until a source must be told, or asked for. One that is met sooner must be told then."""
        return max(0.0, self._rests_until_s - now_s)

    def is_time(self, now_s: float) -> bool:
        """Whether `due` may find a source."""
        return not self._is_complete or now_s >= self._rests_until_s

    def due(self, wanted: Iterable[tuple[RemoteEngine, EngineCard | None]], now_s: float) -> list[RemoteEngine]:
        """Of the sources of all leases that are wanted, with their cards once they are met: those to be told, or asked for, now."""
        kept: dict[RemoteEngine, _Next] = {}
        due: list[RemoteEngine] = []
        for remote, card in wanted:
            was = self._next.get(remote, _Next(-math.inf, False))
            if now_s >= was.at_s or (card is not None and not was.is_known):
                due.append(remote)
                was = _Next(now_s + self._interval_s(card), card is not None)
            kept[remote] = was
        self._is_complete = all(one.is_known for one in kept.values())
        self._rests_until_s = min((one.at_s for one in kept.values()), default=math.inf)
        # A source that gets its next request soon is not told more often for it.
        self._next = {remote: one for remote, one in self._next.items() if one.at_s > now_s} | kept
        return due

    def _interval_s(self, card: EngineCard | None) -> float:
        if card is None or isinstance(card.lease_s, msgspec.UnsetType):
            return self._usual_s
        return max(MIN_INTERVAL_S, card.lease_s / RENEWALS_PER_LEASE)
