"""Which lease slot and which word does a prefill get? Decided once per engine, for all of its ranks."""

from __future__ import annotations

import secrets
from collections import deque

from kvreshard.session.orders import Grant


class Slots:
    """Free slots of the lease tables. A slot that is given back is used again last."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(num_slots))
        self._granted: dict[str, Grant] = {}

    def __len__(self) -> int:
        """Slots that are granted."""
        return len(self._granted)

    def take(self, request: str) -> Grant | None:
        """The request's grant, a new one if it has none; None when all slots are taken."""
        if request not in self._granted:
            if not self._free:
                return None
            self._granted[request] = Grant(request, self._free.popleft(), secrets.randbits(63) | 1)
        return self._granted[request]

    def find(self, request: str) -> Grant | None:
        """The grant that the request has."""
        return self._granted.get(request)

    def give(self, request: str) -> None:
        """The request's lease is over on every rank."""
        grant = self._granted.pop(request, None)
        if grant is not None:
            self._free.append(grant.slot)
