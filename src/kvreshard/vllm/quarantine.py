"""Which blocks are kept from being used again, since a read that was given up may still write them?

vLLM frees the blocks of a failed load at once. Here they get one more reference, before it does, and lose it when every rank
that had reads under way has seen them come to rest. What never comes to rest is kept until the engine ends. A request id may be used again
meanwhile (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION): the blocks of both are kept until both are at rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvreshard.model.logs import get_logger

logger = get_logger(__name__)


class Quarantine:
    """Of one engine. `manager`: vLLM's, once there is one. Pairs are (request, rank)."""

    def __init__(self) -> None:
        self.manager: KVCacheManager | None = None
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._ranks: dict[str, Counter[int]] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept."""
        return sum(map(len, self._blocks.values()))

    def keep(self, pairs: Iterable[tuple[str, int]]) -> int:
        """Keep the blocks of these requests; of how many some were not kept before."""
        fresh: set[str] = set()
        for request, rank in pairs:
            if self.manager is not None:
                is_new = request not in self._blocks
                kept = self._blocks.setdefault(request, [])
                groups = self.manager.get_blocks(request).blocks
                blocks = [block for group in groups for block in group if not block.is_null and block not in kept]
                if blocks or is_new:
                    fresh.add(request)
                    self.manager.block_pool.touch(blocks)
                    kept += blocks
                    logger.error(
                        "kvreshard: %d blocks of request %s are kept back: a read may still write them",
                        *(len(blocks), request),
                    )
            self._ranks.setdefault(request, Counter())[rank] += 1
        return len(fresh)

    def give_back(self, pairs: Iterable[tuple[str, int]]) -> None:
        """Reads of these have come to rest; a request's blocks are free again when that is so on all ranks."""
        for request, rank in pairs:
            ranks = self._ranks.get(request, Counter())
            ranks[rank] -= 1
            if not +ranks and request in self._blocks and self.manager is not None:
                blocks = self._blocks.pop(request)
                self._ranks.pop(request)
                self.manager.block_pool.free_blocks(blocks)
                logger.warning("kvreshard: %d blocks of request %s are free again", len(blocks), request)
