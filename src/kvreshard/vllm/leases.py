"""Requests with a lease at the prefill side: slot, word and name of each, and the parameters that choices of one request share.

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
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvreshard.model.text import MAX_NAME, is_name, plain
from kvreshard.session.lease import Lease
from kvreshard.vllm.prompt import Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request

DIGEST_BYTES = 16
_CHOICE = re.compile(r"\d+_(.+)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _SharedChoice:
    """The choice that was published, what it has computed, and its parameters."""

    request: str
    prompt: Prompt
    params: dict[str, Any]


@dataclass(slots=True)
class LeasedRequest:
    """A request with a lease.

    `computing`: itself, while it is computed for a decode engine. `first_loaded`: by group, the first token that a load has brought, where the
    group's blocks begin with tokens that it left out. `num_blocks`: those held for other engines, which may read it once it `is_published`.
    """

    lease: Lease
    computing: Request | None = None
    first_loaded: dict[str, int] = field(default_factory=dict)
    is_published: bool = False
    num_blocks: int = 0


class Leases:
    """The leases of one prefill engine, by request id. A slot that is released is used again last. `num_blocks`: all that are held."""

    def __init__(self, num_slots: int) -> None:
        self._free = deque(range(num_slots))
        self._leases: dict[str, LeasedRequest] = {}
        self._by_parent: dict[str, _SharedChoice] = {}
        self.num_blocks = 0

    def __len__(self) -> int:
        """Slots in use."""
        return len(self._leases)

    @property
    def published(self) -> list[str]:
        """Requests that other engines may read, sorted."""
        return sorted(request for request, leased in self._leases.items() if leased.is_published)

    @property
    def unpublished(self) -> list[Lease]:
        """The leases of requests that are being computed."""
        return [leased.lease for leased in self._leases.values() if not leased.is_published]

    def acquire(self, request: str) -> LeasedRequest | None:
        """The request's lease, a new one if it has none; None when all slots are taken."""
        if request not in self._leases:
            if not self._free:
                return None
            lease = Lease(lease_name(request), self._free.popleft(), secrets.randbits(63) | 1)
            self._leases[request] = LeasedRequest(lease)
        return self._leases[request]

    def find(self, request: str) -> LeasedRequest | None:
        """The request's lease."""
        return self._leases.get(request)

    def publish(self, request: str, prompt: Prompt, num_tokens: int, params: dict[str, Any], num_blocks: int) -> None:
        """Other engines may read the first `num_tokens` tokens of a request with a lease, by these parameters."""
        leased = self._leases[request]
        leased.computing, leased.is_published, leased.num_blocks = None, True, num_blocks
        self.num_blocks += num_blocks
        parent = _parent(request)
        if parent is not None:
            self._by_parent[parent] = _SharedChoice(request, _cut(prompt, num_tokens), dict(params))

    def find_shared(self, request: str, prompt: Prompt, num_tokens: int) -> dict[str, Any] | None:
        """The parameters of another choice that has computed the same tokens of an equal prompt."""
        parent = _parent(request)
        shared = None if parent is None else self._by_parent.get(parent)
        return dict(shared.params) if shared is not None and shared.prompt == _cut(prompt, num_tokens) else None

    def withdraw(self, request: str) -> None:
        """Other engines may no longer read the request. Its slot stays in use until `release`."""
        if request in self._leases:
            self._leases[request].is_published = False
        parent = _parent(request)
        if parent is not None and parent in self._by_parent and self._by_parent[parent].request == request:
            del self._by_parent[parent]

    def release(self, request: str) -> None:
        """Every rank has ended the lease: its slot is free."""
        self.withdraw(request)
        leased = self._leases.pop(request, None)
        if leased is not None:
            self._free.append(leased.lease.slot)
            self.num_blocks -= leased.num_blocks


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
    return replace(prompt, token_ids=tuple(prompt.token_ids[:num_tokens]))
