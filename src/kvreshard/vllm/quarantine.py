"""Blocks of failed loads that must not be used again yet, since a read may still write them.

1. `hold`: vLLM frees the blocks of a failed load at once. Before it does, each of them gets one more reference.
2. `release`: the reads have settled on every rank; the blocks lose that reference. Blocks whose reads never settle are held until the
   engine ends.
3. `bind`: vLLM resets its prefix cache only if no block is held. Blocks that only the quarantine holds do not count: a reset
   forgets their content like that of all others, and they stay out of the pool (docs/design/0038).

A request id may be used again meanwhile (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION): the blocks of both requests are held until the reads of
both have settled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvreshard.model.logs import fields, get_logger

logger = get_logger(__name__)

Place = tuple[int, int]
"""A group's index, and a block's id in the pool of that group."""


class Quarantine:
    """The quarantine of one engine. Pairs are (request, rank)."""

    def __init__(self) -> None:
        self._manager: KVCacheManager | None = None
        self._blocks: dict[str, dict[Place, KVCacheBlock]] = {}
        self._ranks: dict[str, Counter[int]] = {}
        self._references: Counter[Place] = Counter()

    @property
    def num_blocks(self) -> int:
        """Blocks that are held."""
        return len(self._references)

    def bind(self, manager: KVCacheManager, before_reset: Callable[[], None] = lambda: None) -> None:
        """Hold blocks of vLLM's manager, and let it reset its prefix cache beside them. `before_reset`: gives back what is held in vain."""
        self._manager = manager
        pool = manager.block_pool
        reset = pool.reset_prefix_cache

        def reset_beside_quarantine() -> bool:
            before_reset()
            num_blocks = self._count_held_alone()
            pool.num_gpu_blocks -= num_blocks
            try:
                is_reset = bool(reset())
            finally:
                pool.num_gpu_blocks += num_blocks
            if is_reset and num_blocks:
                logger.warning(
                    "the prefix cache was reset; %d blocks of %d failed loads stay out of the pool, since a read may still write them",
                    *(num_blocks, len(self._blocks)),
                    extra=fields("quarantine_kept", count=num_blocks),
                )
            return is_reset

        pool.reset_prefix_cache = reset_beside_quarantine

    def hold(self, pairs: Iterable[tuple[str, int]]) -> tuple[int, int]:
        """Hold the blocks of these requests. Returns (requests, blocks) that were not held before."""
        ranks: dict[str, Counter[int]] = {}
        for request, rank in pairs:
            ranks.setdefault(request, Counter())[rank] += 1
        num_requests = num_blocks = 0
        for request, of_request in ranks.items():
            is_new = request not in self._blocks
            num_fresh = self._touch(request)
            num_requests += is_new or num_fresh > 0
            num_blocks += num_fresh
            self._ranks.setdefault(request, Counter()).update(of_request)
        return num_requests, num_blocks

    def release(self, pairs: Iterable[tuple[str, int]]) -> int:
        """The reads of these have settled; a request's blocks are free when that is so on all ranks. Returns how many blocks are."""
        num_blocks = 0
        for request, rank in pairs:
            ranks = self._ranks.get(request, Counter())
            ranks[rank] -= 1
            if not +ranks and request in self._blocks and self._manager is not None:
                blocks = self._blocks.pop(request)
                self._ranks.pop(request)
                self._references -= Counter(blocks.keys())
                self._manager.block_pool.free_blocks(blocks.values())
                num_blocks += len(blocks)
                logger.warning(
                    "%d blocks of request %s are free: their reads have settled",
                    *(len(blocks), request),
                    extra=fields("blocks_freed", request_id=request, count=len(blocks)),
                )
        return num_blocks

    def _count_held_alone(self) -> int:
        """Blocks that nobody else holds: neither the request whose load failed, nor another with the same prefix."""
        blocks = {place: block for held in self._blocks.values() for place, block in held.items()}
        return sum(blocks[place].ref_cnt == count for place, count in self._references.items())

    def _touch(self, request: str) -> int:
        """Take a reference to each block of the request that has none from here. Returns how many those are."""
        if self._manager is None:
            return 0
        held = self._blocks.setdefault(request, {})
        groups = self._manager.get_blocks(request).blocks
        fresh = {
            (number, block.block_id): block
            for number, group in enumerate(groups)
            for block in group
            if not block.is_null and (number, block.block_id) not in held
        }
        if fresh:
            self._manager.block_pool.touch(list(fresh.values()))
            held |= fresh
            self._references.update(fresh.keys())
            logger.error(
                "%d blocks of request %s are quarantined: a read may still write them",
                *(len(fresh), request),
                extra=fields("blocks_quarantined", request_id=request, count=len(fresh)),
            )
        return len(fresh)
