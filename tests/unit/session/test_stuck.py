"""Do loads end when a call into the transport's library does not come back, and do they go on when it does?"""

from __future__ import annotations

import pytest
from tests.unit.session.world import OPTIONS, SLOT, WORD, World, collect, meet, order_load

from kvreshard.session.orders import Grant, Offer, RemoteLease, Results
from kvreshard.transport.base import StuckCall
from kvreshard.transport.memory import Fault

STUCK = StuckCall("start", "NIXL has not come back from 'start'")


def set_stuck(world: World, monkeypatch: pytest.MonkeyPatch, stuck: StuckCall | None) -> None:
    for transport in world.dst.transports.values():
        monkeypatch.setattr(transport, "stuck", lambda: stuck)


def test_loads_end_while_a_call_is_stuck_and_go_on_when_it_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.grant_and_offer(ttl_s=1e6)
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
    lease = RemoteLease("s", SLOT + 1, WORD + 1)
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Grant(lease.request, lease.slot, lease.word))
        endpoint.submit(Offer(lease.request, 1e6))
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
    assert all(result.stuck == ["start"] and not result.is_empty for result in results)
    world.turn()
    assert all(endpoint.collect().is_empty for endpoint in world.src.endpoints.values())
