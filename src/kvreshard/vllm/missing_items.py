"""Requests that lack multimodal items of their prefill: what they need of it, and when they are refused.

1. `arrive`: the items are compared as soon as the key of their digests is known, before vLLM looks for prefix hits. The blocks of a
   request that lacks items, or whose prefill had another `cache_salt`, are hashed with a key of its own. Without the source's key
   nothing is known of the items: the request is refused if its prefill had any (`arrive_unasked`).
2. `narrow`: once the texts have been compared, items of another text are not needed. What is computed of it must not stand for one of them.
3. `why_refused`: whenever vLLM is about to schedule the request, also after a failed load or a preemption.
4. `end`: the request is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreshard.vllm.items import (
    Comparison,
    Item,
    Positions,
    compare,
    digest_with_key,
    find_unseen,
    isolate,
    read_items,
    with_key,
)
from kvreshard.vllm.prompt import Prompt, PromptDigest
from kvreshard.vllm.versions import release

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class _NeededTokens:
    """Leading tokens that only the prefill can give, and why; None: nothing helps."""

    num_tokens: int | None
    reason: str


class MissingItems:
    """Requests of one decode engine. `placeholders`: token ids that stand for items. `num_replayed`: the last tokens of a prefix hit that vLLM
    computes again. `manager`: vLLM's cache manager, once there is one.
    """

    def __init__(self, positions: Positions, placeholders: frozenset[int], num_replayed: int = 0) -> None:
        self._num_replayed = num_replayed
        self.manager: KVCacheManager | None = None
        self._positions, self._placeholders = positions, placeholders
        self._needed: dict[str, _NeededTokens] = {}

    def arrive(self, request: Request, theirs: PromptDigest, key: bytes) -> None:
        """Compare the items of both sides, under the `key` of the digests in `theirs`."""
        mine = with_key(read_items(request.mm_features, self._positions), key)
        self._note(request, compare(theirs.items, mine, int(request.num_prompt_tokens), None, self._positions))
        has_other_salt = bool(theirs.salt) and theirs.salt != digest_with_key(request.cache_salt or "", key)
        if has_other_salt or request.request_id in self._needed:
            isolate(request)

    def arrive_unasked(self, request: Request, theirs: PromptDigest) -> None:
        """The source's key will not be known: whether items and salts are the same cannot be decided."""
        if theirs.items:
            reason = (
                "its prefill has pictures, audio or video, and whether this request has the same is not known, since its source could not be asked; "
                "send it again without kv_transfer_params to have it computed from what it has here"
            )
            self._needed[request.request_id] = _NeededTokens(None, reason)
        if theirs.items or theirs.salt:
            isolate(request)

    def arrive_unknown(self, request: Request, why: str) -> None:
        """Nothing is known of the prefill: a token that stands for an item must have one here."""
        items = read_items(request.mm_features, Positions.PLAIN)
        unseen = find_unseen(request.all_token_ids, items, self._placeholders)
        if unseen is not None:
            reason = f"token {unseen} stands for a picture, audio or video that is not here, and nothing can be loaded: {why}"
            self._needed[request.request_id] = _NeededTokens(None, reason)

    def is_hopeless(self, request_id: str) -> bool:
        """Whether the request is refused whatever is loaded."""
        needed = self._needed.get(request_id)
        return needed is not None and needed.num_tokens is None

    def narrow(
        self, request: Request, theirs: PromptDigest, mine: Prompt, num_same: int, key: bytes, *, is_followed: bool
    ) -> int:
        """How many of the first `num_same` tokens, on which the texts agree, may be loaded. `key`: of the digests in `theirs`.

        `is_followed`: a `transfer_id` has led to the prefill. It may be anybody's, so an item is loaded only where this request has it too.
        """
        num_prompt = int(request.num_prompt_tokens)
        first_other = None if num_same >= min(theirs.num_tokens, num_prompt) else num_same + theirs.step
        found = compare(theirs.items, with_key(mine.items, key), num_prompt, first_other, self._positions)
        self._note(request, found)
        num_loadable = num_same if found.num_loadable is None else min(num_same, found.num_loadable)
        self._refuse_unseen(request, theirs.items, mine, num_loadable, key)
        if is_followed and request.request_id in self._needed:
            reason = (
                "its prefill has other pictures, audio or video than this request, and was found by a transfer_id, which may be anybody's: send "
                "the same to both engines, or send kv_transfer_params when the prefill has ended"
            )
            self._needed[request.request_id] = _NeededTokens(None, reason)
        return num_loadable

    def why_refused(self, request: Request, num_computed: int, num_loadable: int) -> str:
        """Why the request must not go on with these tokens from its prefix hits and its prefill; empty if it may."""
        needed = self._needed.get(request.request_id)
        if needed is None:
            return ""
        if needed.num_tokens is None:
            return needed.reason
        count = self._count_held(request, num_computed, num_loadable)
        return "" if count >= needed.num_tokens else f"{needed.reason}, and has {count} of them"

    def _count_held(self, request: Request, num_computed: int, num_loadable: int) -> int:
        """How many leading tokens vLLM takes from its prefix hit and the load. It computes all that follow.

        - With a load: those that it asked with, and those of the load.
        - Without one: the hit that all groups share, states too. The attention's hit, with which vLLM asks, may be longer (0.33.0,
          `Scheduler.schedule`, `hit_diverged`).
        - A prompt whose prefix hits must not be read, such as one with log-probabilities of the prompt: none, and nothing is loaded.
        - Where vLLM replays the last window of a hit, without that window. vLLM 0.31 loads whole blocks there, and replays the load's too.
        """
        if num_loadable and not request.get_skip_reading_prefix_cache():
            if not (self._num_replayed and release().replays_loads):
                return num_computed + num_loadable
            block_tokens = 1 if self.manager is None else int(self.manager.coordinator.scheduler_block_size)
            num_held = num_computed + num_loadable - num_loadable % block_tokens
        else:
            num_held = num_computed if self.manager is None else int(self.manager.get_computed_blocks(request)[1])
        return max(0, num_held - self._num_replayed)

    def _refuse_unseen(
        self, request: Request, theirs: Iterable[Item], mine: Prompt, num_loadable: int, key: bytes
    ) -> None:
        """Behind `num_loadable` tokens all is computed here: a token that stands for an item of the prefill must have one."""
        if Counter(item.name for item in theirs) <= Counter(item.name for item in with_key(mine.items, key)):
            return
        unseen = find_unseen(mine.token_ids, mine.items, self._placeholders, num_loadable)
        if unseen is not None:
            reason = (
                f"token {unseen} stands for a picture, audio or video that is not here, and nothing behind token {num_loadable} is loaded, since "
                "the prompts or their adapters differ: send the item to both engines"
            )
            self._needed[request.request_id] = _NeededTokens(None, reason)

    def end(self, request_id: str) -> None:
        """The request has ended."""
        self._needed.pop(request_id, None)

    def _note(self, request: Request, found: Comparison) -> None:
        if not found.num_needed:
            self._needed.pop(request.request_id, None)
        elif found.refusal:
            self._needed[request.request_id] = _NeededTokens(None, found.refusal)
        else:
            reason = (
                "its prefill has other pictures, audio or video than this request, which cannot be computed here; it needs the first "
                f"{found.num_needed} tokens from there"
            )
            self._needed[request.request_id] = _NeededTokens(found.num_needed, reason)
