"""Blocks are held as long as any rank's read may write them, and no longer."""

import pytest

pytest.importorskip("vllm")

from collections.abc import Iterator
from types import SimpleNamespace

from tests.faulty_memory import Fault
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.text import Text
from tests.vllm.simulation.world import Weather, World
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.outputs import KVConnectorOutput

from kvreshard.session.commands import Failure, Results
from kvreshard.vllm.metrics import ReshardStats
from kvreshard.vllm.outcomes import OutcomeLog
from kvreshard.vllm.quarantine import Quarantine
from kvreshard.vllm.scheduler import SchedulerSide
from kvreshard.vllm.step_metadata import ReshardWorkerMetadata

pytestmark = pytest.mark.vllm

# Steps of the network.
NEVER = 5000


def bound(pool: BlockPool, held: list[KVCacheBlock]) -> Quarantine:
    """Every request of this engine holds `held`."""
    quarantine = Quarantine()
    quarantine.bind(SimpleNamespace(block_pool=pool, get_blocks=lambda request: KVCacheBlocks((held,))))
    return quarantine


def test_blocks_come_back_when_the_last_rank_has_settled() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=16)
    held = pool.get_new_blocks(3)
    quarantine = bound(pool, [*held, pool.null_block])
    assert quarantine.hold([("r", 0)]) == (1, 3)
    assert quarantine.hold([("r", 1)]) == (0, 0)
    pool.free_blocks(held)  # vLLM's own reference
    assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (6, 3)
    assert quarantine.release([("r", 1), ("unknown", 0)]) == 0
    assert pool.get_num_free_blocks() == 6
    assert quarantine.release([("r", 0)]) == 3
    assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (9, 0)
    quarantine.release([("r", 0)])
    assert pool.get_num_free_blocks() == 9


def test_a_request_id_may_be_used_again_while_its_first_blocks_are_kept() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=16)
    held: list[KVCacheBlock] = []
    quarantine = bound(pool, held)
    for num_kept in (3, 6):
        held[:] = pool.get_new_blocks(3)
        assert quarantine.hold([("r", 0)]) == (1, 3)
        pool.free_blocks(held)
        assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (9 - num_kept, num_kept)
    for num_free in (3, 9):
        quarantine.release([("r", 0)])
        assert pool.get_num_free_blocks() == num_free


def test_a_request_is_counted_once_on_however_many_ranks() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=False, hash_block_size=16)
    side = SchedulerSide.__new__(SchedulerSide)
    side.stats, side._quarantine = ReshardStats(), bound(pool, pool.get_new_blocks(2))
    side._consumer = side._producer = SimpleNamespace(ended=str, freed=str)
    side._log, side._expired = OutcomeLog(side.stats.count), set()
    failed = Results(failed={"r": Failure("timeout", "late", is_quarantined=True)})
    for rank in (0, 1):  # what the ranks count themselves is the failure
        worker = ReshardStats()
        worker.note(failed)
        side.stats.aggregate(worker)
        side.on_worker_output(KVConnectorOutput(kv_connector_worker_meta=ReshardWorkerMetadata({("r", rank)}, set())))
    assert side.stats.data["counts"]["quarantined"] == {"": 1}
    assert side.stats.data["counts"]["failures"] == {"timeout": 2}
    side.on_worker_output(
        KVConnectorOutput(kv_connector_worker_meta=ReshardWorkerMetadata(set(), {("r", 0), ("r", 1)}))
    )
    assert side.stats.data["counts"]["quarantined_blocks"] == {"kept": 2, "freed": 2}


def test_what_ranks_say_is_added_up() -> None:
    one = ReshardWorkerMetadata({("r", 0)}, set())
    other = ReshardWorkerMetadata({("r", 1)}, {("s", 1)})
    assert one.aggregate(other) == ReshardWorkerMetadata({("r", 0), ("r", 1)}, {("s", 1)})


class _Looked(list[KVCacheBlock]):
    """Counts how often its blocks are looked at."""

    num_looked = 0

    def __iter__(self) -> Iterator[KVCacheBlock]:
        for block in super().__iter__():
            _Looked.num_looked += 1
            yield block


@pytest.mark.parametrize("num_ranks", [1, 2, 16])
def test_keeping_blocks_looks_at_each_of_them_once(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = BlockPool(num_gpu_blocks=5000, enable_caching=False, hash_block_size=16)
    num_compared = 0
    is_equal = KVCacheBlock.__eq__

    def counted(one: KVCacheBlock, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return bool(is_equal(one, other))

    monkeypatch.setattr(KVCacheBlock, "__eq__", counted)
    _Looked.num_looked = 0
    quarantine = bound(pool, _Looked(pool.get_new_blocks(4000)))
    assert quarantine.hold([("r", rank) for rank in range(num_ranks)]) == (1, 4000)
    assert quarantine.hold([("r", num_ranks)]) == (0, 0)  # a rank that is later
    assert (_Looked.num_looked, num_compared) == (8000, 0)


def test_blocks_that_somebody_else_holds_keep_the_cache_from_being_reset() -> None:
    pool = BlockPool(num_gpu_blocks=10, enable_caching=True, hash_block_size=16)
    held = pool.get_new_blocks(3)
    quarantine = bound(pool, held)
    quarantine.hold([("r", 0), ("s", 0)])  # with the same beginning
    assert not pool.reset_prefix_cache()
    pool.free_blocks(held[1:])
    assert not pool.reset_prefix_cache()
    pool.free_blocks(held[:1])
    assert pool.reset_prefix_cache()
    assert (pool.num_gpu_blocks, pool.get_num_free_blocks()) == (10, 6)
    assert quarantine.release([("r", 0), ("s", 0)]) == 6
    assert pool.reset_prefix_cache()
    assert pool.get_num_free_blocks() == 9


@pytest.mark.parametrize("is_running_reset", [False, True])
def test_vllm_resets_its_cache_while_reads_of_a_lost_source_are_unsettled(is_running_reset: bool) -> None:
    """As `pause_generation(clear_cache=True)` and a weight update do. The blocks are back in the pool once the reads have settled."""
    layers = MODELS[0].layers(16, 0)
    shapes = {
        "p": Shape(layers, role="kv_producer"),
        "d": Shape(layers, tp=2, role="kv_consumer", failure_policy="fail"),
    }
    world = World(
        shapes, base_config(), 1, Weather(jumps=1e-9)
    )  # nothing that the world does by itself, and loads may fail
    decode = world.by_name["d"]
    for endpoint in decode.endpoints:
        endpoint._transport._faults = lambda index, transfer: Fault(delay_steps=NEVER)
    world.make_prompt = lambda: list(range(80))
    while not decode.failed:  # the load times out, and does not settle
        if not world.asked:
            world.submit()
        world.tick()
        world.route_and_meet()
        world.clock.now_s += 5.0
    for _ in range(5):
        decode.advance()
    pool, quarantine = decode.scheduler.kv_cache_manager.block_pool, decode.connector._scheduler._quarantine
    num_kept = quarantine.num_blocks
    assert num_kept > 0
    assert decode.scheduler.reset_prefix_cache(reset_running_requests=is_running_reset, reset_connector=True)
    assert pool.get_num_free_blocks() == decode.num_blocks_at_rest - num_kept
    for _ in range(NEVER):
        world.fabric.step()
    text = Text(list(range(20)), 20)
    world._ask(decode, text, 20, 2, None, False, None)  # an engine with nothing to do hears of nothing
    world.drain()
    assert (pool.get_num_free_blocks(), quarantine.num_blocks) == (decode.num_blocks_at_rest, 0)
    world.close()
