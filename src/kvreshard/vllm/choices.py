"""Prefills of the choices of one request (`n`), which share one lease.

vLLM makes a request of each choice, named `NUMBER_PARENT` (0.32.0, `ParentRequest.get_child_info`), and its client gets the parameters of the
one that ends last. All of them have computed the same prompt, so one of their caches is enough:

1. `add` the first choice that is published.
2. `find` it for each further one of the same tokens, multimodal items and adapter: that one gets the same parameters, and its blocks
   are free at once.
3. `remove` it when its lease is over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvreshard.vllm.prompt import Prompt

_NAME = re.compile(r"\d+_(.+)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Offered:
    request_id: str
    prompt: Prompt
    params: dict[str, Any]


class Choices:
    """Of one prefill engine. `prompt`: of a request, whose first `num_tokens` tokens are published."""

    def __init__(self) -> None:
        self._of_parent: dict[str, _Offered] = {}

    def add(self, request_id: str, prompt: Prompt, num_tokens: int, params: dict[str, Any]) -> None:
        """A request is published with these parameters."""
        parent = _parent(request_id)
        if parent is not None:
            self._of_parent[parent] = _Offered(request_id, _cut(prompt, num_tokens), dict(params))

    def find(self, request_id: str, prompt: Prompt, num_tokens: int) -> dict[str, Any] | None:
        """The parameters of another choice of the request, if its cache is that of the same tokens."""
        parent = _parent(request_id)
        published = None if parent is None else self._of_parent.get(parent)
        return (
            dict(published.params) if published is not None and published.prompt == _cut(prompt, num_tokens) else None
        )

    def remove(self, request_id: str) -> None:
        """A request is not published any more."""
        parent = _parent(request_id)
        if parent is not None and parent in self._of_parent and self._of_parent[parent].request_id == request_id:
            del self._of_parent[parent]


def _parent(request_id: str) -> str | None:
    found = _NAME.match(request_id)
    return None if found is None else found[1]


def _cut(prompt: Prompt, num_tokens: int) -> Prompt:
    return Prompt(tuple(prompt.token_ids[:num_tokens]), prompt.items, prompt.adapter)
