"""How a load that follows its prefill ends when the source's listener has nothing more to say."""

from __future__ import annotations

from random import Random

import pytest
from tests.faulty_memory import Fault
from tests.unit.session.prefills import LocalFollower, Prefill, rendezvous
from tests.unit.session.world import OPTIONS, collect, make_world, meet

from kvreshard.session.lease import FREE


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
