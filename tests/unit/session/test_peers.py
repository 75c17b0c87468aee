"""Is a peer that is forgotten really gone, whenever that happens, and can it come back?"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest
from tests.unit.session.world import KIND, OPTIONS, Clock, Side, make_side

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
        self.peers = Peers(EndpointOptions(handshake_timeout_s=PATIENCE_S), Clock(), lambda: None, self._meet)

    def start(self, name: str, tp: int) -> Side:
        """An engine, or the next life of one."""
        layout = engine(name, tp=tp, kind=KIND)
        self.sides.append(make_side(Clock(), self.fabric, layout, lambda rank: None, no_fault, OPTIONS))
        return self.sides[-1]

    def _meet(self, me: Self, remote: RemoteEngine, options: EndpointOptions) -> Peer:
        assert self.gate.wait(PATIENCE_S)
        self.num_meetings += 1
        return meet_engine(me, remote, options)

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
    room.listener.close()
    card = msgspec.structs.replace(room.start("prefill", 2).card(), incarnation="next")
    room.listener = Listener(Address("127.0.0.1", 0), card)
    following = RemoteEngine("prefill", "next", room.listener.address)
    second = room.peers.get(room.me, following)
    assert room.peers.met(room.remote) is first
    second.result(PATIENCE_S)
    assert room.peers.get(room.me, following) is second
    assert room.peers.met(room.remote) is None
