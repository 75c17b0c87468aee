"""Leases of the prefill side: slot, word and name of each, and the parameters that choices of one request share.

The scheduler decides slot and word once for all ranks. A lease has the name of its request. Where peers would not accept the request
id (too long, or with characters that do not print), the name is the printable part of it and a digest of all of it.

The choices of one request (`n`) compute the same prompt. vLLM makes a request of each, named `NUMBER_PARENT` (0.32.0,
`ParentRequest.get_child_info`), and its client gets the parameters of the one that ends last. So the first choice that ends is published,
and the others return its parameters and free their blocks at once.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Any

from kvreshard.model.text import MAX_NAME, is_name, plain
from kvreshard.session.lease import Lease
from kvreshard.vllm.prompt import Prompt

DIGEST_BYTES = 16
_CHOICE = re.compile(r"\d+_(.+)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Shared:
    """The choice that was published, what it has computed, and its parameters."""

    request: str
    prompt: Prompt
    params: dict[str, Any]


class Leases:
    """The leases of one prefill engine, by request id. A slot that is released is used again last."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(num_slots))
        self._leases: dict[str, Lease] = {}
        self._requests: dict[str, str] = {}
        self._published: set[str] = set()
        self._by_parent: dict[str, _Shared] = {}

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._leases)

    @property
    def published(self) -> list[str]:
        """Requests that other engines may read, sorted."""
        return sorted(self._published)

    @property
    def unpublished(self) -> list[Lease]:
        """The leases of requests that are being computed."""
        return [lease for request, lease in self._leases.items() if request not in self._published]

    def acquire(self, request: str) -> Lease | None:
        """The request's lease, a new one if it has none; None when all slots are taken."""
        if request not in self._leases:
            if not self._free:
                return None
            lease = Lease(lease_name(request), self._free.popleft(), secrets.randbits(63) | 1)
            self._leases[request], self._requests[lease.request] = lease, request
        return self._leases[request]

    def find(self, request: str) -> Lease | None:
        """The request's lease."""
        return self._leases.get(request)

    def find_request(self, lease: str) -> str:
        """The request of the lease with this name; the name itself once the lease is released."""
        return self._requests.get(lease, lease)

    def publish(self, request: str, prompt: Prompt, num_tokens: int, params: dict[str, Any]) -> None:
        """Other engines may read the first `num_tokens` tokens, by these parameters."""
        self._published.add(request)
        parent = _parent(request)
        if parent is not None:
            self._by_parent[parent] = _Shared(request, _cut(prompt, num_tokens), dict(params))

    def find_shared(self, request: str, prompt: Prompt, num_tokens: int) -> dict[str, Any] | None:
        """The parameters of another choice that has computed the same tokens, multimodal items and adapter."""
        parent = _parent(request)
        shared = None if parent is None else self._by_parent.get(parent)
        return dict(shared.params) if shared is not None and shared.prompt == _cut(prompt, num_tokens) else None

    def withdraw(self, request: str) -> None:
        """Other engines may no longer read the request. Its slot stays in use until `release`."""
        self._published.discard(request)
        parent = _parent(request)
        if parent is not None and parent in self._by_parent and self._by_parent[parent].request == request:
            del self._by_parent[parent]

    def release(self, request: str) -> None:
        """Every rank has ended the lease: its slot is free."""
        self.withdraw(request)
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


def is_choice(request: str) -> bool:
    """Whether a request looks like one of several choices.

    >>> is_choice("0_cmpl-7"), is_choice("cmpl-7")
    (True, False)
    """
    return _parent(request) is not None


def owner_of(request: str) -> str:
    """The request of which this is a choice, or itself.

    >>> owner_of("0_cmpl-7"), owner_of("cmpl-7")
    ('cmpl-7', 'cmpl-7')
    """
    return _parent(request) or request


def _parent(request: str) -> str | None:
    found = _CHOICE.match(request)
    return None if found is None else found[1]


def _cut(prompt: Prompt, num_tokens: int) -> Prompt:
    return Prompt(tuple(prompt.token_ids[:num_tokens]), prompt.items, prompt.adapter)
