"""Is a peer that is forgotten really gone, whenever that happens, and can it come back?"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, ClassVar, cast

import pytest
from tests.faulty_memory import FaultyFabric, no_fault
from tests.pairs.small import engine
from tests.ports import free_ports
from tests.unit.session.world import KIND, LEASE, LIFE, OPTIONS, Clock, Side, make_side

from kvreshard.model.changed import replace
from kvreshard.session.commands import EndpointOptions, Failure, Release, RemoteEngine, Renew
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.handshake_client import MAX_AT_ONCE
from kvreshard.session.handshake_messages import Address, HandshakeError, HandshakeMessage
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.peer import LocalRank, Peer, connect_engine
from kvreshard.session.peers import MAX_PER_HOST, RETIRE_S, SWEEP_S, Peers
from kvreshard.session.remote_leases import RemoteLeases
from kvreshard.session.results import ResultQueue
from kvreshard.session.seal import instance_id_of
from kvreshard.transport.local import HostMemory

NEXT_KEY = bytes(32)
NEXT_LIFE = instance_id_of(NEXT_KEY)
PATIENCE_S = 60.0


class Room:
    """A source with a listener, a reader's peers, and a gate before each connection."""

    def __init__(self) -> None:
        self.fabric = FaultyFabric()
        self.sides: list[Side] = []
        src, dst = self.start("prefill", 2), self.start("decode", 1)
        self.listener = HandshakeServer(Address("127.0.0.1", 0), src.engine_metadata())
        self.remote = RemoteEngine("prefill", LIFE, self.listener.address)
        self.me = LocalRank(dst.engine_metadata(), dst.layout, 0, dst.transports[0], HostMemory(), None)
        self.gate, self.num_meetings = threading.Event(), 0
        self.clock, self.woken = Clock(), threading.Event()
        self.peers = Peers(EndpointOptions(handshake_timeout_s=PATIENCE_S), self.clock, self.woken.set, self._connect)

    def start(self, name: str, tp: int) -> Side:
        """An engine, or the next life of one."""
        layout = engine(name, tp=tp, kind=KIND)
        self.sides.append(make_side(Clock(), self.fabric, layout, lambda rank: None, no_fault, OPTIONS))
        return self.sides[-1]

    def _connect(
        self, me: LocalRank, remote: RemoteEngine, engine_metadata: EngineMetadata, options: EndpointOptions
    ) -> Peer:
        assert self.gate.wait(PATIENCE_S)
        self.num_meetings += 1
        return connect_engine(me, remote, engine_metadata, options)

    def restart(self) -> RemoteEngine:
        """The source ends, and its next life listens at the same address."""
        self.listener.close()
        self.listener = HandshakeServer(self.remote.address, self.next_metadata())
        return RemoteEngine("prefill", NEXT_LIFE, self.remote.address)

    def next_metadata(self) -> EngineMetadata:
        """The engine metadata of another life of the source."""
        side = self.start("prefill", 2)
        side.key = NEXT_KEY
        return side.engine_metadata()

    def hear(self) -> None:
        """What has been found out of a peer that is doubted."""
        while self.peers._checking:
            assert self.woken.wait(PATIENCE_S)
            self.woken.clear()
            self.peers.sweep(tuple)

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


def test_a_peer_that_is_met_during_a_sweep_can_be_read_from_afterwards(room: Room) -> None:
    first = room.peers.get(room.me, room.remote)
    room.clock.now_s += 10 * SWEEP_S
    room.peers.sweep(set)
    room.gate.set()
    first.result(PATIENCE_S)
    assert room.peers.get(room.me, room.remote).result(PATIENCE_S) is first.result()
    assert room.num_meetings == 1


