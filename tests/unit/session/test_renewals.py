"""Does a lease last as long as its reader wants it, whatever each engine's own lease time is, and for few messages?

In virtual time: the clock goes on by as long as the reader's thread would rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.unit.session.world import (
    LEASE,
    OPTIONS,
    REMOTE,
    SLOT,
    WORD,
    World,
    collect,
    make_world,
    meet,
    order_load,
)

from kvreshard.model import WireError
from kvreshard.model.changed import replace
from kvreshard.session.commands import Acquire, Publish, Release, Renew, StopRenewing
from kvreshard.session.engine_metadata import EngineMetadata, decode_engine_metadata, encode_engine_metadata
from kvreshard.session.lease import FREE, RENEWALS_PER_LEASE, Lease
from kvreshard.session.notes import Heartbeat, read_note

Heartbeats = list[tuple[float, int]]
"""(time, leases) of each heartbeat."""


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float, float], tuple[World, Heartbeats]]]:
    """An engine of two ranks that reads from one of one, `usual_s` is the reader's own interval."""
    worlds: list[World] = []

    def make(lease_s: float, usual_s: float) -> tuple[World, Heartbeats]:
        world = make_world(1, 2, replace(OPTIONS, heartbeat_s=usual_s))
        worlds.append(world)
        world.src.lease_s = lease_s
        heartbeats: Heartbeats = []
        sending = world.dst.transports[0].notify

        def notify(peer: str, payload: bytes) -> None:
            note = read_note(payload)
            if isinstance(note, Heartbeat):
                heartbeats.append((world.clock.now_s, len(note.leases)))
            sending(peer, payload)

        monkeypatch.setattr(world.dst.transports[0], "notify", notify)
        return world, heartbeats

    yield make
    for world in worlds:
        world.close()


def watch(world: World, name: str = "d", lease: Lease = LEASE) -> None:
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Renew(name, REMOTE, lease))


def live(world: World, seconds: float) -> None:
    """Each side turns as often as its threads would, and its engine asks what has ended."""
    end_s = world.clock.now_s + seconds
    while world.clock.now_s < end_s:
        collect(world.dst)
        rests = [endpoint.turn() for side in (world.dst, world.src) for endpoint in side.endpoints.values()]
        assert min(rests) > 0.0
        world.clock.now_s = min(end_s, world.clock.now_s + rests[0])


@pytest.mark.parametrize(
    ("lease_s", "usual_s"),
    [
        (4.0, 5.0),
        (1.0, 600.0),
        (600.0, 1 / 6),
        (30.0, 5.0),
    ],
)
def test_a_lease_lasts_as_long_as_its_reader_wants_it(
    make: Callable[[float, float], tuple[World, Heartbeats]], lease_s: float, usual_s: float
) -> None:
    world, heartbeats = make(lease_s, usual_s)
    world.acquire_and_publish(ttl_s=lease_s)
    watch(world)
    world.turn()
    meet(world)
    live(world, 5 * lease_s)
    assert (collect(world.src)[2], world.words()) == (set(), {WORD})
    assert 5 * RENEWALS_PER_LEASE - 1 <= len(heartbeats) <= 5 * RENEWALS_PER_LEASE + 2
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(StopRenewing("d"))
    live(world, 1.5 * lease_s)
    assert (collect(world.src)[2], world.words()) == ({"r"}, {FREE})


def test_a_source_is_told_as_soon_as_it_is_met(make: Callable[[float, float], tuple[World, Heartbeats]]) -> None:
    """The lease has been old when the request got here, and the meeting takes a while."""
    world, heartbeats = make(4.0, 5.0)
    world.acquire_and_publish(ttl_s=4.0)
    world.turn()
    live(world, 2.0)
    watch(world)
    live(world, 1.9)
    assert not heartbeats
    meet(world)
    world.turn(1)
    assert heartbeats == [(world.clock.now_s, 1)]


def test_what_comes_later_waits_for_its_turn_and_hundreds_go_together(
    make: Callable[[float, float], tuple[World, Heartbeats]],
) -> None:
    world, heartbeats = make(4.0, 5.0)
    leases = [Lease(f"{number:0100}", SLOT, WORD + number) for number in range(500)]
    for endpoint in world.src.endpoints.values():
        for lease in leases:
            endpoint.submit(Acquire(lease))
            endpoint.submit(Publish(lease.request, 4.0))
    for number, lease in enumerate(leases):
        watch(world, f"first choice of {number}", lease)
        watch(world, f"second choice of {number}", lease)
        if number == 0:
            world.turn()
            meet(world)
            world.turn()
            assert [leases for _, leases in heartbeats] == [1]
    heartbeats.clear()
    live(world, 40.0)
    assert collect(world.src)[2] == set()
    times = sorted({at_s for at_s, _ in heartbeats})
    assert [sum(leases for at_s, leases in heartbeats if at_s == time) for time in times] == [500] * len(times)
    assert len(times) <= 10 * RENEWALS_PER_LEASE
    assert len(heartbeats) <= 3 * len(times)


def test_what_one_rank_has_loaded_is_kept_until_all_have(
    make: Callable[[float, float], tuple[World, Heartbeats]],
) -> None:
    """The engine gives its source back; until then other ranks, and other choices of the request, may still read."""
    world, _ = make(4.0, 5.0)
    world.acquire_and_publish(ttl_s=4.0)
    watch(world)
    order_load(world, gives_back=False)
    world.turn()
    meet(world)
    world.turn()
    assert collect(world.dst)[0] == {"d"}
    live(world, 20.0)
    assert (collect(world.src)[2], world.words()) == (set(), {WORD})
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Release(REMOTE, LEASE))
    world.turn()
    assert collect(world.src)[2] == {"r"}


def test_an_engine_that_does_not_step_tells_nobody_and_rests(
    make: Callable[[float, float], tuple[World, Heartbeats]],
) -> None:
    world, heartbeats = make(1.0, 5.0)
    world.acquire_and_publish(ttl_s=1.0)
    watch(world)
    world.turn()
    meet(world)
    world.turn()
    world.clock.now_s += OPTIONS.paused_renewal_s + 1.0
    heartbeats.clear()
    assert [endpoint.turn() > 0.1 for endpoint in world.dst.endpoints.values()] == [True, True]
    assert not heartbeats


def test_a_source_that_cannot_be_met_is_asked_for_now_and_then(
    make: Callable[[float, float], tuple[World, Heartbeats]], monkeypatch: pytest.MonkeyPatch
) -> None:
    world, heartbeats = make(4.0, 5.0)
    asked: list[float] = []
    peers = world.dst.endpoints[0]._peers
    getting = peers.get
    monkeypatch.setattr(peers, "get", lambda *names: (asked.append(world.clock.now_s), getting(*names))[1])
    watch(world)
    live(world, 50.0)
    assert 10 <= len(asked) <= 12
    assert not heartbeats


def engine_metadata(lease_s: float) -> EngineMetadata:
    world = make_world(1, 1)
    world.src.lease_s = lease_s
    made = world.src.engine_metadata()
    world.close()
    return made


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("-inf")])
def test_a_lease_time_that_is_none_is_refused(lease_s: float) -> None:
    with pytest.raises(WireError, match=r"not engine metadata: .*lease_s"):
        decode_engine_metadata(encode_engine_metadata(engine_metadata(lease_s)))


def test_engine_metadata_has_the_lease_time() -> None:
    assert decode_engine_metadata(encode_engine_metadata(engine_metadata(4.0))).lease_s == 4.0
