"""Is an observer told of every step of a load, may it hold a load up and reject it, and does a session do without one?"""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
from tests.faulty_memory import Fault
from tests.unit.session.world import OPTIONS, World, collect, make_world, meet, order_load

from kvreshard.model import EngineLayout
from kvreshard.plan.copies import CopyList
from kvreshard.session.commands import Cancel, CheckResult, Failure, Load
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.lease import WORD_BYTES, LeaseBook
from kvreshard.session.notes import VERSION, Heartbeat, write_note
from kvreshard.session.observer import Landing, LoadObserver, Observer, RejectedLoad
from kvreshard.transport.base import Direction, Transfer

Steps = Generator[Transfer | None, None, None]
Land = Callable[[Landing], Steps]


def at_once(landing: Landing) -> Steps:
    yield from ()


class Spy(Observer):
    """Writes down what it hears. `land`: what it does with what has landed."""

    def __init__(self, land: Land = at_once) -> None:
        self.land, self.calls, self.notifications = land, list[str](), list[bytes]()
        self.num_turns = 0

    def observe(self, load: Load) -> LoadObserver:
        self.calls.append(f"ordered {load.request}")
        return SpyOfLoad(self)

    def on_notification(self, payload: bytes, leases: LeaseBook) -> None:
        self.notifications.append(payload)

    def work(self, leases: LeaseBook, layout: EngineLayout) -> bool:
        self.num_turns += 1
        return self.num_turns < 3


class SpyOfLoad(LoadObserver):
    """Of one load."""

    def __init__(self, spy: Spy) -> None:
        self.spy = spy

    @property
    def check(self) -> CheckResult:
        return "skipped"

    def on_event(self, event: str, text: str = "") -> None:
        self.spy.calls.append(event)

    def on_landing(self, landing: Landing) -> Steps:
        self.spy.calls.append("landed")
        yield from self.spy.land(landing)

    def on_failure(
        self, load: Load, failure: Failure, dst: EngineMetadata, src: EngineMetadata | None, *, is_routed: bool
    ) -> None:
        self.spy.calls.append(f"failed as {failure.kind}, source {src.engine if src else None}, {is_routed}")


def watched(land: Land = at_once) -> tuple[World, Spy]:
    """A world whose one reader has a spy."""
    world, spy = make_world(1, 1), Spy(land)
    (endpoint,) = world.dst.endpoints.values()
    endpoint._observer, endpoint._own._on_other = spy, spy.on_notification
    return world, spy


def load(world: World) -> None:
    world.acquire_and_publish()
    order_load(world)
    world.turn()
    meet(world)
    world.turn()


def test_an_observer_is_told_of_every_step_in_order() -> None:
    world, spy = watched()
    load(world)
    steps = [call for call in spy.calls if call not in ("zeroed", "posted")]
    assert steps == ["ordered d", "met", "bound", "settled", "read", "landed"]
    assert spy.calls.index("bound") < spy.calls.index("posted") < spy.calls.index("settled")
    results = world.dst.endpoints[0].collect()
    assert (set(results.received), results.failed, results.checks) == ({"d"}, {}, {"d": "skipped"})
    world.close()


def test_a_failed_load_is_told_with_both_cards() -> None:
    world, spy = watched()
    world.faults[-1] = Fault(fail_after_copies=0)
    load(world)
    assert spy.calls[-2:] == ["failed", "failed as transfer, source prefill, True"]
    assert "landed" not in spy.calls
    world.close()


def test_a_load_whose_source_is_not_met_is_told_without_its_card() -> None:
    world, spy = watched()
    world.meeting_error.append(RuntimeError("nobody there"))
    load(world)
    assert spy.calls[-1] == "failed as fault, source None, False"
    world.close()


@pytest.mark.parametrize(("error", "kind"), [(RejectedLoad("no"), "digest"), (RuntimeError("a fault"), "fault")])
def test_what_an_observer_rejects_is_not_served(error: Exception, kind: str) -> None:
    def reject(landing: Landing) -> Steps:
        yield None
        raise error

    world, _ = watched(reject)
    load(world)
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind) == (set(), kind)
    world.close()


