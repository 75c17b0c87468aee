"""Does every request that asks for its source's key hear of it once, or that there is none?"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from tests.pairs.small import request
from tests.unit.session.world import KEY, LEASE, REMOTE, World, at_once, collect, make_world, meet, seal

from kvreshard.model.changed import replace
from kvreshard.session.commands import Failure, Load, RemoteEngine, Renew, StopRenewing
from kvreshard.session.handshake_server import HandshakeError
from kvreshard.session.peer import Peer
from kvreshard.session.source_keys import SourceKeys
from kvreshard.tools.flight import decode_flight
from kvreshard.tools.recorder import Recorder

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
    endpoint.submit(Renew("d", REMOTE, LEASE))
    world.turn()
    meet(world)
    made = endpoint._peers.met(REMOTE)
    world.close()
    assert made is not None
    return made


def wanted(name: str, remote: RemoteEngine = REMOTE, *, asks_key: bool = True) -> Renew:
    return Renew(name, remote, LEASE, asks_key)


def test_requests_of_one_source_share_its_handshake(peer: Peer) -> None:
    keys, handshakes = SourceKeys(), Handshakes()
    for name in ("a", "b", "c"):
        keys.ask(wanted(name))
    keys.ask(wanted("d", OTHER))
    keys.ask(wanted("e", asks_key=False))
    assert keys.take(handshakes.get) == keys.take(handshakes.get) == ({}, {})
    assert [remote for remote, _ in handshakes.asked] == [REMOTE, OTHER]
    keys.forget("b")
    keys.forget("b")
    error = HandshakeError("nobody")
    handshakes.asked[0][1].set_result(peer)
    handshakes.asked[1][1].set_exception(error)
    assert keys.take(handshakes.get) == ({"a": KEY, "c": KEY}, {"d": error})
    assert (len(keys), keys.take(handshakes.get)) == (0, ({}, {}))
    assert len(handshakes.asked) == 2
    assert (keys._asked, keys._source) == ({}, {})


def test_nobody_is_asked_for_whom_nobody_waits() -> None:
    keys, handshakes = SourceKeys(), Handshakes()
    keys.ask(wanted("a"))
    keys.ask(wanted("a", OTHER))
    keys.forget("a")
    assert keys.take(handshakes.get) == ({}, {})
    assert (handshakes.asked, keys._asked, keys._source) == ([], {}, {})


def test_a_handshake_that_was_cancelled_is_begun_anew(peer: Peer) -> None:
    keys, handshakes = SourceKeys(), Handshakes()
    keys.ask(wanted("a"))
    keys.take(handshakes.get)
    handshakes.asked[0][1].cancel()
    assert keys.take(handshakes.get) == ({}, {})
    handshakes.asked[1][1].set_result(peer)
    assert keys.take(handshakes.get) == ({"a": KEY}, {})


def told(world: World) -> tuple[list[dict[str, bytes]], list[dict[str, Failure]]]:
    results = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    return [found.keys for found in results], [found.unmet for found in results]


def watch(world: World, name: str, *, asks_key: bool = True) -> None:
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Renew(name, REMOTE, LEASE, asks_key))


def test_every_rank_says_the_key_of_a_source_once_it_is_met() -> None:
    world = make_world(1, 2)
    watch(world, "a")
    watch(world, "b", asks_key=False)
    watch(world, "c")
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(StopRenewing("c"))
    world.turn()
    assert told(world) == ([{}, {}], [{}, {}])
    meet(world)
    world.turn()
    assert told(world) == ([{"a": KEY}, {"a": KEY}], [{}, {}])
    world.turn()
    assert told(world) == ([{}, {}], [{}, {}])
    watch(world, "later")
    world.turn()
    assert told(world) == ([{"later": KEY}, {"later": KEY}], [{}, {}])
    world.close()


def test_a_source_that_cannot_be_met_is_said_with_the_reason() -> None:
    world = make_world(1, 2)
    world.meeting_error.append(HandshakeError("nobody is there"))
    watch(world, "a")
    world.turn()
    meet(world)
    world.turn()
    failure = Failure("handshake", "nobody is there")
    assert told(world) == ([{}, {}], [{"a": failure}, {"a": failure}])
    world.close()


def test_a_load_that_was_refused_reads_nothing_and_asks_nobody(tmp_path: Path) -> None:
    world = make_world(1, 2, recorder=Recorder(tmp_path, 4, submit=at_once))
    world.acquire_and_publish()
    watch(world, "d")
    transfer = request(world.src.layout, world.dst.layout, 21, new_pages=[2, 3, 4, 5])
    refusal = Failure("mismatch", "model is 'a' there and 'b' here")
    world.turn()
    world.met.clear()  # nobody has answered
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load("d", REMOTE, LEASE, transfer, seal(transfer), gives_back=True, refusal=refusal))
    world.turn(20)
    received, failed, _ = collect(world.dst)
    assert (received, failed) == (set(), {"d": refusal})
    assert world.met == []
    for endpoint in world.dst.endpoints.values():
        assert not endpoint._jobs
        assert not len(endpoint._source_keys)
    (record,) = tmp_path.iterdir()
    assert decode_flight(record.read_bytes()).failure.kind == "mismatch"
    world.close()
