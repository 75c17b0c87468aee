"""Does what happens to one request, lease or source cost more where there are many others? Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.faulty_memory import Fault
from tests.unit.session.world import LEASE, OPTIONS, REMOTE, Clock, World, make_world, meet, order_load, seal
from tests.work import count_bytecodes

from kvreshard.model.tables import Request
from kvreshard.session.commands import Acquire, Cancel, Load, Publish, Release, RemoteEngine, Renew, StopRenewing
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease
from kvreshard.session.mover import Scratch
from kvreshard.session.peer import LocalRank, Peer
from kvreshard.session.peers import Peers, _PeerEntry
from kvreshard.session.remote_leases import RemoteLeases
from kvreshard.session.results import ResultQueue

FEW, MANY = 10, 1000
NOTHING = Request({}, {}, {}, {})


@pytest.fixture
def make() -> Iterator[Callable[[], World]]:
    worlds: list[World] = []

    def make() -> World:
        worlds.append(make_world(1, 1))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def of(number: int) -> Lease:
    return Lease(f"r{number}", number, number + 1)


def introduced(world: World) -> tuple[RemoteLeases, LocalRank]:
    endpoint = world.dst.endpoints[0]
    assert endpoint._me is not None
    endpoint._peers.get(endpoint._me, REMOTE)
    meet(world)
    return endpoint._remote_leases, endpoint._me


def assert_flat(cost: Callable[[int], int]) -> None:
    few, many = cost(FEW), cost(MANY)
    assert many <= 1.2 * few + 20, f"{few} bytecodes among {FEW}, {many} among {MANY}"


def test_a_turn_of_a_source_costs_the_same_whatever_it_offers(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        endpoint = make().src.endpoints[0]
        for number in range(count):
            endpoint.submit(Acquire(Lease(f"r{number}", number % 64, number + 1)))
            endpoint.submit(Publish(f"r{number}", 30.0))
        endpoint.turn()
        assert len(endpoint._own.book) == count
        return count_bytecodes(endpoint.turn)

    assert_flat(cost)


def end(remote_leases: RemoteLeases, me: LocalRank) -> None:
    load = Load("new", REMOTE, LEASE, NOTHING, seal(NOTHING), gives_back=True)
    remote_leases.begin(load)
    remote_leases.end(me, load, None, is_good=True, kept_as=None)


@pytest.mark.parametrize(
    "act",
    [
        lambda remote_leases, me: remote_leases.release(Release(REMOTE, LEASE)),
        lambda remote_leases, me: remote_leases.stop_renewing("w0"),
        lambda remote_leases, me: remote_leases.start_renewing(Renew("new", REMOTE, LEASE), me),
        end,
    ],
    ids=["release", "stop renewing", "start renewing", "a load ends"],
)
def test_what_happens_to_one_request_costs_the_same_whatever_others_wait(
    make: Callable[[], World], act: Callable[[RemoteLeases, LocalRank], None]
) -> None:
    def cost(count: int) -> int:
        world = make()
        remote_leases, me = introduced(world)
        peer = world.dst.endpoints[0]._peers.met(REMOTE)
        for number in range(count):
            remote_leases.start_renewing(Renew(f"w{number}", REMOTE, of(number)), me)
            kept = Load(f"k{number}", REMOTE, of(count + number), NOTHING, seal(NOTHING), gives_back=False)
            remote_leases.begin(kept)
            remote_leases.end(me, kept, peer, is_good=True, kept_as=kept.lease)
        remote_leases.update(me, 100.0)
        return count_bytecodes(lambda: (act(remote_leases, me), remote_leases.update(me, 100.0)))

    assert_flat(cost)


class Silent:
    """A transport that only counts what is said."""

    def __init__(self) -> None:
        self.num_told = 0

    def notify(self, peer: str, payload: bytes) -> None:
        self.num_told += 1


def many_sources(world: World, count: int) -> tuple[RemoteLeases, LocalRank, Silent, Clock]:
    """A remote_leases that waits for one request of each of so many sources, all of which are met."""
    _, me = introduced(world)
    base = world.dst.endpoints[0]._peers.met(REMOTE)
    assert base is not None
    clock, transport = Clock(), Silent()
    peers = Peers(OPTIONS, clock, lambda: None)
    remote_leases = RemoteLeases(transport, peers, ResultQueue(), 5.0)  # type: ignore[arg-type]
    for number in range(count):
        remote = RemoteEngine(f"e{number}", "life", Address("10.0.0.1", number))
        known = _PeerEntry(0.0, 0.0)
        engine_metadata = msgspec.structs.replace(base.engine_metadata, lease_s=30.0)
        known.peer.set_result(Peer(remote, engine_metadata, base.layout, base.route, base.mover))
        peers._known[remote] = known
        peers._note_met(remote)
        remote_leases.start_renewing(Renew(f"w{number}", remote, of(number)), me)
        remote_leases.update(me, clock.now_s)
        remote_leases.renew(me, clock.now_s + 5.0 * number / count)
    return remote_leases, me, transport, clock


def test_telling_one_source_costs_the_same_whatever_others_are_known(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        remote_leases, me, transport, clock = many_sources(make(), count)
        before = transport.num_told
        spent = count_bytecodes(lambda: remote_leases.renew(me, clock.now_s + 5.0))
        assert transport.num_told == before + 1
        return spent

    assert_flat(cost)


def test_a_turn_in_which_no_source_is_due_costs_the_same_whatever_others_are_known(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        remote_leases, me, transport, clock = many_sources(make(), count)
        before = transport.num_told
        spent = count_bytecodes(
            lambda: (remote_leases.update(me, clock.now_s), remote_leases.renew(me, clock.now_s + 4.999))
        )
        assert transport.num_told == before
        return spent

    assert_flat(cost)


def test_asking_for_an_engine_that_is_known_costs_the_same_whatever_others_are(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        remote_leases, me, _, _ = many_sources(make(), count)
        remote = RemoteEngine("e1", "life", Address("another", 1))
        return count_bytecodes(lambda: (remote_leases._peers.get(me, remote), remote_leases._peers.met(remote)))

    assert_flat(cost)


def test_the_orders_of_one_request_cost_the_same_whatever_others_wait(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        world = make()
        introduced(world)
        endpoint = world.dst.endpoints[0]
        for number in range(count):
            endpoint.submit(Renew(f"w{number}", REMOTE, of(number)))
        endpoint.turn()
        world.clock.now_s += 1.0
        endpoint.submit(StopRenewing("w1"))
        endpoint.submit(Release(REMOTE, of(1)))
        return count_bytecodes(endpoint.turn)

    assert_flat(cost)


def test_a_turn_costs_the_same_whatever_others_are_loaded(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        world = make()
        world.acquire_and_publish()
        world.turn()
        introduced(world)
        endpoint = world.dst.endpoints[0]
        world.faults[-1] = Fault(drop=True)
        for number in range(count):
            order_load(world, f"d{number}")
        endpoint.turn()
        endpoint.turn()
        assert len(endpoint._jobs) == count
        idle = count_bytecodes(endpoint.turn)
        endpoint.submit(Cancel("d5"))
        return idle + count_bytecodes(endpoint.turn)

    assert_flat(cost)


def test_a_place_for_words_costs_the_same_whatever_others_are_taken() -> None:
    def cost(count: int) -> int:
        scratch = Scratch(4 * MANY)
        taken = [scratch.take(2) or 0 for _ in range(count)]
        return count_bytecodes(lambda: (scratch.give(taken[3]), scratch.take(2), scratch.take(1)))

    assert_flat(cost)
