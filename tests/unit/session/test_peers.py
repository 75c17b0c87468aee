"""Is a peer that is forgotten really gone, whenever that happens, and can it come back?"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from tests.unit.session.world import KIND, OPTIONS, Clock, Side, make_side

from kvreshard.model.changed import replace
from kvreshard.session import peers
from kvreshard.session.handshake import Address, HandshakeError, Listener
from kvreshard.session.orders import EndpointOptions, RemoteEngine
from kvreshard.session.peers import Peer, Peers, Self, meet_engine
from kvreshard.testing.small import engine
from kvreshard.transport.local import HostMemory
from kvreshard.transport.memory import Fabric, no_fault

PATIENCE_S = 60.0


class Room:
    """A source with a listener, a reader's peers, and a gate before each meeting."""

    def __init__(self) -> None:
        self.fabric = Fabric()
        self.sides: list[Side] = []
        src, dst = self.start("prefill", 2), self.start("decode", 1)
        self.listener = Listener(Address("127.0.0.1", 0), src.card())
        self.remote = RemoteEngine("prefill", "life", self.listener.address)
        self.me = Self(dst.card(), dst.layout, 0, dst.transports[0], HostMemory(), None)
        self.gate, self.num_meetings = threading.Event(), 0
        self.clock, self.woken = Clock(), threading.Event()
        self.peers = Peers(EndpointOptions(handshake_timeout_s=PATIENCE_S), self.clock, self.woken.set, self._meet)

    def start(self, name: str, tp: int) -> Side:
        """An engine, or the next life of one."""
        layout = engine(name, tp=tp, kind=KIND)
        self.sides.append(make_side(Clock(), self.fabric, layout, lambda rank: None, no_fault, OPTIONS))
        return self.sides[-1]

    def _meet(self, me: Self, remote: RemoteEngine, options: EndpointOptions) -> Peer:
        assert self.gate.wait(PATIENCE_S)
        self.num_meetings += 1
        return meet_engine(me, remote, options)

    def restart(self) -> RemoteEngine:
        """The source ends, and its next life listens at the same address."""
        self.listener.close()
        card = msgspec.structs.replace(self.start("prefill", 2).card(), incarnation="next")
        self.listener = Listener(self.remote.address, card)
        return RemoteEngine("prefill", "next", self.remote.address)

    def hear(self) -> None:
        """What has been found out of a peer that is doubted."""
        assert self.woken.wait(PATIENCE_S)
        self.peers.sweep(())

    def close(self) -> None:
        self.gate.set()
        self.peers.close()
        self.listener.close()
        for side in self.sides:
            for transport in side.transports.values():
                transport.close()


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room()
    yield made
    made.close()


def test_a_peer_that_is_forgotten_while_it_is_met_can_be_read_from_afterwards(room: Room) -> None:
    first = room.peers.get(room.me, room.remote)
    room.peers.forget(room.remote)
    room.gate.set()
    first.result(PATIENCE_S)
    assert room.peers.get(room.me, room.remote).result(PATIENCE_S) is first.result()
    assert room.num_meetings == 1


