"""Are blocks kept as long as any rank's read may write them, and no longer?"""

import pytest

pytest.importorskip("vllm")

from types import SimpleNamespace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.outputs import KVConnectorOutput

from kvreshard.session.orders import Failure, Results
from kvreshard.vllm.metrics import ReshardStats
from kvreshard.vllm.quarantine import Quarantine
from kvreshard.vllm.scheduler import ReshardWorkerMetadata, SchedulerSide

pytestmark = pytest.mark.vllm


def test_blocks_come_back_when_the_last_rank_has_settled() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=16)
    held = pool.get_new_blocks(3)
    quarantine = Quarantine()
    quarantine.manager = SimpleNamespace(
        block_pool=pool, get_blocks=lambda request: KVCacheBlocks(([*held, pool.null_block],))
    )
    assert quarantine.keep([("r", 0)]) == 1
    assert quarantine.keep([("r", 1)]) == 0
    pool.free_blocks(held)  # vLLM's own reference
    assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (6, 3)
    quarantine.give_back([("r", 1), ("unknown", 0)])
    assert pool.get_num_free_blocks() == 6
    quarantine.give_back([("r", 0)])
    assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (9, 0)
    quarantine.give_back([("r", 0)])
    assert pool.get_num_free_blocks() == 9


def test_a_request_id_may_be_used_again_while_its_first_blocks_are_kept() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=16)
    quarantine = Quarantine()
    for num_kept in (3, 6):
        held = pool.get_new_blocks(3)
        quarantine.manager = SimpleNamespace(
            block_pool=pool, get_blocks=lambda request, held=held: KVCacheBlocks((held,))
        )
        assert quarantine.keep([("r", 0)]) == 1
        pool.free_blocks(held)
        assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (9 - num_kept, num_kept)
    for num_free in (3, 9):
        quarantine.give_back([("r", 0)])
        assert pool.get_num_free_blocks() == num_free


def test_a_request_is_counted_once_on_however_many_ranks() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=16)
    side = SchedulerSide.__new__(SchedulerSide)
    side.stats, side._quarantine = ReshardStats(), Quarantine()
    side._consumer = side._producer = SimpleNamespace(ended=str, freed=str)
    held = pool.get_new_blocks(2)
    side._quarantine.manager = SimpleNamespace(block_pool=pool, get_blocks=lambda request: KVCacheBlocks((held,)))
    failed = Results(failed={"r": Failure("timeout", "late", is_quarantined=True)})
    for rank in (0, 1):  # what the ranks count themselves is the failure
        worker = ReshardStats()
        worker.note(failed)
        side.stats.aggregate(worker)
        side.hear(KVConnectorOutput(kv_connector_worker_meta=ReshardWorkerMetadata({("r", rank)}, set())))
    assert side.stats.data["counts"]["quarantined"] == {"": 1}
    assert side.stats.data["counts"]["failures"] == {"timeout": 2}


def test_what_ranks_say_is_added_up() -> None:
    one = ReshardWorkerMetadata({("r", 0)}, set())
    other = ReshardWorkerMetadata({("r", 1)}, {("s", 1)})
    assert one.aggregate(other) == ReshardWorkerMetadata({("r", 0), ("r", 1)}, {("s", 1)})
