"""The tokens that an engine may load from a prefill or an answer, and the `Request` of a load.

`LoadableTokens` counts leading tokens:

1. The prompts must agree on them: compared under the source's key, by digests (`prompt`) and by multimodal items (`missing_items`).
2. They end where this engine can go on: it computes the last tokens of each prompt itself.
3. A state is loaded at exactly the token where its source stands, or nothing is loaded. Nothing is loaded of a model whose tokens attend to
   later ones, unless both prompts are the same; nor where the source no longer has what a window needs.

A load may leave the first block of a window or chunk incomplete, where its source no longer has all of that block. vLLM's own prefix cache
leaves it out (`SchedulerSide`); other connectors beside this one do not ask, and store blocks by their hashes. Those of such a request are
hashed with a key of its own.

An answer's reader has all of its prompt: of other multimodal items, or of another `cache_salt`, nothing is loaded.

`make_transfer` takes both block tables, the tokens that each group lacks here, and the blocks that are new. A group has the tokens of its
prefix hits, and needs none behind its window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvreshard.model.tables import PageTable, Tokens
from kvreshard.model.tables import Request as Transfer
from kvreshard.vllm.groups import NULL_BLOCK, CacheGroup
from kvreshard.vllm.items import Positions, digest_with_key, first_difference, isolate, with_key
from kvreshard.vllm.missing_items import MissingItems
from kvreshard.vllm.page_list import page_array
from kvreshard.vllm.params import RemotePrefill
from kvreshard.vllm.prompt import Prompt, PromptDigest, count_matching
from kvreshard.vllm.requests import MIN_COMPUTED_TOKENS, EngineConfig, read_prompt

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Loadable:
    """Leading tokens that can be loaded, and the cause for which that is nothing (`fallback`) or less than was prefilled (`partial`).

    `reason`: why the request is computed here; `why`: why a part of it is; for people.
    """

    num_tokens: int
    fallback: str = ""
    partial: str = ""
    reason: str = ""
    why: str = ""


class LoadableTokens:
    """Counts for one decode engine. `has_siblings`: other connectors may store what is loaded."""

    def __init__(self, config: EngineConfig, missing_items: MissingItems) -> None:
        self._config, self._missing_items = config, missing_items
        self._has_state = any(group.is_state for group in config.groups)
        self.has_siblings = False

    def limit(self, request: Request) -> int:
        """The last token from which this engine can go on."""
        return int(request.num_prompt_tokens) - max(self._config.num_backoff_tokens, MIN_COMPUTED_TOKENS)

    def count(
        self, request: Request, prefill: RemotePrefill, key: bytes | None, *, is_answer: bool = False
    ) -> Loadable:
        """What can be loaded. `key`: the source's.

        Prompts that cannot be compared count as equal. Then the source cannot be reached, or its seal does not hold, and the load fails
        before a byte is read; or the engine runs in shadow mode and loads nothing.
        """
        num_prompt, limit = int(request.num_prompt_tokens), self.limit(request)
        mine = read_prompt(request, self._config)
        same = min(prefill.num_tokens, num_prompt)
        prompt_key = None if key is None else prefill.prompt_key(key)
        if prompt_key is not None:
            same = count_matching(prefill.prompt, mine, prompt_key)
            if is_answer:
                same = min(same, count_alike(prefill.prompt, mine, prompt_key, self._config.positions))
            else:
                is_followed = prefill.statement is not None
                same = self._missing_items.narrow(
                    request, prefill.prompt, mine, same, prompt_key, is_followed=is_followed
                )
                # A router that sends a request to both engines sends one salt to both; an id alone may be anybody's.
                if is_followed and prefill.prompt.salt != digest_with_key(mine.salt, prompt_key):
                    same = 0
        count = max(0, int(min(same, prefill.num_tokens, limit)))
        none = self._find_obstacle(prefill, num_prompt, same, limit, count)
        if none is not None:
            return none
        if self.has_siblings and self._leaves_incomplete(prefill):
            isolate(request)
        if self._has_position(prefill):
            return Loadable(prefill.num_tokens)
        fallback = "" if same else "prompt"
        if num_prompt < prefill.num_tokens and num_prompt - same < prefill.prompt.step:  # as far as digests tell
            remedy = "" if is_answer else "; ask a prefill engine for one token only"
            why = f"the prompt here has {num_prompt} tokens{remedy}"
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
        if self._has_position(prefill):
            if prefill.num_tokens <= limit and same == prefill.num_tokens:
                return None
            reason = (
                f"its source stands at token {prefill.num_tokens}, the prompts agree on {same} tokens, and this engine "
                f"must resume at token {limit} or before: a state cannot be taken back"
            )
            return Loadable(0, "state", "state", reason)
        if self._config.whole_prompts and not same == prefill.num_tokens == num_prompt:
            reason = (
                f"its prompt of {num_prompt} tokens is not the source's of {prefill.num_tokens}, and this model's tokens attend to "
                "later ones too"
            )
            return Loadable(0, "prompt", "prompt", reason)
        missing = self._find_missing(prefill, count)
        if missing:
            return Loadable(0, "window", "window", f"of its first {count} tokens {missing}")
        return None

    def _leaves_incomplete(self, prefill: RemotePrefill) -> bool:
        """Whether a block of a window begins with tokens that its source no longer has."""
        return any(
            group.has_reach and first_token(prefill, group) % (group.page_tokens or 1) > 0
            for group in self._config.groups
        )

    def _has_position(self, prefill: RemotePrefill) -> bool:
        """Whether either side has a state, which belongs to one position."""
        return self._has_state or prefill.has_state

    def _find_missing(self, prefill: RemotePrefill, num_tokens: int) -> str:
        """What the source no longer has of what this engine needs; empty if nothing."""
        for group in self._config.groups:
            if group.ring_tokens is not None:
                if is_entry_gone(prefill, group.ring_tokens, num_tokens):
                    return f"the ring of group {group.name} is not complete any more: its source went on to token {prefill.num_tokens}"
                continue
            needed, first = group.first_needed(num_tokens), first_token(prefill, group)
            if needed < num_tokens and first > needed:
                return f"group {group.name} needs token {needed}, and its source begins at token {first}"
        mine = {group.reach for group in self._config.groups}
        for theirs in prefill.groups:
            first = theirs.first_held
            if (theirs.window_tokens, theirs.chunk_tokens) not in mine and first > 0:
                return (
                    f"this engine keeps all where its source keeps a window of {theirs.window_tokens or theirs.chunk_tokens} "
                    f"tokens (group {theirs.name} begins at token {first}); enable the hybrid KV cache manager on both sides"
                )
        return ""


def count_alike(theirs: PromptDigest, mine: Prompt, key: bytes, positions: Positions) -> int:
    """How many leading tokens have the same multimodal items and `cache_salt` on both sides, whatever the texts are."""
    if theirs.salt != digest_with_key(mine.salt, key):
        return 0
    held = [item for item in mine.items if item.first < theirs.num_tokens]
    first = first_difference(theirs.items, with_key(held, key), positions)
    return theirs.num_tokens if first is None else first


def first_token(prefill: RemotePrefill, group: CacheGroup) -> int:
    """The first token that the source still has in all of its groups with the same window and chunk, or in all of its rings."""
    if group.ring_tokens is not None:
        shortest = min((theirs.ring_tokens for theirs in prefill.groups if theirs.ring_tokens is not None), default=0)
        return max(0, prefill.num_tokens - shortest)
    return max(
        (
            theirs.first_held
            for theirs in prefill.groups
            if theirs.page_tokens is not None and (theirs.window_tokens, theirs.chunk_tokens) == group.reach
        ),
        default=0,
    )


def is_entry_gone(prefill: RemotePrefill, ring_tokens: int, num_tokens: int) -> bool:
    """Whether the source may have lost tokens of the ring entry that is not complete after `num_tokens` tokens.

    A ring holds one compressed entry or several whole ones (vLLM 0.32.0, `CircularBufferSpec`). The scheduler does not know the size of an
    entry; it divides the rings of both sides. A prefill leaves the tokens of one entry at its end, however many the ring has room for.
    """
    rings = [group.ring_tokens for group in prefill.groups if group.ring_tokens is not None]
    if not rings:
        return num_tokens % ring_tokens > 0
    largest = math.gcd(ring_tokens, *rings)
    return any(
        num_tokens % size and num_tokens // size * size < prefill.num_tokens - size
        for size in range(1, largest + 1)
        if largest % size == 0
    )


def make_transfer(
    groups: Sequence[CacheGroup], prefill: RemotePrefill, blocks: KVCacheBlocks, num_tokens: int
) -> Transfer:
    """From the blocks of `prefill` into `blocks`, which vLLM has allocated here for the first `num_tokens` tokens."""
    tables: dict[str, PageTable] = {}
    intervals: dict[str, list[Tokens]] = {}
    new_pages: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
    for group in groups:
        first, pages = group.pages(read_block_ids(blocks, group), num_tokens)
        held = set(pages)  # without the blocks behind a state that its drafts step into
        fresh = [
            block.block_id
            for block in blocks.blocks[group.index]
            if block.block_hash is None and not block.is_null and block.block_id in held
        ]
        start = max(first_missing(group, blocks, num_tokens), first_token(prefill, group))
        tables[group.name] = PageTable(page_array(pages), num_tokens, first)
        intervals[group.name] = [(start, num_tokens)] if start < num_tokens else []
        new_pages[group.name] = np.array(fresh, dtype=np.int64)
    return Transfer(prefill.tables(), tables, intervals, new_pages)


def read_block_ids(blocks: KVCacheBlocks, group: CacheGroup) -> list[int]:
    """The ids of a group's blocks, `NULL_BLOCK` where a window has dropped one."""
    return [NULL_BLOCK if block.is_null else block.block_id for block in blocks.blocks[group.index]]


def first_missing(group: CacheGroup, blocks: KVCacheBlocks, num_tokens: int) -> int:
    """The first of `num_tokens` tokens that the group lacks here and has room for. Its blocks with a hash are prefix hits."""
    if group.page_tokens is None:
        return 0 if group.ring_tokens is None else max(0, num_tokens - group.ring_tokens)
    held = blocks.blocks[group.index]
    fresh = next((i for i, b in enumerate(held) if b.block_hash is None and not b.is_null), len(held))
    return fresh * group.page_tokens
