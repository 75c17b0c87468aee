"""The lease slot, the word and the name of each prefill's lease, decided once per engine for all of its ranks.

A lease has the name of its request. That of a request whose id no peer would take, since it is too long or has characters that
cannot be seen, is what can be shown of the id, and a digest of all of it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import deque

from kvreshard.model.text import MAX_NAME, is_name, plain
from kvreshard.session.commands import Acquire

DIGEST_BYTES = 16


class Slots:
    """Free slots of the lease tables. A slot that is given back is used again last."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(num_slots))
        self._leases: dict[str, Acquire] = {}
        self._requests: dict[str, str] = {}

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._leases)

    def take(self, request: str) -> Acquire | None:
        """The request's lease, a new one if it has none; None when all slots are taken."""
        if request not in self._leases:
            if not self._free:
                return None
            lease = Acquire(lease_name(request), self._free.popleft(), secrets.randbits(63) | 1)
            self._leases[request], self._requests[lease.request] = lease, request
        return self._leases[request]

    def find(self, request: str) -> Acquire | None:
        """The lease that the request has."""
        return self._leases.get(request)

    def find_request(self, lease: str) -> str:
        """The request that has the lease of this name; the name itself if none has it any more."""
        return self._requests.get(lease, lease)

    def give(self, request: str) -> None:
        """The request's lease is over on every rank."""
        lease = self._leases.pop(request, None)
        if lease is not None:
            del self._requests[lease.request]
            self._free.append(lease.slot)


def lease_name(request: str) -> str:
    """The name of a request's lease.

    >>> lease_name("cmpl-7"), len(lease_name("x" * 300)), lease_name("a\\nb")
    ('cmpl-7', 256, 'a?b~0c84cf75ee142f818515ab54bd107d86')
    """
    if is_name(request):
        return request
    digest = hashlib.blake2b(request.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).hexdigest()
    return f"{plain(request[: MAX_NAME - 2 * DIGEST_BYTES - 1])}~{digest}"
