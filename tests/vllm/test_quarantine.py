"""Are blocks kept as long as any rank's read may write them, and no longer?"""

import pytest

pytest.importorskip("vllm")

from types import SimpleNamespace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from kvreshard.vllm.quarantine import Quarantine
from kvreshard.vllm.scheduler import ReshardWorkerMetadata

pytestmark = pytest.mark.vllm


def test_blocks_come_back_when_the_last_rank_has_settled() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=16)
    held = pool.get_new_blocks(3)
    quarantine = Quarantine()
    quarantine.manager = SimpleNamespace(
        block_pool=pool, get_blocks=lambda request: KVCacheBlocks(([*held, pool.null_block],))
    )
    quarantine.keep([("r", 0)])
    quarantine.keep([("r", 1)])
    pool.free_blocks(held)  # vLLM's own reference
    assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (6, 3)
    quarantine.give_back([("r", 1), ("unknown", 0)])
    assert pool.get_num_free_blocks() == 6
    quarantine.give_back([("r", 0)])
    assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (9, 0)
    quarantine.give_back([("r", 0)])
    assert pool.get_num_free_blocks() == 9


def test_what_ranks_say_is_added_up() -> None:
    one = ReshardWorkerMetadata({("r", 0)}, set())
    other = ReshardWorkerMetadata({("r", 1)}, {("s", 1)})
    assert one.aggregate(other) == ReshardWorkerMetadata({("r", 0), ("r", 1)}, {("s", 1)})
