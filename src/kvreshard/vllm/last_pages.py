"""Pages that the last token of a prompt still attends to, and that vLLM frees when the prefill ends.

The decode side loads all tokens but the last and computes that one (docs/design/0024). Where a window or a chunk begins on the border
of a page after the prompt, the last token attends to pages that the next token does not. vLLM frees those before it hands out the blocks of
a finished request (0.32.0, `Scheduler._connector_finished`). So:

1. `expect` a prefill when it gets blocks.
2. `hold` after every step's allocations: such pages get one more reference. A preempted request has none until it is scheduled
   again, and others then.
3. `restore` them in the block lists of the finished request.
4. `release` when its lease is over, or when there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvreshard.vllm.groups import NULL_BLOCK, CacheGroup

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

Place = tuple[CacheGroup, int]
"""A group, and the index of a page in its block list."""


class LastPages:
    """Pages that one prefill engine holds. `manager`: vLLM's cache manager, once there is one."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self.manager: KVCacheManager | None = None
        self._groups = tuple(groups)
        self._expected: dict[str, list[Place]] = {}
        self._held: dict[str, dict[Place, KVCacheBlock]] = {}

    def expect(self, request_id: str, num_tokens: int) -> None:
        """A prompt of `num_tokens` tokens is computed for another engine."""
        places = [(group, page) for group in self._groups for page in group.last_pages(num_tokens)]
        if places:
            self._expected[request_id] = places

    def hold(self) -> None:
        """Take a reference to the pages that have been allocated by now."""
        if self.manager is None:
            return
        self.let_go()
        for request_id, places in self._expected.items():
            blocks, held = self.manager.get_blocks(request_id).blocks, self._held.setdefault(request_id, {})
            for place in places:
                group, page = place
                of_group = blocks[group.index]
                if page < len(of_group) and not of_group[page].is_null and of_group[page] is not held.get(place):
                    self._free([held.pop(place)] if place in held else [])
                    self.manager.block_pool.touch([of_group[page]])
                    held[place] = of_group[page]

    def let_go(self) -> None:
        """Give the pages of requests back that have lost their blocks."""
        for request_id in self._expected:
            held = self._held.get(request_id)
            if held and self.manager is not None and not any(self.manager.get_blocks(request_id).blocks):
                self._free([held.pop(place) for place in list(held)])

    def restore(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> list[list[int]]:
        """The block lists of a finished prefill with the held pages, where the pages behind them are still there."""
        restored = [list(ids) for ids in block_ids]
        self._expected.pop(request_id, None)
        held = self._held.get(request_id, {})
        for (group, page), block in sorted(held.items(), key=lambda item: -item[0][1]):
            ids = restored[group.index]
            is_followed = page + 1 == len(ids) or (page + 1 < len(ids) and ids[page + 1] != NULL_BLOCK)
            if is_followed and ids[page] == NULL_BLOCK:
                ids[page] = int(block.block_id)
        return restored

    def release(self, request_id: str) -> None:
        """Nobody reads the request's pages any more."""
        self._expected.pop(request_id, None)
        self._free(list(self._held.pop(request_id, {}).values()))

    def _free(self, blocks: list[KVCacheBlock]) -> None:
        if blocks and self.manager is not None:
            self.manager.block_pool.free_blocks(blocks)
