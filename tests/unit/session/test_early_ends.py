"""How a load that follows its prefill ends when the source's listener has nothing more to say."""

from __future__ import annotations

import time
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from tests.faulty_memory import Fault
from tests.unit.session.prefills import LocalFollower, Prefill, rendezvous
from tests.unit.session.world import OPTIONS, collect, make_world, meet, order_load

from kvreshard.model.changed import replace
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.lease import FREE
from kvreshard.session.progress import ProgressBoard, StepProgress


@pytest.mark.parametrize("knows", ["nothing", "the lease", "the end"])
def test_a_lease_that_ends_after_its_prefill_fails_the_load(knows: str) -> None:
    """The listener still shows the prefill: an engine that rests learns only with its next step that the lease has ended."""
    shown = rendezvous()
    world = make_world(1, 1, OPTIONS, follower=lambda: LocalFollower(shown, []))
    prefill = Prefill(world, shown, 21, Random(1))
    prefill.begin()
    world.src.turn(1)
    prefill.order()
    for _ in range(0 if knows == "nothing" else 3):
        world.turn()
        meet(world)
        world.fabric.step(4)
    while prefill.go_on(0):
        pass
    prefill.publish(ttl_s=1.0)
    world.faults[-1] = Fault(delay_steps=1)
    if knows == "the end":
        world.dst.turn(1)
    world.wait(2.0, world.src)
    assert prefill.lease is not None
    assert world.src.tables[0][prefill.lease.slot] == FREE
    failed = {}
    for _ in range(20):
        world.dst.turn(1)
        meet(world)
        world.fabric.step(4)
        world.clock.now_s += 0.05
        failed |= collect(world.dst)[1]
    assert failed["d"].kind == "stale lease"
    world.close()


@pytest.mark.parametrize("silent", [[1], [0, 1]])
def test_a_source_rank_without_progress_words_is_read_at_the_end(
    silent: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are optional for each rank; the others are read early all the same."""
    shown = rendezvous()
    world = make_world(2, 1, OPTIONS, follower=lambda: LocalFollower(shown, []))
    full = world.src.engine_metadata

    def partly() -> EngineMetadata:
        made = full()
        ranks = [replace(one, progress_address=0) if one.rank in silent else one for one in made.ranks]
        return replace(made, ranks=tuple(ranks))

    monkeypatch.setattr(world.src, "engine_metadata", partly)
    prefill = Prefill(world, shown, 40, Random(0))
    prefill.begin()
    world.src.turn(1)
    load = prefill.order()
    num_early, received, failed = 0, set(), {}
    for turn in range(60):
        for rank in world.src.endpoints:
            prefill.go_on(rank)
        if turn == 40:
            assert prefill.is_computed
            prefill.publish()
        world.turn(1)
        meet(world)
        world.fabric.step(4)
        world.clock.now_s += 0.03
        results = world.dst.endpoints[0].collect()
        num_early += sum(moved.num_early_bytes for moved in results.received.values())
        received |= set(results.received)
        failed |= results.failed
    assert (received, failed) == ({"d"}, {})
    assert (num_early > 0) == (len(silent) < 2)
    expected = prefill.expected(load)
    assert all(np.array_equal(world.dst.memory[place], held) for place, held in expected.items())
    world.close()


def test_an_event_that_a_broken_device_refuses_to_tell_does_not_keep_loads_from_their_end() -> None:
    """An engine of both roles: its session reads for itself, and tells those who read from it."""
    world = make_world(1, 1)

    def broken() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    endpoint = world.dst.endpoints[0]
    endpoint.board = ProgressBoard(world.dst.tables[0], lambda: broken)
    endpoint.begin_step([StepProgress(0, 77, 0, 4)])
    endpoint.board.end()
    world.acquire_and_publish()
    order_load(world)
    endpoint.start()
    deadline_s = time.monotonic() + 10.0
    received: set[str] = set()
    while not received and time.monotonic() < deadline_s:
        meet(world)
        world.src.turn(1)
        received |= collect(world.dst)[0]
        time.sleep(0.005)
    assert received == {"d"}
    assert not endpoint.board.is_pending
    world.close()
