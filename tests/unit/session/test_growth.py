"""Does what happens to one request, lease or source cost more where there are many others? Counted, not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future

import msgspec
import pytest
from tests.unit.session.world import LEASE, OPTIONS, REMOTE, Clock, World, make_world, meet, order_load, seal
from tests.work import count_bytecodes

from kvreshard.model.tables import Request
from kvreshard.session.handshake import Address
from kvreshard.session.holder import LeaseHolder
from kvreshard.session.orders import Cancel, Grant, Load, Offer, Release, RemoteEngine, RemoteLease, Unwatch, Watch
from kvreshard.session.peer import Peer, Self
from kvreshard.session.peers import Peers
from kvreshard.session.scratch import Scratch
from kvreshard.transport.memory import Fault

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


def of(number: int) -> RemoteLease:
    return RemoteLease(f"r{number}", number, number + 1)


def introduced(world: World) -> tuple[LeaseHolder, Self]:
    endpoint = world.dst.endpoints[0]
    assert endpoint._me is not None
    endpoint._peers.get(endpoint._me, REMOTE)
    meet(world)
    return endpoint._holder, endpoint._me


def assert_flat(cost: Callable[[int], int]) -> None:
    few, many = cost(FEW), cost(MANY)
    assert many <= 1.2 * few + 20, f"{few} bytecodes among {FEW}, {many} among {MANY}"


def test_a_turn_of_a_source_costs_the_same_whatever_it_offers(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        endpoint = make().src.endpoints[0]
        for number in range(count):
            endpoint.submit(Grant(f"r{number}", number % 64, number + 1))
            endpoint.submit(Offer(f"r{number}", 30.0))
        endpoint.turn()
        assert endpoint.num_leases == count
        return count_bytecodes(endpoint.turn)

    assert_flat(cost)


def end(holder: LeaseHolder, me: Self) -> None:
    load = Load("new", REMOTE, LEASE, NOTHING, seal(NOTHING), gives_back=True)
    holder.begin(load)
    holder.end(me, load, None, is_good=True, is_kept=False)


@pytest.mark.parametrize(
    "act",
    [
        lambda holder, me: holder.release(Release(REMOTE, LEASE)),
        lambda holder, me: holder.cancel("k0"),
        lambda holder, me: holder.unwatch("w0"),
        lambda holder, me: holder.watch(Watch("new", REMOTE, LEASE), me),
        end,
    ],
    ids=["release", "cancel", "unwatch", "watch", "a load ends"],
)
def test_what_happens_to_one_request_costs_the_same_whatever_others_wait(
    make: Callable[[], World], act: Callable[[LeaseHolder, Self], None]
) -> None:
    def cost(count: int) -> int:
        world = make()
        holder, me = introduced(world)
        peer = world.dst.endpoints[0]._peers.met(REMOTE)
        for number in range(count):
            holder.watch(Watch(f"w{number}", REMOTE, of(number)), me)
            kept = Load(f"k{number}", REMOTE, of(count + number), NOTHING, seal(NOTHING), gives_back=False)
            holder.begin(kept)
            holder.end(me, kept, peer, is_good=True, is_kept=True)
        holder.send_releases(me, 100.0)
        return count_bytecodes(lambda: (act(holder, me), holder.send_releases(me, 100.0)))

    assert_flat(cost)


class Silent:
    """A transport that only counts what is said."""

    def __init__(self) -> None:
        self.num_told = 0

    def notify(self, peer: str, payload: bytes) -> None:
        self.num_told += 1


def many_sources(world: World, count: int) -> tuple[LeaseHolder, Self, Silent, Clock]:
    """A holder that waits for one request of each of so many sources, all of which are met."""
    _, me = introduced(world)
    base = world.dst.endpoints[0]._peers.met(REMOTE)
    assert base is not None
    clock, transport = Clock(), Silent()
    peers = Peers(OPTIONS, clock, lambda: None)
    holder = LeaseHolder(transport, peers, 5.0)  # type: ignore[arg-type]
    for number in range(count):
        remote = RemoteEngine(f"e{number}", "life", Address("10.0.0.1", number))
        known: Future[Peer] = Future()
        card = msgspec.structs.replace(base.card, lease_s=30.0)
        known.set_result(Peer(remote, card, base.layout, base.route, base.mover))
        peers._known[remote] = known
        peers._note_met(remote)
        holder.watch(Watch(f"w{number}", remote, of(number)), me)
        holder.send_releases(me, clock.now_s)
        holder.renew(me, clock.now_s + 5.0 * number / count)
    return holder, me, transport, clock


def test_telling_one_source_costs_the_same_whatever_others_are_known(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        holder, me, transport, clock = many_sources(make(), count)
        before = transport.num_told
        spent = count_bytecodes(lambda: holder.renew(me, clock.now_s + 5.0))
        assert transport.num_told == before + 1
        return spent

    assert_flat(cost)


def test_a_turn_in_which_no_source_is_due_costs_the_same_whatever_others_are_known(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        holder, me, transport, clock = many_sources(make(), count)
        before = transport.num_told
        spent = count_bytecodes(lambda: (holder.send_releases(me, clock.now_s), holder.renew(me, clock.now_s + 4.999)))
        assert transport.num_told == before
        return spent

    assert_flat(cost)


def test_asking_for_an_engine_that_is_known_costs_the_same_whatever_others_are(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        holder, me, _, _ = many_sources(make(), count)
        remote = RemoteEngine("e1", "life", Address("another", 1))
        return count_bytecodes(lambda: (holder._peers.get(me, remote), holder._peers.met(remote)))

    assert_flat(cost)


def test_the_orders_of_one_request_cost_the_same_whatever_others_wait(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        world = make()
        introduced(world)
        endpoint = world.dst.endpoints[0]
        for number in range(count):
            endpoint.submit(Watch(f"w{number}", REMOTE, of(number)))
        endpoint.turn()
        world.clock.now_s += 1.0
        endpoint.submit(Unwatch("w1"))
        endpoint.submit(Release(REMOTE, of(1)))
        return count_bytecodes(endpoint.turn)

    assert_flat(cost)


def test_a_turn_costs_the_same_whatever_others_are_loaded(make: Callable[[], World]) -> None:
    def cost(count: int) -> int:
        world = make()
        world.grant_and_offer()
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
