"""Does every request that asks for its source's key hear of it once, or that there is none?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faulty_memory import Fault
from tests.pairs.small import request
from tests.unit.session.world import (
    KEY,
    LEASE,
    REMOTE,
    SLOT,
    WORD,
    ScriptedPeers,
    World,
    at_once,
    collect,
    make_world,
    meet,
    seal,
)

from kvreshard.model.changed import replace
from kvreshard.session.commands import Failure, Load, RemoteEngine, Renew, Revoke, StopRenewing
from kvreshard.session.handshake_messages import HandshakeError
from kvreshard.session.lease import Lease
from kvreshard.session.peer import Peer
from kvreshard.session.remote_leases import RemoteLeases
from kvreshard.session.results import ResultQueue
from kvreshard.tools.flight import decode_flight
from kvreshard.tools.recorder import Recorder

OTHER = replace(REMOTE, engine="other")


class Waiting:
    """The leases of a rank whose handshakes end when the test says so."""

    def __init__(self, world: World) -> None:
        endpoint = world.dst.endpoints[0]
        assert endpoint._me is not None
        self.me, self.peers, self.results = endpoint._me, ScriptedPeers([]), ResultQueue()
        self.leases = RemoteLeases(world.dst.transports[0], self.peers, self.results, 5.0)

    def ask(self, name: str, remote: RemoteEngine = REMOTE, *, asks_key: bool = True) -> None:
        self.leases.start_renewing(Renew(name, remote, LEASE, asks_key), None)

    def take(self) -> tuple[dict[str, bytes], dict[str, Failure]]:
        self.leases.update(self.me, 100.0)
        found = self.results.take(0.0)
        return found.keys, found.unmet


@pytest.fixture
def world() -> Iterator[World]:
    made = make_world(1, 1)
    yield made
    made.close()


@pytest.fixture
def waiting(world: World) -> Waiting:
    return Waiting(world)


@pytest.fixture
def peer(world: World) -> Peer:
    (endpoint,) = world.dst.endpoints.values()
    endpoint.submit(Renew("d", REMOTE, LEASE))
    world.turn()
    meet(world)
    made = endpoint._peers.met(REMOTE)
    assert made is not None
    return made


def test_requests_of_one_source_share_its_handshake(peer: Peer, waiting: Waiting) -> None:
    for name in ("a", "b", "c"):
        waiting.ask(name)
    waiting.ask("d", OTHER)
    waiting.ask("e", asks_key=False)
    assert waiting.take() == waiting.take() == ({}, {})
    handshakes = dict(waiting.peers.known)
    assert list(handshakes) == [REMOTE, OTHER]
    waiting.leases.stop_renewing("b")
    waiting.leases.stop_renewing("b")
    handshakes[REMOTE].set_result(peer)
    handshakes[OTHER].set_exception(HandshakeError("nobody"))
    assert waiting.take() == ({"a": KEY, "c": KEY}, {"d": Failure("handshake", "nobody")})
    assert waiting.take() == ({}, {})
    assert waiting.peers.known == handshakes
    assert not any(source.key_requests for source in waiting.leases._sources.values())


def test_nobody_is_asked_for_whom_nobody_waits(waiting: Waiting) -> None:
    waiting.ask("a")
    waiting.ask("a", OTHER)
    waiting.leases.stop_renewing("a")
    assert waiting.take() == ({}, {})
    assert (waiting.peers.known, waiting.leases._sources, waiting.leases._waiting) == ({}, {}, {})


def test_a_handshake_that_was_cancelled_is_begun_anew(peer: Peer, waiting: Waiting) -> None:
    waiting.ask("a")
    waiting.take()
    waiting.peers.cancel(REMOTE)
    assert waiting.take() == ({}, {})
    waiting.peers.known[REMOTE].set_result(peer)
    assert waiting.take() == ({"a": KEY}, {})


def collected(world: World) -> tuple[list[dict[str, bytes]], list[dict[str, Failure]]]:
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
    assert collected(world) == ([{}, {}], [{}, {}])
    meet(world)
    world.turn()
    assert collected(world) == ([{"a": KEY}, {"a": KEY}], [{}, {}])
    world.turn()
    assert collected(world) == ([{}, {}], [{}, {}])
    watch(world, "later")
    world.turn()
    assert collected(world) == ([{"later": KEY}, {"later": KEY}], [{}, {}])
    world.close()


def test_a_source_that_cannot_be_met_is_said_with_the_reason() -> None:
    world = make_world(1, 2)
    world.meeting_error.append(HandshakeError("nobody is there"))
    watch(world, "a")
    world.turn()
    meet(world)
    world.turn()
    failure = Failure("handshake", "nobody is there")
    assert collected(world) == ([{}, {}], [{"a": failure}, {"a": failure}])
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
        assert not endpoint._remote_leases._sources
    (record,) = tmp_path.iterdir()
    assert decode_flight(record.read_bytes()).failure.kind == "mismatch"
    world.close()


def check(world: World, name: str, lease: Lease = LEASE) -> None:
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Renew(name, REMOTE, lease, checks_lease=True))


def test_a_lease_is_checked_before_the_key_of_its_source_is_returned() -> None:
    world = make_world(2, 3)
    world.acquire_and_publish()
    check(world, "a")
    check(world, "another word", Lease("r", LEASE.slot, LEASE.word + 1))
    world.turn()
    assert collected(world) == ([{}] * 3, [{}] * 3)
    meet(world)
    for _ in range(3):
        world.turn()
        world.fabric.step()
    keys, unmet = collected(world)
    assert keys == [{"a": KEY}] * 3
    assert [{name: failure.kind for name, failure in of_rank.items()} for of_rank in unmet] == [
        {"another word": "stale lease"}
    ] * 3
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Revoke(Lease("r", SLOT, WORD)))
    world.turn()
    check(world, "late")
    for _ in range(3):
        world.turn()
        world.fabric.step()
    keys, unmet = collected(world)
    assert keys == [{}] * 3
    assert all(of_rank["late"].kind == "stale lease" for of_rank in unmet)
    results = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    assert not any(result.received or result.failed or result.settled for result in results)
    assert all(len(endpoint._scratch) == 0 and len(endpoint._jobs) == 0 for endpoint in world.dst.endpoints.values())
    world.close()


def test_a_lease_whose_source_cannot_be_met_is_not_checked() -> None:
    world = make_world(1, 2)
    world.meeting_error.append(HandshakeError("nobody is there"))
    check(world, "a")
    world.turn()
    meet(world)
    world.turn()
    keys, unmet = collected(world)
    assert keys == [{}, {}]
    assert any(of_rank["a"].text == "nobody is there" for of_rank in unmet if of_rank)
    world.close()


def test_a_source_whose_lease_word_cannot_be_read_is_met_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but lease checks may follow, and each would fail at the same broken connection."""
    world = make_world(1, 1)
    world.acquire_and_publish()
    world.faults[-1] = Fault(fail_after_copies=0)
    retired: list[Peer] = []
    (endpoint,) = world.dst.endpoints.values()
    monkeypatch.setattr(endpoint._peers, "retire", retired.append)
    check(world, "a")
    world.turn()
    meet(world)
    world.turn()
    (unmet,) = collected(world)[1]
    assert unmet["a"].kind == "transfer"
    assert len(retired) == 1
    world.close()