@pytest.mark.parametrize("fault", [Fault(delay_steps=3), Fault(delay_steps=3, fail_after_copies=0), Fault(drop=True)])
def test_a_load_whose_observer_raises_ends_as_others_do_and_not_before_its_reads(
    fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(of: SpyOfLoad, event: str, text: str = "") -> None:
        raise RuntimeError(event)

    world, _ = watched()
    monkeypatch.setattr(SpyOfLoad, "on_event", raises)
    world.faults[-1] = fault
    load(world)
    world.turn()
    assert collect(world.dst)[:2] == (set(), {})
    for _ in range(8):
        world.fabric.step()
        world.turn()
    if fault.drop:
        world.wait(OPTIONS.load_timeout_s + OPTIONS.settle_timeout_s)
    received, failed, _ = collect(world.dst)
    ends = [(failure.kind, failure.is_quarantined) for failure in failed.values()]
    assert (received, ends) == {
        (False, None): ({"d"}, []),
        (False, 0): (set(), [("transfer", False)]),
        (True, None): (set(), [("timeout", True)]),
    }[fault.drop, fault.fail_after_copies]
    world.close()


def test_a_load_waits_for_its_observer_and_for_what_that_has_posted() -> None:
    ended = list[str]()

    def read_and_wait(landing: Landing) -> Steps:
        mover, (source,) = landing.peer.mover, landing.peer.engine_metadata.rank_by_number.values()
        copies = CopyList.of([source.lease_address], [world.dst.tables[0].region.address], WORD_BYTES)
        try:
            transfer = mover.transport.post(mover.peers[0], Direction.READ, copies)
            landing.posted(transfer)
            yield transfer
            while True:
                yield None
        finally:
            ended.append("closed")

    world, spy = watched(read_and_wait)
    load(world)
    world.turn(5)
    assert collect(world.dst)[:2] == (set(), {})
    assert (spy.calls[-1], ended) == ("landed", [])
    (endpoint,) = world.dst.endpoints.values()
    endpoint.submit(Cancel("d"))
    world.turn()
    assert collect(world.dst)[1]["d"].kind == "cancelled"
    assert ended == ["closed"]
    world.close()


def test_a_load_that_an_observer_holds_up_for_too_long_fails() -> None:
    def wait(landing: Landing) -> Steps:
        while True:
            yield None

    world, _ = watched(wait)
    load(world)
    world.wait(OPTIONS.load_timeout_s)
    failure = collect(world.dst)[1]["d"]
    assert (failure.kind, "it was being compared with its source" in failure.text) == ("timeout", True)
    world.close()


def test_only_what_is_none_of_the_sessions_notes_is_heard() -> None:
    world, spy = watched()
    peer, (mine,) = world.src.transports[0], world.dst.transports.values()
    peer.add_peer("reader", mine.metadata())
    for payload in (write_note(Heartbeat(VERSION, "d", ())), b"something else"):
        peer.notify("reader", payload)
    world.turn()
    assert spy.notifications == [b"something else"]
    world.close()


def test_a_session_does_not_rest_while_its_observer_has_work() -> None:
    world, _ = watched()
    (endpoint,) = world.dst.endpoints.values()
    rests = [endpoint.turn() for _ in range(3)]
    assert rests[:2] == [0.0, 0.0]
    assert rests[2] > 0.0
    world.close()


def test_a_session_does_without_an_observer() -> None:
    world, _ = watched()
    (endpoint,) = world.dst.endpoints.values()
    endpoint._observer = observer = Observer()
    endpoint._own._on_other = observer.on_notification
    load(world)
    results = endpoint.collect()
    assert (set(results.received), results.checks) == ({"d"}, {})
    world.faults[-1] = Fault(fail_after_copies=0)
    order_load(world, "e")
    world.turn()
    assert set(endpoint.collect().failed) == {"e"}
    world.close()
