"""How many leading tokens of a request the decode engine may load from a prefill, and why not all of them.

1. The longest prefix that is the same text: compared under the source's key, by digests (`prompt`) and by what stands behind the token ids
   (`missing_items`).
2. No further than the position from which this engine can go on: it computes the last tokens of each prompt itself.
3. A state is loaded at exactly the position that its source stands at, or nothing is. Nothing is loaded of a model whose tokens look at
   those behind them, unless both prompts are the same; nor where the source no longer has what a window needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.first_tokens import first_token, is_entry_gone
from kvreshard.vllm.groups import CacheGroup
from kvreshard.vllm.items import Positions
from kvreshard.vllm.missing_items import MissingItems
from kvreshard.vllm.params import RemotePrefill
from kvreshard.vllm.prompt import count_matching
from kvreshard.vllm.requests import MIN_COMPUTED_TOKENS, read_prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Loadable:
    """`num_tokens` from the start. `fallback`: the cause for which nothing is loaded. `partial`: the cause for which fewer tokens are loaded
    than were prefilled. `reason`: why the request is computed here, `why`: why a part of it is; in words.
    """

    num_tokens: int
    fallback: str = ""
    partial: str = ""
    reason: str = ""
    why: str = ""


class LoadableTokens:
    """Of one engine. `num_backoff_tokens`: trailing tokens that it must compute itself. `whole_prompts`: the cache of a prefix is only right
    for one prompt (`requests.needs_whole_prompts`). `positions`: what those of a prompt's tokens depend on.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_backoff_tokens: int,
        whole_prompts: bool,
        adapters: Adapters,
        positions: Positions,
        missing_items: MissingItems,
    ) -> None:
        self._groups, self._adapters = tuple(groups), adapters
        self._positions, self._missing_items = positions, missing_items
        self._has_state = any(group.is_state for group in groups)
        self.num_backoff_tokens, self._whole_prompts = num_backoff_tokens, whole_prompts

    def limit(self, request: Request) -> int:
        """The last position from which this engine can go on."""
        return int(request.num_prompt_tokens) - max(self.num_backoff_tokens, MIN_COMPUTED_TOKENS)

    def count(self, request: Request, prefill: RemotePrefill, key: bytes | None) -> Loadable:
        """What can be loaded. `key`: the source's.

        Prompts that cannot be compared count as equal: the source is not met, and the load is refused; or its seal does not hold, and
        the ranks refuse the load; or it is not carried out here.
        """
        num_prompt, limit = int(request.num_prompt_tokens), self.limit(request)
        mine = read_prompt(request, self._adapters, self._positions)
        same = min(prefill.num_tokens, num_prompt)
        prompt_key = None if key is None else prefill.prompt_key(key)
        if prompt_key is not None:
            same = count_matching(prefill.prompt, mine, prompt_key)
            same = self._missing_items.narrow(request, prefill.prompt, mine, same, prompt_key)
        count = max(0, int(min(same, prefill.num_tokens, limit)))
        none = self._find_obstacle(prefill, num_prompt, same, limit, count)
        if none is not None:
            return none
        if self._stands(prefill):
            return Loadable(prefill.num_tokens)
        fallback = "" if same else "prompt"
        if num_prompt < prefill.num_tokens and num_prompt - same < prefill.prompt.step:  # as far as digests tell
            why = f"the prompt here has {num_prompt} tokens; ask a prefill engine for one token only"
            return Loadable(count, fallback, "length", why=why)
        if count < min(prefill.num_tokens, limit):
            adapter = f" with adapter {mine.adapter}" if mine.adapter else ""
            why = f"the prompts{adapter} agree on {same} of {num_prompt} tokens"
            return Loadable(count, fallback, "prompt", why=why)
        return Loadable(count, fallback)

    def _find_obstacle(
        self, prefill: RemotePrefill, num_prompt: int, same: int, limit: int, count: int
    ) -> Loadable | None:
        """Why nothing is loaded, though the prompts agree on `same` tokens."""
        if self._stands(prefill):
            if prefill.num_tokens <= limit and same == prefill.num_tokens:
                return None
            reason = (
                f"its source stands at token {prefill.num_tokens}, the prompts agree on {same} tokens, and this engine "
                f"must resume at token {limit} or before: a state cannot be taken back"
            )
            return Loadable(0, "state", "state", reason)
        if self._whole_prompts and not same == prefill.num_tokens == num_prompt:
            reason = (
                f"its prompt of {num_prompt} tokens is not the source's of {prefill.num_tokens}, and this model's tokens look at those "
                "behind them too"
            )
            return Loadable(0, "prompt", "prompt", reason)
        missing = self._find_missing(prefill, count)
        if missing:
            return Loadable(0, "window", "window", f"of its first {count} tokens {missing}")
        return None

    def _stands(self, prefill: RemotePrefill) -> bool:
        """Whether there is a state, which stands at one token."""
        return self._has_state or prefill.has_state

    def _find_missing(self, prefill: RemotePrefill, num_tokens: int) -> str:
        """What the source no longer has of what this engine needs; empty if nothing."""
        for group in self._groups:
            if group.ring_tokens is not None:
                if is_entry_gone(prefill, group.ring_tokens, num_tokens):
                    return f"the ring of group {group.name} is not complete any more: its source went on to token {prefill.num_tokens}"
                continue
            needed, first = group.first_needed(num_tokens), first_token(prefill, group)
            if needed < num_tokens and first > needed:
                return f"group {group.name} needs token {needed}, and its source begins at token {first}"
        mine = {group.reach for group in self._groups}
        for theirs in prefill.groups:
            first = theirs.first_held
            if (theirs.window_tokens, theirs.chunk_tokens) not in mine and first > 0:
                return (
                    f"this engine keeps all where its source keeps a window of {theirs.window_tokens or theirs.chunk_tokens} "
                    f"tokens (group {theirs.name} begins at token {first}); enable the hybrid KV cache manager on both sides"
                )
        return ""
