"""Does every request that asks for its source's key hear of it once, or that there is none?"""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from tests.unit.session.world import KEY, LEASE, REMOTE, World, collect, make_world, meet, seal

from kvreshard.model.changed import replace
from kvreshard.session.handshake import HandshakeError
from kvreshard.session.orders import Load, RemoteEngine, Unwatch, Watch
from kvreshard.session.peers import Peer
from kvreshard.session.source_keys import SourceKeys
from kvreshard.testing.small import request

OTHER = replace(REMOTE, engine="other")


class Handshakes:
    """Handshakes that end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[RemoteEngine, Future[Peer]]] = []

    def get(self, remote: RemoteEngine) -> Future[Peer]:
        self.asked.append((remote, Future()))
        return self.asked[-1][1]


@pytest.fixture
def peer() -> Peer:
    world = make_world(1, 1)
    (endpoint,) = world.dst.endpoints.values()
    endpoint.submit(Watch("d", REMOTE, LEASE))
    world.turn()
    meet(world)
    made = endpoint._peers.met(REMOTE)
    world.close()
    assert made is not None
    return made


def test_requests_of_one_source_share_its_handshake(peer: Peer) -> None:
    keys, handshakes = SourceKeys(), Handshakes()
    for name in ("a", "b", "c"):
        keys.ask(name, REMOTE)
    keys.ask("d", OTHER)
    assert keys.take(handshakes.get) == keys.take(handshakes.get) == ({}, set())
    assert [remote for remote, _ in handshakes.asked] == [REMOTE, OTHER]
    keys.forget("b")
    keys.forget("b")
    handshakes.asked[0][1].set_result(peer)
    handshakes.asked[1][1].set_exception(HandshakeError("nobody"))
    assert keys.take(handshakes.get) == ({"a": KEY, "c": KEY}, {"d"})
    assert (len(keys), keys.take(handshakes.get)) == (0, ({}, set()))
    assert len(handshakes.asked) == 2


def test_nobody_is_asked_for_whom_nobody_waits() -> None:
    keys, handshakes = SourceKeys(), Handshakes()
    keys.ask("a", REMOTE)
    keys.ask("a", OTHER)
    keys.forget("a")
    assert keys.take(handshakes.get) == ({}, set())
    assert (handshakes.asked, keys._asked, keys._source) == ([], {}, {})


def test_a_handshake_that_was_cancelled_is_begun_anew(peer: Peer) -> None:
    keys, handshakes = SourceKeys(), Handshakes()
    keys.ask("a", REMOTE)
    keys.take(handshakes.get)
    handshakes.asked[0][1].cancel()
    assert keys.take(handshakes.get) == ({}, set())
    handshakes.asked[1][1].set_result(peer)
    assert keys.take(handshakes.get) == ({"a": KEY}, set())


def told(world: World) -> tuple[list[dict[str, bytes]], list[set[str]]]:
    results = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    return [found.keys for found in results], [found.unmet for found in results]


def watch(world: World, name: str, *, asks_key: bool = True) -> None:
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Watch(name, REMOTE, LEASE, asks_key))


def test_every_rank_says_the_key_of_a_source_once_it_is_met() -> None:
    world = make_world(1, 2)
    watch(world, "a")
    watch(world, "b", asks_key=False)
    watch(world, "c")
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Unwatch("c"))
    world.turn()
    assert told(world) == ([{}, {}], [set(), set()])
    meet(world)
    world.turn()
    assert told(world) == ([{"a": KEY}, {"a": KEY}], [set(), set()])
    world.turn()
    assert told(world) == ([{}, {}], [set(), set()])
    watch(world, "later")
    world.turn()
    assert told(world) == ([{"later": KEY}, {"later": KEY}], [set(), set()])
    world.close()


def test_a_source_that_cannot_be_met_is_said_too() -> None:
    world = make_world(1, 2)
    world.meeting_error.append(HandshakeError("nobody is there"))
    watch(world, "a")
    world.turn()
    meet(world)
    world.turn()
    assert told(world) == ([{}, {}], [{"a"}, {"a"}])
    world.close()


def test_a_load_that_was_refused_reads_nothing_though_its_source_is_met_after_all() -> None:
    world = make_world(1, 2)
    world.grant_and_offer()
    wanted = request(world.src.layout, world.dst.layout, 21, new_pages=[2, 3, 4, 5])
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(
            Load("d", REMOTE, LEASE, wanted, seal(wanted), gives_back=True, refusal="prompts were not compared")
        )
    world.turn()
    meet(world)
    world.turn(20)
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind, failed["d"].text) == (set(), "handshake", "prompts were not compared")
    assert all(not endpoint._jobs for endpoint in world.dst.endpoints.values())
    world.close()
