"""What a load moves: the block tables of both sides, the tokens that each group lacks here, and the blocks that are new.

A group lacks what is neither a prefix hit nor behind its window, from the first token that its source still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.vllm.first_tokens import first_token
from kvreshard.vllm.groups import NULL_BLOCK, CacheGroup
from kvreshard.vllm.params import RemotePrefill

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


def make_transfer(
    groups: Sequence[CacheGroup], prefill: RemotePrefill, blocks: KVCacheBlocks, num_tokens: int
) -> Request:
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
        start = max(_first_missing(group, blocks, first, num_tokens), first_token(prefill, group))
        tables[group.name] = PageTable(list(pages), num_tokens, first)
        intervals[group.name] = [(start, num_tokens)] if start < num_tokens else []
        new_pages[group.name] = np.array(fresh, dtype=np.int64)
    return Request(prefill.tables(), tables, intervals, new_pages)


def read_block_ids(blocks: KVCacheBlocks, group: CacheGroup) -> list[int]:
    """The ids of a group's blocks, `NULL_BLOCK` where a window has let go of one."""
    return [NULL_BLOCK if block.is_null else block.block_id for block in blocks.blocks[group.index]]


def _first_missing(group: CacheGroup, blocks: KVCacheBlocks, first: int, num_tokens: int) -> int:
    """The first token that the group does not have here, and has room for: its blocks with a hash are prefix hits."""
    if group.page_tokens is None:
        return 0 if group.ring_tokens is None else max(0, num_tokens - group.ring_tokens)
    held = blocks.blocks[group.index]
    fresh = next((i for i, b in enumerate(held) if b.block_hash is None and not b.is_null), len(held))
    return max(first, fresh) * group.page_tokens
