"""Cache groups as vLLM's scheduler knows them, and the meaning of their block lists.

vLLM gives one list of block ids per cache group, by position in the sequence. A block that a group does not have is the null
block, id 0. What counts of each list:

| group | pages | first page |
|---|---|---|
| attention | from the first that is not null | the number of null blocks before it |
| state, cache mode `none` | entry 0: the running state | 0 |
| state, cache mode `align` | entry cdiv(tokens, block size) - 1; checkpoints before it and scratch behind it stay | 0 |
| ring | its one page | 0 |

Groups are named `g0`, `g1`, ... as `vllm.describe` names them: by their place among the groups that are transferred.
Source of the rules: `v1/core/single_type_kv_cache_manager.py`, `v1/worker/mamba_utils.py` (`preprocess_mamba`) of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvreshard.kinds.assemble import NULL_PAGE
from kvreshard.vllm.admission import WantedBlocks
from kvreshard.vllm.versions import release

NULL_BLOCK = NULL_PAGE
Reach = tuple[int | None, int | None]
"""Window and chunk of a group's layers, in tokens; both None: full attention."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One transferred group. `index`: its place among all groups of the scheduler. `page_tokens` None: one page per request.

    `window_tokens`: how far the next token looks back, itself included, None for all; `extra_tokens`: how many more the group
    keeps. `chunk_tokens`: the next token attends to those of its chunk. `num_draft_states`: blocks behind a state's own into which
    drafts are stepped; after such a step the state is that of the last accepted draft. `ring_tokens`: capacity of a ring.
    `is_replayed`: some of its layers are computed for the last window of a prompt only (`deepseek_v41/nvidia/model.py`, `DeepseekV4Model`).
    """

    name: str
    index: int
    page_tokens: int | None
    is_state: bool
    is_aligned_state: bool
    block_tokens: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    extra_tokens: int = 0
    num_draft_states: int = 0
    ring_tokens: int | None = None
    is_replayed: bool = False

    @property
    def is_append_only(self) -> bool:
        """Whether it keeps all tokens of a request, each as it was written: readers may read them before the request has ended."""
        is_held = self.page_tokens is not None and self.window_tokens is None and self.chunk_tokens is None
        return is_held and not (self.is_state or self.is_replayed or self.ring_tokens)

    @property
    def reach(self) -> Reach:
        """How far the group's layers look back, which identifies them on another engine."""
        return self.window_tokens, self.chunk_tokens

    @property
    def has_reach(self) -> bool:
        """Whether its layers look back so far only."""
        return self.reach != (None, None)

    def first_needed(self, num_tokens: int) -> int:
        """The first token that the next one after `num_tokens` tokens attends to, or that is kept for it."""
        if self.chunk_tokens is not None:
            return num_tokens // self.chunk_tokens * self.chunk_tokens
        if self.window_tokens is None:
            return 0
        return max(0, num_tokens - self.window_tokens + 1 - self.extra_tokens)

    def first_written(self, num_tokens: int) -> int:
        """The first token that all layers have written, after `num_tokens` tokens."""
        return max(0, num_tokens - self.window_tokens) if self.is_replayed and self.window_tokens is not None else 0

    def last_pages(self, num_tokens: int) -> range:
        """Indices of the pages that the last one of `num_tokens` tokens attends to, and the next one does not."""
        if self.page_tokens is None:
            return range(0)
        return range(
            self.first_needed(num_tokens - 1) // self.page_tokens, self.first_needed(num_tokens) // self.page_tokens
        )

    def find_lost(self, block_ids: Sequence[int], num_tokens: int) -> int | None:
        """The first token that the last one of `num_tokens` attends to, if a block table for all of them has no page for it."""
        pages, token = self.last_pages(num_tokens), self.first_needed(num_tokens - 1)
        is_lost = any(block_ids[page] == NULL_BLOCK for page in pages if page < len(block_ids))
        return token if is_lost and token < num_tokens - 1 else None

    def pages(self, block_ids: Sequence[int], num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """(first page, page ids) of a request of `num_tokens` tokens."""
        if self.page_tokens is None:
            entry = -(-num_tokens // self.block_tokens) - 1 if self.is_aligned_state else 0
            found = block_ids[entry] if 0 <= entry < len(block_ids) else NULL_BLOCK
            return 0, (found,) if found != NULL_BLOCK else ()
        first = next((i for i, block in enumerate(block_ids) if block != NULL_BLOCK), len(block_ids))
        return first, tuple(block_ids[first:])


def blocks_to_load(groups: Iterable[CacheGroup], num_tokens: int) -> int:
    """Blocks that a load up to token `num_tokens` may take from the free ones. Those of a prefix hit may be free too."""
    found = 0
    for group in groups:
        size = group.page_tokens
        found += 1 + group.num_draft_states if size is None else -(-num_tokens // size)
        found -= 0 if size is None else group.first_needed(num_tokens) // size
    return found


def blocks_to_compute(groups: Iterable[CacheGroup], num_loaded: int, num_tokens: int) -> WantedBlocks:
    """What a loaded request may yet want until all of its `num_tokens` tokens are computed.

    vLLM keeps too few blocks free for it (0.32.0, `Scheduler._inflight_prefill_reserved_blocks`): null blocks before a window or chunk count as
    held, and the checkpoint of an aligned state is left out.
    """
    num_blocks = num_uncounted = 0
    for group in groups:
        size = group.page_tokens
        more = 2 * group.is_aligned_state if size is None else -(-num_tokens // size) - -(-num_loaded // size)
        num_blocks += more
        num_uncounted += 0 if group.is_append_only else more
    return WantedBlocks(num_blocks, num_uncounted)


def count_replayed(groups: Iterable[CacheGroup]) -> int:
    """The last tokens of a prefix hit that vLLM computes again, since some layers hold them for the end of a prompt only."""
    return max((group.window_tokens or 0 for group in groups if group.is_replayed), default=0)


def read_groups(kv_cache_config: Any, dcp_size: int) -> tuple[CacheGroup, ...]:
    """The transferred groups of an engine."""
    ids = kv_cache_config.transfer_group_ids
    return tuple(
        _read_group(f"g{number}", index, kv_cache_config.kv_cache_groups[index].kv_cache_spec, dcp_size)
        for number, index in enumerate(ids)
    )


def _read_group(name: str, index: int, spec: Any, dcp_size: int) -> CacheGroup:
    inner = next(iter(spec.kv_cache_specs.values())) if isinstance(spec, UniformTypeKVCacheSpecs) else spec
    block_tokens = int(spec.block_size)
    if isinstance(inner, MambaSpec):
        aligned = inner.mamba_cache_mode == "align"
        drafts = int(inner.num_speculative_blocks)
        return CacheGroup(name, index, None, True, aligned, block_tokens, num_draft_states=drafts)
    if isinstance(inner, CircularBufferSpec):
        return CacheGroup(name, index, None, False, False, block_tokens, ring_tokens=block_tokens)
    window = chunk = None
    extra = 0
    if isinstance(inner, SlidingWindowSpec):
        window, extra = int(inner.sliding_window), int(inner.extra_retained_tokens)
    elif isinstance(inner, ChunkedLocalAttentionSpec):
        chunk = int(inner.attention_chunk_size)
    page_tokens = block_tokens * (dcp_size if release().is_dcp_sharded(inner) else 1)
    is_replayed = release().is_replayed(inner)
    return CacheGroup(
        name, index, page_tokens, False, False, block_tokens, window, chunk, extra, is_replayed=is_replayed
    )
