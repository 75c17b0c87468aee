"""Does an endpoint keep the leases of what it waits for, and end those of what it offers?"""

from __future__ import annotations

import pytest
from tests.unit.session.world import (
    LEASE,
    OPTIONS,
    REMOTE,
    SLOT,
    WORD,
    World,
    collect,
    meet,
    order_load,
)

from kvreshard.session.commands import (
    Acquire,
    Publish,
    Renew,
    Revoke,
    StopRenewing,
)
from kvreshard.session.lease import CATCH_UP_S, FREE, Lease, LeaseTable


def watch(world: World) -> None:
    """Every rank waits for the request, and knows its source."""
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Renew("d", REMOTE, LEASE))
    world.turn()
    meet(world)


def test_a_word_stands_as_soon_as_its_grant_is_handed_in(world: World) -> None:
    """The reader may be told of it, and come, before the session's thread gets its turn."""
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("r", SLOT, WORD)))
    assert world.words() == {WORD}
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("beyond", 64, WORD)))
        endpoint.submit(Acquire(Lease("free", SLOT, FREE)))
    assert world.words() == {WORD}


def test_watched_requests_keep_their_lease_and_unwatched_ones_lose_it(world: World) -> None:
    world.acquire_and_publish(ttl_s=10.0)
    watch(world)
    for _ in range(10):
        world.clock.now_s += 5.0
        world.turn()
    assert (collect(world.src)[2], world.words()) == (set(), {WORD})
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(StopRenewing("d"))
    world.turn()
    for _ in range(3):
        world.clock.now_s += 5.0
        world.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_a_paused_engine_keeps_its_leases_for_a_time(world: World) -> None:
    """It makes no step, so that only the session's own thread can renew them. One that never goes on lets its sources have their blocks."""
    world.acquire_and_publish(ttl_s=10.0)
    watch(world)
    collect(world.dst)
    world.wait(OPTIONS.paused_renewal_s)
    assert world.words() == {WORD}
    collect(world.dst)
    world.wait(OPTIONS.paused_renewal_s)
    assert world.words() == {WORD}
    world.wait(20.0)
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_a_source_that_stood_still_hears_its_readers_before_it_ends_their_leases(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that fetches notifications stood still too, and may get its turn later than the session's."""
    world.acquire_and_publish(ttl_s=10.0)
    watch(world)
    world.wait(5.0)
    world.wait(60.0, world.dst)  # it renews
    with monkeypatch.context() as unfetched:
        for transport in world.src.transports.values():
            unfetched.setattr(transport, "notifications", list)
        world.wait(1.0, world.src)
    world.wait(9.0, world.src)
    assert world.words() == {WORD}
    world.wait(2.0, world.src)  # and nobody has renewed since
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_a_source_that_stood_still_for_a_second_hears_its_readers_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.acquire_and_publish(ttl_s=10.0)
    watch(world)
    world.wait(9.5, world.src)
    world.dst.turn()  # it renews
    with monkeypatch.context() as unfetched:
        for transport in world.src.transports.values():
            unfetched.setattr(transport, "notifications", list)
        world.clock.now_s += 1.0
        world.src.turn()
    assert world.words() == {WORD}
    world.wait(6.0, world.src)
    assert world.words() == {WORD}


@pytest.mark.parametrize("gap_s", [1.0, 4.0])
def test_a_source_that_is_always_late_ends_leases_all_the_same(world: World, gap_s: float) -> None:
    world.acquire_and_publish(ttl_s=10.0)
    world.src.turn()
    for _ in range(int((10.0 + CATCH_UP_S) / gap_s) + 2):
        world.clock.now_s += gap_s
        world.src.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_an_order_that_cannot_be_obeyed_leaves_nothing_watched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.acquire_and_publish(ttl_s=10.0)
    watch(world)

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    for endpoint in world.dst.endpoints.values():
        monkeypatch.setattr(endpoint._peers, "get", refuse)
    order_load(world)
    world.turn()
    assert collect(world.dst)[1]["d"].kind == "fault"
    for _ in range(4):
        world.clock.now_s += 5.0
        world.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_a_revoked_request_is_forgotten_in_silence(world: World) -> None:
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("r", SLOT, WORD)))
        endpoint.submit(Revoke(Lease("r", SLOT, WORD)))
    world.turn()
    assert (collect(world.src), world.words()) == ((set(), {}, set()), {FREE})


def test_a_source_that_takes_its_offer_back_fails_its_reader_and_frees_its_pages(world: World) -> None:
    world.acquire_and_publish()
    world.turn()
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Revoke(Lease("r", SLOT, WORD)))
    world.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_an_offer_without_a_grant_is_freed_at_once(world: World) -> None:
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Publish("never", 30.0))
    world.turn()
    assert collect(world.src)[2] == {"never"}


def test_each_offer_is_announced_to_the_transport_and_its_end_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(world.src.transports[0], "set_attentive", told.append)
    world.src.turn()
    assert told == []
    world.acquire_and_publish("r")
    world.src.turn()
    assert told == [True]
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("s", SLOT + 1, WORD)))
        endpoint.submit(Publish("s", 30.0))
    world.src.turn()
    assert told == [True, True]
    world.wait(31.0, world.src)
    assert told == [True, True, False]


def test_leases_end_whatever_is_wrong_with_those_of_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that reads and is read from: what it cannot say to its sources is not its readers' affair."""
    world.acquire_and_publish(ttl_s=5.0)
    world.src.turn()
    endpoints = world.src.endpoints.values()
    for endpoint in endpoints:

        def refuse(*_: object) -> float:
            raise RuntimeError("a surprise")

        monkeypatch.setattr(endpoint._remote_leases, "renew", refuse)
    for endpoint in endpoints:
        for _ in range(12):
            world.clock.now_s += 0.5
            with pytest.raises(RuntimeError, match="a surprise"):
                endpoint.turn()
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_a_word_that_was_taken_back_is_not_written_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session's thread may get its turn only after the pages were given to somebody else. Their word is left alone as well."""
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("r", SLOT, WORD)))
        endpoint.submit(Revoke(Lease("r", SLOT, WORD)))
        endpoint.submit(Acquire(Lease("s", SLOT, WORD + 2)))
    written: list[int] = []
    write = LeaseTable.__setitem__

    def note(table: LeaseTable, slot: int, word: int) -> None:
        write(table, slot, word)
        written.append(table[slot])

    monkeypatch.setattr(LeaseTable, "__setitem__", note)
    world.src.turn(1)
    assert world.words() == {WORD + 2}
    assert set(written) <= {WORD + 2}