def test_a_peer_that_is_forgotten_is_met_anew(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.forget(first)
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


def test_the_former_instance_is_dropped_when_the_new_one_has_answered_elsewhere(room: Room) -> None:
    """A restarted pod has another address."""
    room.gate.set()
    room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.listener.close()
    with contextlib.closing(HandshakeServer(Address("127.0.0.1", 0), room.next_metadata())) as listener:
        following = RemoteEngine("prefill", NEXT_LIFE, listener.address)
        second = room.peers.get(room.me, following)
        second.result(PATIENCE_S)
        room.woken.clear()
        assert room.peers.get(room.me, following) is second
        room.hear()
        assert (room.peers.met(room.remote), room.peers.met(following)) == (None, second.result())


def test_two_engines_of_one_name_are_both_read_from(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    with contextlib.closing(HandshakeServer(Address("127.0.0.1", 0), room.next_metadata())) as listener:
        following = RemoteEngine("prefill", NEXT_LIFE, listener.address)
        second = room.peers.get(room.me, following).result(PATIENCE_S)
        for _ in range(3):
            for remote, peer in ((room.remote, first), (following, second)):
                room.woken.clear()
                assert room.peers.get(room.me, remote).result(PATIENCE_S) is peer
                room.peers.sweep(())
        room.peers.check(room.me, first)
        room.hear()
        assert (room.peers.met(room.remote), room.peers.met(following)) == (first, second)


def test_a_doubted_peer_is_forgotten_only_if_it_is_not_there(room: Room) -> None:
    room.gate.set()
    peer = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    for is_there in (True, False):
        room.woken.clear()
        if not is_there:
            room.restart()
        room.peers.check(room.me, peer)
        room.hear()
        assert room.peers.met(room.remote) is (peer if is_there else None)


def test_of_a_peer_that_was_met_anew_the_former_cannot_be_forgotten(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.forget(first)
    second = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.forget(first)
    assert room.peers.met(room.remote) is second is not first


def test_a_peer_whose_transfer_has_failed_stays_until_the_others_that_read_from_it_have_ended(room: Room) -> None:
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    (name,) = {name for name in first.mover.peers.values() if "/0 at" in name}
    room.peers.retire(first)
    assert room.peers.met(room.remote) is None
    second = room.peers.get(room.me, room.remote)
    for _ in range(2):
        room.peers.sweep(lambda: {first})
        assert not second.done()
    assert name in first.mover.transport._peers
    room.peers.sweep(set)
    assert second.result(PATIENCE_S) is room.peers.met(room.remote) is not first


def test_a_peer_whose_transfer_has_failed_is_met_anew_though_others_still_read_from_it(room: Room) -> None:
    """The connection may be broken; then they end by this."""
    room.gate.set()
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.peers.retire(first)
    second = room.peers.get(room.me, room.remote)
    room.clock.now_s += RETIRE_S
    room.peers.sweep(lambda: {first})
    assert second.result(PATIENCE_S) is not first


def test_one_life_asked_at_two_addresses_at_once_is_one_peer(room: Room) -> None:
    other = RemoteEngine("prefill", LIFE, Address("localhost", room.remote.address.port))
    meetings = [room.peers.get(room.me, remote) for remote in (room.remote, other)]
    room.gate.set()
    first, second = (meeting.result(PATIENCE_S) for meeting in meetings)
    assert first is second
    assert room.num_meetings == 1
    assert room.peers.num_met == 1
    room.clock.now_s += SWEEP_S
    room.peers.sweep(lambda: {first})
    room.peers.forget(first)
    anew = [room.peers.get(room.me, remote).result(PATIENCE_S) for remote in (other, room.remote)]
    assert anew[0] is anew[1] is not first
    assert room.num_meetings == 2


def test_one_life_under_two_addresses_is_one_peer(room: Room) -> None:
    room.gate.set()
    other = RemoteEngine("prefill", LIFE, Address("localhost", room.remote.address.port))
    first = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    assert room.peers.get(room.me, other).result(PATIENCE_S) is room.peers.met(other) is first
    room.peers.forget(first)
    assert room.peers.get(room.me, other).result(PATIENCE_S) is not first


def test_an_address_that_was_wrong_is_forgotten_without_the_peer_that_is_read_from(room: Room) -> None:
    room.gate.set()
    wrong = RemoteEngine("prefill", LIFE, Address("127.0.0.1", free_ports(1)))
    assert isinstance(room.peers.get(room.me, wrong).exception(PATIENCE_S), HandshakeError)
    peer = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    room.clock.now_s += SWEEP_S
    room.peers.sweep(lambda: {peer})
    assert wrong not in room.peers._known
    assert room.peers.met(room.remote) is peer
    peer.mover.transport.notify(peer.mover.peers[0], b"still known")


def test_a_wrong_address_does_not_stand_in_the_way_of_the_right_one(room: Room) -> None:
    with contextlib.closing(
        HandshakeServer(Address("127.0.0.1", 0), room.start("another", 1).engine_metadata())
    ) as listener:
        wrong = RemoteEngine("prefill", LIFE, listener.address)
        asked = room.peers.get(room.me, wrong)
        right = room.peers.get(room.me, room.remote)
        room.gate.set()
        assert isinstance(asked.exception(PATIENCE_S), HandshakeError)
        assert right.result(PATIENCE_S) is room.peers.met(room.remote)
        assert room.peers.get(room.me, wrong).result(PATIENCE_S) is right.result()


class Mute:
    """Hosts that take connections and say nothing, as those that are stopped do. Each has an address of its own."""

    def __init__(self, count: int) -> None:
        self._kept = contextlib.ExitStack()
        port, self.remotes = 0, list[RemoteEngine]()
        for number in range(count):
            host = f"127.0.{1 + number // 250}.{1 + number % 250}"
            server = self._kept.enter_context(socket.create_server((host, port)))
            port = server.getsockname()[1]
            self.remotes.append(RemoteEngine(f"mute-{number}", "life", Address(host, port)))

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *_: object) -> None:
        self._kept.close()


def patient(room: Room) -> Peers:
    """Peers that wait for an hour for whoever does not answer."""
    return Peers(EndpointOptions(handshake_timeout_s=3600.0), room.clock, room.woken.set)


def test_hosts_that_never_answer_do_not_hold_up_one_that_does(room: Room) -> None:
    with Mute(2 * MAX_AT_ONCE + 10) as mute, contextlib.closing(patient(room)) as several:
        for remote in mute.remotes:
            several.get(room.me, remote)
        assert several.get(room.me, room.remote).result(PATIENCE_S).remote == room.remote
        assert len(several._client._asking) <= MAX_AT_ONCE
        assert several.met(mute.remotes[0]) is None


def test_few_engines_of_one_host_are_asked_at_once(room: Room) -> None:
    """Whether a client names its ports for loads or for leases to give back."""
    host = "127.0.9.9"
    with contextlib.ExitStack() as kept, contextlib.closing(patient(room)) as several:
        servers = [kept.enter_context(socket.create_server((host, 0))) for _ in range(MAX_PER_HOST + 3)]
        remotes = [RemoteEngine(f"m{i}", "life", Address(host, s.getsockname()[1])) for i, s in enumerate(servers)]
        remote_leases = RemoteLeases(room.me.transport, several, ResultQueue(), usual_s=5.0)
        for remote in remotes[:-1]:
            remote_leases.release(Release(remote, LEASE))
        for _ in range(5):
            remote_leases.update(room.me, room.clock())
        assert dict(several._num_of_host) == {host: MAX_PER_HOST}
        late = several.get(room.me, remotes[-1])
        assert "32 other engines that were named at 127.0.9.9 have not answered" in str(late.exception(0))
        assert several.get(room.me, remotes[-1]) is late
        assert several.get(room.me, room.remote).result(PATIENCE_S).remote == room.remote  # of another host
        remote_leases.update(room.me, room.clock())
        assert len(remote_leases._sources) == MAX_PER_HOST  # what nobody is asked for is not kept
        several.cancel(remotes[0])
        room.clock.now_s += room.peers._options.retry_s
        assert not several.get(room.me, remotes[-1]).done()


def test_an_engine_that_is_not_wanted_any_more_is_not_asked_further(room: Room) -> None:
    with Mute(1) as mute, contextlib.closing(patient(room)) as several:
        first = several.get(room.me, mute.remotes[0])
        several.cancel(mute.remotes[0])
        assert first.cancelled()
        assert (len(several._known), several.met(mute.remotes[0])) == (0, None)
        assert several.get(room.me, mute.remotes[0]) is not first
        several.get(room.me, room.remote).result(PATIENCE_S)
        several.cancel(room.remote)
        assert several.met(room.remote) is not None


def test_what_is_being_connected_is_not_cancelled(room: Room) -> None:
    peer = room.peers.get(room.me, room.remote)
    while room.peers._known[room.remote].reply is not None:
        assert room.woken.wait(0.01) or not peer.done()
    room.peers.cancel(room.remote)
    room.gate.set()
    assert peer.result(PATIENCE_S) is room.peers.met(room.remote)


def test_an_engine_may_answer_at_the_moment_when_it_is_not_wanted_any_more(room: Room) -> None:
    """The answer comes on another thread, which sets `reply` to None, between any two looks at it."""
    answered: Future[bytes] = Future()
    answered.set_result(b"")

    class Answering:
        replies: ClassVar = [answered, None]

        @property
        def reply(self) -> Future[bytes] | None:
            found: Future[bytes] | None = self.replies.pop(0)
            return found

    known = room.peers._known[room.remote] = cast(Any, Answering())
    room.peers.cancel(room.remote)
    assert room.peers._known.pop(room.remote) is known


@pytest.mark.parametrize("name", ["kvreshard-handshake", "kvreshard-compile", "kvreshard-lookup"])
def test_where_no_thread_can_be_started_an_engine_is_met_later(
    room: Room, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A process that has as many threads as it may have gets them again when others end."""
    start, refused = threading.Thread.start, [name, name]

    def start_some(thread: threading.Thread) -> None:
        if thread.name in refused:
            refused.remove(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)
    room.gate.set()
    remote = replace(room.remote, address=Address("localhost", room.remote.address.port))
    for _ in range(2):
        error = room.peers.get(room.me, remote).exception(PATIENCE_S)
        assert isinstance(error, HandshakeError)
        assert "new thread" in str(error)
        room.clock.now_s += room.peers._options.retry_s
    assert room.peers.get(room.me, remote).result(PATIENCE_S).remote == remote
    assert not room.peers._num_of_host


def test_peers_end_while_hosts_do_not_answer(room: Room) -> None:
    with Mute(3) as mute:
        several = patient(room)
        meetings = [several.get(room.me, remote) for remote in mute.remotes]
        ending = threading.Thread(target=several.close)
        ending.start()
        ending.join(PATIENCE_S)
        assert not ending.is_alive()
        assert all(
            isinstance(meeting.exception(PATIENCE_S), BaseException) for meeting in meetings if not meeting.cancelled()
        )
        assert several.get(room.me, room.remote).cancelled()


def test_a_source_that_does_not_take_the_outcome_is_read_from_all_the_same(room: Room) -> None:
    told, gate = threading.Event(), threading.Event()

    def hear(handshake_message: HandshakeMessage) -> None:
        told.set()
        assert gate.wait(PATIENCE_S)

    listener = HandshakeServer(Address("127.0.0.1", 0), room.sides[0].engine_metadata(), hear)
    remote = RemoteEngine("prefill", LIFE, listener.address)
    with contextlib.closing(listener), contextlib.closing(patient(room)) as several:
        assert several.get(room.me, remote).result(PATIENCE_S) is several.met(remote)
        assert told.wait(PATIENCE_S)
        gate.set()


def test_what_nobody_asks_for_is_forgotten_in_time(room: Room) -> None:
    room.gate.set()
    peer = room.peers.get(room.me, room.remote).result(PATIENCE_S)
    gone = RemoteEngine("gone", LIFE, room.listener.address)
    room.peers.get(room.me, gone).exception(PATIENCE_S)
    ttl_s = EndpointOptions().peer_ttl_s
    for seconds, in_use, expected in ((61.0, (), 1), (ttl_s, (peer,), 1), (61.0, (), 0)):
        room.clock.now_s += seconds
        room.peers.sweep(lambda in_use=in_use: in_use)
        assert len(room.peers._known) == expected


def test_what_a_route_warns_of_is_said_once_per_engine(room: Room, caplog: pytest.LogCaptureFixture) -> None:
    def connect(me: LocalRank, remote: RemoteEngine, engine_metadata: EngineMetadata, options: EndpointOptions) -> Peer:
        peer = connect_engine(me, remote, engine_metadata, options)
        return replace(peer, route=replace(peer.route, warnings=("field 'draft.0.k': the draft's cache is missing",)))

    room.gate.set()
    with contextlib.closing(
        Peers(EndpointOptions(handshake_timeout_s=PATIENCE_S), room.clock, room.woken.set, connect)
    ) as known:
        for _ in range(2):
            known.forget(known.get(room.me, room.remote).result(PATIENCE_S))
    said = [record.message for record in caplog.records if "draft" in record.message]
    where = f"engine prefill at {room.remote.address.host_port}"
    assert said == [f"{where}: field 'draft.0.k': the draft's cache is missing"]


def test_why_a_source_cannot_be_met_is_reported_although_it_may_be_asked_again_at_once(room: Room) -> None:
    options = EndpointOptions(handshake_timeout_s=PATIENCE_S, retry_s=0.0)
    with contextlib.closing(Peers(options, room.clock, room.woken.set, room._connect)) as peers:
        results = ResultQueue()
        remote_leases = RemoteLeases(room.me.transport, peers, results, usual_s=5.0)
        former = RemoteEngine("prefill", "former", room.listener.address)
        remote_leases.start_renewing(Renew("r", former, LEASE, asks_key=True), room.me)
        unmet: dict[str, Failure] = {}
        for _ in range(3):
            room.woken.wait(0.0 if unmet else PATIENCE_S)
            room.woken.clear()
            remote_leases.update(room.me, room.clock())
            unmet |= results.take(0.0).unmet
        assert "it has restarted" in unmet["r"].text
