"""A load that follows its prefill is served with the bytes of that prefill, or fails: whatever is told when, lost, taken back or begun again."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.faulty_memory import Fault
from tests.unit.session.prefills import TRANSFER, LocalFollower, Prefill, rendezvous
from tests.unit.session.world import OPTIONS, make_world, meet

from kvreshard.session.commands import Cancel, EndpointOptions

SEEN: Counter[str] = Counter()
ACTIONS = ("compute", "settle", "take back", "begin", "publish", "cancel", "turn")
WEIGHTS = (25, 15, 0.6, 3, 5, 0.1, 40)


def live(  # noqa: C901, PLR0915 (one history from its beginning to its end)
    seed: int, *, lies: bool = False, options: EndpointOptions = OPTIONS
) -> str:
    """One history; how it ended: "received", "wrong", or the kind of the failure."""
    rng = Random(seed)
    shown, loses = rendezvous(), [rng.random() < 0.3 for _ in range(40)]
    world = make_world(
        rng.choice([1, 2, 4]), rng.choice([1, 2]), options, follower=lambda: LocalFollower(shown, loses),
        stages=rng.choice([(0, 0), (0, 1), (0, 0, 0)]),
    )  # fmt: skip
    prefill = Prefill(world, shown, rng.randrange(3, 41), rng, lies)
    ranks = list(world.src.endpoints)
    prefill.begin()
    world.src.turn(1)
    if rng.random() < 0.5:
        for _ in range(rng.randrange(8)):
            prefill.go_on(rng.choice(ranks))
            prefill.write_late()
    load = prefill.order()
    is_published = is_aborted = False
    received: set[int] = set()
    failed = {}
    for turn in range(3000):
        calm = turn > 600
        world.faults[-1] = Fault() if calm else Fault(delay_steps=rng.randrange(4))
        (action,) = rng.choices(ACTIONS, WEIGHTS)
        may_lose = not (calm or is_published or is_aborted)
        if action == "compute":
            prefill.go_on(rng.choice(ranks))
        elif action == "settle":
            world.fabric.step(rng.randrange(1, 4))
        elif action == "take back" and may_lose and prefill.lease is not None:
            prefill.take_back()
            SEEN["taken back"] += 1
        elif action == "begin" and prefill.lease is None and not is_aborted:
            if rng.random() < 0.1 and not calm:
                shown.end(TRANSFER, "r", "aborted")
                is_aborted = True
            else:
                prefill.begin()
        elif action == "publish" and prefill.lease is not None and prefill.is_computed and not is_published:
            prefill.publish()
            is_published = True
        elif action == "cancel" and not calm:
            for endpoint in world.dst.endpoints.values():
                endpoint.submit(Cancel("d"))
        elif action == "turn":
            rng.choice([*world.src.endpoints.values(), *world.dst.endpoints.values()]).turn()
        if rng.random() < 0.2:
            prefill.write_late()
        world.clock.now_s += 0.01
        meet(world)
        for rank, endpoint in world.dst.endpoints.items():
            results = endpoint.collect()
            failed |= results.failed
            if "d" in results.received:
                received.add(rank)
        if failed or received == set(world.dst.endpoints):
            break
    prefill.write_late()
    ended = "open"
    if failed:
        ended = failed["d"].kind
        assert not failed["d"].is_quarantined
    elif received == set(world.dst.endpoints):
        expected = prefill.expected(load)
        is_right = all(np.array_equal(world.dst.memory[place], held) for place, held in expected.items())
        ended = "received" if is_right else "wrong"
        SEEN["begun again"] += prefill.num_lives > 1
    world.close()
    return ended


@given(st.integers(0, 2**32 - 1))
def test_what_is_served_is_what_was_computed(seed: int) -> None:
    ended = live(seed)
    SEEN[ended] += 1
    assert ended in ("received", "prefill", "cancelled", "stale lease"), ended


def test_enough_was_tried() -> None:
    """Loads that were served, some of them after their prefill had begun again, and some that failed."""
    ends = Counter(live(seed) for seed in range(36))
    assert ends["received"] > 18
    assert SEEN["begun again"] > 3, SEEN
    assert ends.keys() <= {"received", "prefill", "cancelled", "stale lease"}, ends


def test_progress_that_is_told_too_early_is_noticed() -> None:
    """The negative control: the comparison has teeth."""
    ends = Counter(live(seed, lies=True) for seed in range(20))
    assert ends["wrong"] > 3, ends