def test_a_peer_that_is_forgotten_is_met_anew(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.forget(room.remote)
    assert room.peers.met(room.remote) is None
    assert room.peers.get(room.me, room.remote).result(PATIENCE_S) is not first
    assert room.num_meetings == 2


def test_a_reference_to_a_life_that_is_gone_leaves_the_present_one_alone(room: Room) -> None:
    room.gate.set()
    present = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    former = RemoteEngine("prefill", "former", room.listener.address)
    for _ in range(3):
        assert isinstance(room.peers.get(room.me, former).exception(PATIENCE_S), HandshakeError)
        assert room.peers.met(room.remote) is present
        assert room.peers.get(room.me, room.remote).result(PATIENCE_S) is present
    name = present.mover.peers[0]
    present.mover.transport.notify(name, b"still known")


def test_the_former_life_is_dropped_when_the_new_one_has_answered(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    following = room.restart()
    second = room.peers.get(room.me, following)
    assert room.peers.met(room.remote) is first
    second.result(PATIENCE_S)
    room.woken.clear()
    assert room.peers.get(room.me, following) is second
    room.hear()
    assert room.peers.met(room.remote) is None
    assert room.peers.get(room.me, following) is second


def test_two_engines_of_one_name_are_both_read_from(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    card = msgspec.structs.replace(room.start("prefill", 2).card(), incarnation="next")
    with contextlib.closing(Listener(Address("127.0.0.1", 0), card)) as listener:
        following = RemoteEngine("prefill", "next", listener.address)
        second = room.peers.get(room.me, following).result(PATIENCE_S)
        for _ in range(3):
            for remote, peer in ((room.remote, first), (following, second)):
                room.woken.clear()
                assert room.peers.get(room.me, remote).result(PATIENCE_S) is peer
                room.peers.sweep(())
        room.peers.doubt(room.me, first)
        room.hear()
        assert (room.peers.met(room.remote), room.peers.met(following)) == (first, second)


def test_a_doubted_peer_is_forgotten_only_if_it_is_not_there(room: Room) -> None:
    room.gate.set()
    peer = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    for is_there in (True, False):
        room.woken.clear()
        if not is_there:
            room.restart()
        room.peers.doubt(room.me, peer)
        room.hear()
        assert room.peers.met(room.remote) is (peer if is_there else None)


def test_of_a_peer_that_was_met_anew_the_former_cannot_be_forgotten(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.forget(room.remote, first)
    second = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.forget(room.remote, first)
    assert room.peers.met(room.remote) is second is not first


def test_one_life_under_two_addresses_is_one_peer(room: Room) -> None:
    room.gate.set()
    other = RemoteEngine("prefill", "life", Address("localhost", room.remote.address.port))
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    assert room.peers.get(room.me, other).result(PATIENCE_S) is room.peers.met(other) is first
    room.peers.forget(other)
    assert room.peers.get(room.me, other).result(PATIENCE_S) is not first


def test_a_wrong_address_does_not_stand_in_the_way_of_the_right_one(room: Room) -> None:
    with contextlib.closing(Listener(Address("127.0.0.1", 0), room.start("another", 1).card())) as listener:
        wrong = RemoteEngine("prefill", "life", listener.address)
        asked = room.peers.get(room.me, wrong)
        right = room.peers.get(room.me, room.remote)
        room.gate.set()
        assert isinstance(asked.exception(PATIENCE_S), HandshakeError)
        assert right.result(PATIENCE_S) is room.peers.met(room.remote)
        assert room.peers.get(room.me, wrong).result(PATIENCE_S) is right.result()


def test_a_fleet_that_is_not_there_does_not_keep_others_waiting(room: Room) -> None:
    absent = [RemoteEngine(f"absent-{number}", "life", Address("127.0.0.1", 1)) for number in range(48)]

    def meet(me: Self, remote: RemoteEngine, options: EndpointOptions) -> Peer:
        if remote in absent:
            assert room.gate.wait(PATIENCE_S)
            raise HandshakeError("nobody is there")
        return meet_engine(me, remote, options)

    several = Peers(OPTIONS, room.clock, room.woken.set, meet)
    for remote in absent:
        several.get(room.me, remote)
    assert several.get(room.me, room.remote).result(PATIENCE_S).remote == room.remote
    assert several.met(absent[0]) is None
    room.gate.set()
    several.close()


def test_a_source_that_cannot_be_told_the_outcome_is_known_all_the_same(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tell(*_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(peers, "tell_outcome", tell)
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.forget(room.remote)
    assert room.peers.get(room.me, room.remote).result(PATIENCE_S) is not first


def test_what_nobody_asks_for_is_forgotten_in_time(room: Room) -> None:
    room.gate.set()
    peer = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    gone = RemoteEngine("gone", "life", room.listener.address)
    room.peers.get(room.me, gone).exception(PATIENCE_S)
    ttl_s = EndpointOptions().peer_ttl_s
    for seconds, in_use, expected in ((61.0, (), 1), (ttl_s, (peer,), 1), (61.0, (), 0)):
        room.clock.now_s += seconds
        room.peers.sweep(in_use)
        assert room.peers.num_known == expected


def test_what_a_route_warns_of_is_said_once_per_engine(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    def meet(me: Self, remote: RemoteEngine, options: EndpointOptions) -> Peer:
        peer = meet_engine(me, remote, options)
        return replace(peer, route=replace(peer.route, warnings=("field 'draft.0.k': the draft's cache is missing",)))

    room.gate.set()
    known = Peers(EndpointOptions(handshake_timeout_s=PATIENCE_S), room.clock, room.woken.set, meet)
    for _ in range(2):
        known.get(room.me, room.remote).result(PATIENCE_S)
        known.close()
        known.forget(room.remote)
        known._pool = ThreadPoolExecutor(1)
    known.close()
    said = [record.message for record in caplog.records if "draft" in record.message]
    assert said == ["engine prefill: field 'draft.0.k': the draft's cache is missing"]
