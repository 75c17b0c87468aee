"""Do loads end when a call into the transport's library does not come back, and do they go on when it does?"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.faulty_memory import Fault
from tests.pairs.small import request
from tests.unit.session.world import LEASE, OPTIONS, REMOTE, SLOT, WORD, World, collect, meet, order_load, seal

from kvreshard.session.commands import Acquire, Load, Publish, Results
from kvreshard.session.lease import Lease
from kvreshard.transport.base import StuckCall, Transfer

STUCK = StuckCall("start", "NIXL has not come back from 'start'")


def set_stuck(world: World, monkeypatch: pytest.MonkeyPatch, stuck: StuckCall | None) -> None:
    for transport in world.dst.transports.values():
        monkeypatch.setattr(transport, "stuck", lambda: stuck)


def test_loads_end_while_a_call_is_stuck_and_go_on_when_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.acquire_and_publish(ttl_s=1e6)
    world.faults[-1] = Fault(delay_steps=1)
    order_load(world, "posted")
    world.turn()
    meet(world)
    world.turn()
    set_stuck(world, monkeypatch, STUCK)
    order_load(world, "ordered")
    world.turn(1)
    results = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    assert [list(result.failed) for result in results] == [["ordered"]] * len(results)
    assert {(f.kind, f.text, f.is_quarantined) for r in results for f in r.failed.values()} == {
        ("transfer", STUCK.text, False)
    }
    assert [result.stuck for result in results] == [["start"]] * len(results)
    world.clock.now_s += OPTIONS.settle_timeout_s
    world.turn()
    results = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    assert all(list(result.failed) == ["posted"] for result in results)
    assert all(result.failed["posted"].is_quarantined and not result.stuck for result in results)
    set_stuck(world, monkeypatch, None)
    world.faults[-1] = Fault()
    world.fabric.step()
    world.turn()
    assert all(endpoint.collect().settled == {"posted"} for endpoint in world.dst.endpoints.values())
    lease = Lease("s", SLOT + 1, WORD + 1)
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(lease))
        endpoint.submit(Publish(lease.request, 1e6))
    order_load(world, "again", lease=lease)
    for _ in range(3):
        world.turn()
        meet(world)
    assert collect(world.dst)[0] == {"again"}


def test_a_source_that_is_stuck_says_so_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for transport in world.src.transports.values():
        monkeypatch.setattr(transport, "stuck", lambda: STUCK)
    world.turn()
    results: list[Results] = [endpoint.collect() for endpoint in world.src.endpoints.values()]
    assert [result.stuck for result in results] == [["start"]] * len(results)
    world.turn()
    assert all(endpoint.collect() == Results() for endpoint in world.src.endpoints.values())


def test_a_session_that_ends_leaves_nothing_counted_as_stuck(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that sleeps and wakes begins another session, which knows nothing of this one."""
    for transport in world.src.transports.values():
        monkeypatch.setattr(transport, "stuck", lambda: STUCK)
    world.turn()
    for endpoint in world.src.endpoints.values():
        assert endpoint.collect().stuck_change == 1
        assert endpoint.end().stuck_change == -1
        assert endpoint.collect().stuck_change == 0


def test_loads_end_in_time_when_the_sessions_thread_does_not_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As from a copy on a hung device. The engine's thread sees it, and hears of the pages when it is over."""
    endpoint = world.dst.endpoints[0]
    gate, is_inside = threading.Event(), threading.Event()
    posting = world.dst.transports[0].post

    def post(*args: Any) -> Transfer:
        is_inside.set()
        assert gate.wait(60.0)
        return posting(*args)

    monkeypatch.setattr(world.dst.transports[0], "post", post)
    world.acquire_and_publish(ttl_s=1e6)
    order_load(world)
    world.turn()
    turning = threading.Thread(target=lambda: (meet(world), endpoint.turn()))
    turning.start()
    assert is_inside.wait(60.0)
    found = Results()
    while not found.failed:
        found = endpoint.collect()
        world.clock.now_s += 1.0
    assert world.clock.now_s <= 1000.0 + OPTIONS.load_timeout_s + OPTIONS.settle_timeout_s + 3.0
    assert found.failed["d"].is_quarantined
    assert "has not come back from a turn within 110 s" in found.failed["d"].text
    assert (found.stuck, found.stuck_change) == (["turn"], 1)
    late = request(world.src.layout, world.dst.layout, 21)
    endpoint.submit(Load("late", REMOTE, LEASE, late, seal(late), gives_back=True))
    found = endpoint.collect()
    assert (list(found.failed), found.stuck) == (["late"], [])
    gate.set()
    turning.join(60.0)
    assert not turning.is_alive()
    seen: set[str] = set()
    changes = list[int]()
    while seen != {"d", "late"}:
        world.turn(1)
        meet(world)
        results = endpoint.collect()
        changes.append(results.stuck_change)
        assert {*results.failed, *results.received} == set()
        seen |= results.settled
    assert sum(changes) == -1
    assert "'turn' has come back after all" in caplog.text
