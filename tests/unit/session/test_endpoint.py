"""Does an endpoint load and report as it should, with peers that are slow, wrong, stopped or gone?

Two engines of several ranks in one process: memory transports, a clock that the test turns, no threads of the endpoint's own.
"""

from __future__ import annotations

import socket
import threading
import time

import pytest
from tests.faulty_memory import Fault
from tests.pairs.small import request
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
    seal,
)

from kvreshard.model import KvReshardError, LayoutMismatch
from kvreshard.model.changed import replace
from kvreshard.session.commands import Acquire, Cancel, EndpointOptions, Load, Publish, RemoteEngine, Renew
from kvreshard.session.handshake_messages import Address, HandshakeError
from kvreshard.session.lease import FREE, Lease
from kvreshard.session.observer import LoadObserver
from kvreshard.session.peers import Peers
from kvreshard.testing.oracle import apply_request, differing_bytes, write_values

PATIENCE_S = 60.0


def test_a_load_leaves_what_the_oracle_leaves_and_frees_the_source(world: World) -> None:
    world.acquire_and_publish()
    wanted = order_load(world)
    world.turn()
    assert collect(world.dst) == (set(), {}, set())
    write_values(world.src.layout, world.dst.layout, world.src.memory, wanted, 3)
    expected = {place: content.copy() for place, content in world.dst.memory.items()}
    apply_request(world.src.layout, world.dst.layout, world.src.memory, expected, wanted)
    meet(world)
    world.turn()
    assert collect(world.dst) == ({"d"}, {}, set())
    assert differing_bytes(expected, world.dst.memory) == {}
    assert collect(world.src) == (set(), {}, {"r"})
    assert world.words() == {FREE}


def test_an_observer_that_raises_costs_no_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object) -> None:
        raise StopIteration

    monkeypatch.setattr(LoadObserver, "on_end", ended)
    world.acquire_and_publish()
    order_load(world)
    order_load(world, "stale", lease=LEASE._replace(word=LEASE.word ^ 1))
    world.turn()
    meet(world)
    for _ in range(20):
        world.turn()
        world.fabric.step()
    received, failed, _ = collect(world.dst)
    assert (received, set(failed)) == ({"d"}, {"stale"})


def test_peers_are_told_as_they_come_and_go(world: World) -> None:
    def changes() -> set[int]:
        return {endpoint.collect().peers_change for endpoint in world.dst.endpoints.values()}

    world.acquire_and_publish()
    order_load(world)
    world.turn()
    assert changes() == {0}
    meet(world)
    world.turn()
    assert changes() == {1}
    world.turn()
    assert changes() == {0}
    assert {endpoint.end().peers_change for endpoint in world.dst.endpoints.values()} == {-1}


def test_nothing_is_reported_while_a_byte_may_still_move(world: World) -> None:
    world.acquire_and_publish()
    world.faults[-1] = Fault(delay_steps=3)
    order_load(world)
    world.turn()
    meet(world)
    for _ in range(3):
        world.turn()
        assert collect(world.dst) == (set(), {}, set())
        world.fabric.step()
    for _ in range(20):  # lease words and staging batches take their own steps
        world.turn()
        world.fabric.step()
    assert collect(world.dst)[0] == {"d"}


def test_a_cancelled_load_waits_for_its_reads_and_then_fails(world: World) -> None:
    world.acquire_and_publish()
    world.faults[-1] = Fault(delay_steps=2)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Cancel("d"))
    world.turn()
    assert collect(world.dst) == (set(), {}, set())
    for _ in range(4):
        world.fabric.step()
        world.turn()
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind, failed["d"].is_quarantined) == (set(), "cancelled", False)
    assert collect(world.src)[2] == {"r"}


def test_a_request_is_not_loaded_twice_at_once(world: World) -> None:
    """What ends first would stand for both, and the engine would read or free pages that are still written."""
    world.acquire_and_publish()
    order_load(world)
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Cancel("d"))
    with pytest.raises(KvReshardError, match="request d is being loaded already"):
        order_load(world)
    meet(world)
    world.turn()
    assert set(collect(world.dst)[1]) == {"d"}
    order_load(world)  # it has ended


@pytest.mark.parametrize("fault", [Fault(), Fault(fail_after_copies=0), Fault(delay_steps=5)])
def test_what_a_load_takes_for_its_words_comes_back(world: World, fault: Fault) -> None:
    """Loaded, failed, and given up before it settled."""
    world.acquire_and_publish(ttl_s=1e6)
    world.faults[-1] = fault
    order_load(world)
    world.turn()
    meet(world)
    for seconds in (0.0, OPTIONS.load_timeout_s, OPTIONS.settle_timeout_s):
        world.clock.now_s += seconds
        world.turn()
    world.fabric.step(5)
    world.turn()
    assert [len(endpoint._scratch) for endpoint in world.dst.endpoints.values()] == [0] * len(world.dst.endpoints)
    received, failed, _ = collect(world.dst)
    assert received | set(failed) == {"d"}


def test_a_load_that_never_settles_is_quarantined_after_both_bounds(world: World) -> None:
    world.acquire_and_publish(ttl_s=1e6)
    world.faults[-1] = Fault(drop=True)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    world.clock.now_s += OPTIONS.load_timeout_s
    world.turn()
    assert collect(world.dst) == (set(), {}, set())
    world.clock.now_s += OPTIONS.settle_timeout_s
    world.turn()
    _, failed, _ = collect(world.dst)
    assert (failed["d"].kind, failed["d"].is_quarantined) == ("timeout", True)
    assert "pages are quarantined" in failed["d"].text
    assert all(len(endpoint._jobs._given_up) == 1 for endpoint in world.dst.endpoints.values())


@pytest.mark.parametrize("sizes", [(4, 2), (2, 3)])
def test_a_load_that_is_late_leaves_the_others_from_its_source_alone(sizes: tuple[int, int]) -> None:
    """Where nothing is staged: the buffer belongs to the load that may still write it."""
    world = make_world(*sizes)
    world.acquire_and_publish(ttl_s=1000.0)
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("s", SLOT + 1, WORD)))
        endpoint.submit(Publish("s", 1000.0))
    world.faults[-1] = Fault(delay_steps=10**6)
    order_load(world, "late")
    world.turn()
    meet(world)
    world.turn()
    world.clock.now_s += OPTIONS.load_timeout_s - 1.0
    world.faults[-1] = Fault(delay_steps=2)
    order_load(world, "slow", lease=Lease("s", SLOT + 1, WORD))
    world.turn()
    for seconds in (1.0, OPTIONS.settle_timeout_s):
        world.clock.now_s += seconds
        world.turn()
    meet(world)  # its source is asked, and there
    for _ in range(30):
        world.fabric.step()
        world.turn()
    received, failed, _ = collect(world.dst)
    assert (received, {name: failure.kind for name, failure in failed.items()}) == ({"slow"}, {"late": "timeout"})
    world.close()


def test_what_was_quarantined_is_told_when_it_has_settled_after_all(world: World) -> None:
    world.acquire_and_publish(ttl_s=1e6)
    world.faults[-1] = Fault(delay_steps=1)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    for seconds in (OPTIONS.load_timeout_s, OPTIONS.settle_timeout_s):
        world.clock.now_s += seconds
        world.turn()
    results = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    assert all(result.failed["d"].is_quarantined and not result.settled for result in results)
    world.fabric.step()
    world.turn()
    assert [endpoint.collect().settled for endpoint in world.dst.endpoints.values()] == [{"d"}] * len(results)
    assert all(len(endpoint._jobs._given_up) == 0 for endpoint in world.dst.endpoints.values())


def test_a_failed_read_fails_the_request_and_the_source_hears_of_it(world: World) -> None:
    world.acquire_and_publish()
    world.faults[0] = Fault(fail_after_copies=1)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind) == (set(), "transfer")
    assert collect(world.src)[2] == {"r"}


def test_a_lease_that_ended_fails_the_load(world: World) -> None:
    world.acquire_and_publish()
    world.turn()
    for table in world.src.tables.values():
        table[SLOT] = WORD + 1
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == "stale lease"
    assert "its word is 0xabd, expected 0xabc" in failed["d"].text


def test_a_lease_that_ends_while_its_pages_are_read_fails_the_load(world: World) -> None:
    """Every read takes three steps, and the word changes between the first and the second of them: it is read after the data."""
    world.acquire_and_publish()
    world.faults[-1] = Fault(delay_steps=3)
    order_load(world)
    world.turn()
    meet(world)
    for step in range(20):
        if step == 4:
            for table in world.src.tables.values():
                table[SLOT] = WORD + 1
        world.turn()
        world.fabric.step()
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind) == (set(), "stale lease")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (HandshakeError("nobody there"), "handshake"),
        (LayoutMismatch("fields differ"), "mismatch"),
        (RuntimeError("surprise"), "fault"),
    ],
)
def test_a_meeting_that_fails_fails_the_load_with_its_reason(world: World, error: Exception, kind: str) -> None:
    world.meeting_error.append(error)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == kind
    assert str(error) in failed["d"].text


def test_a_meeting_that_takes_too_long_fails_the_load(world: World) -> None:
    order_load(world)
    world.turn()
    world.clock.now_s += OPTIONS.load_timeout_s
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == "timeout"
    assert "meeting its source" in failed["d"].text


def test_a_request_that_cannot_be_bound_fails_before_anything_moves(world: World) -> None:
    world.acquire_and_publish()
    wanted = request(world.src.layout, world.dst.layout, 21, src_pages=[1, 2, 3, 4, 5, 99])
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load("d", REMOTE, LEASE, wanted, seal(wanted), gives_back=True))
    before = {place: content.copy() for place, content in world.dst.memory.items()}
    world.turn()
    meet(world)
    world.turn()
    _, failed, _ = collect(world.dst)
    assert failed["d"].kind == "request"
    assert "99" in failed["d"].text
    assert differing_bytes(before, world.dst.memory) == {}


def test_a_slot_that_the_source_does_not_have_is_refused(world: World) -> None:
    wanted, lease = request(world.src.layout, world.dst.layout, 21), Lease("r", 64, WORD)
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load("d", REMOTE, lease, wanted, seal(wanted, lease), gives_back=True))
    world.turn()
    meet(world)
    world.turn()
    assert "lease slot 64, but rank" in collect(world.dst)[1]["d"].text


def test_one_request_that_fails_leaves_the_others_alone(world: World) -> None:
    world.acquire_and_publish(ttl_s=1e6)
    for name in ("a", "b", "c"):
        wanted = request(world.src.layout, world.dst.layout, 21, src_pages=[1, 2, 3, 4, 5, 99 if name == "b" else 6])
        for endpoint in world.dst.endpoints.values():
            endpoint.submit(Load(name, REMOTE, LEASE, wanted, seal(wanted), gives_back=True))
    world.turn()
    meet(world)
    world.turn()
    received, failed, _ = collect(world.dst)
    assert (received, set(failed)) == ({"a", "c"}, {"b"})


def test_the_engines_thread_may_wait_for_a_load_and_sees_it_end(world: World) -> None:
    """With a thread per endpoint, as in an engine; one that did not know of the load would come back with nothing."""
    world.acquire_and_publish()
    for endpoint in (*world.src.endpoints.values(), *world.dst.endpoints.values()):
        endpoint.start()
    order_load(world)
    deadline_s = time.monotonic() + 10.0
    while len(world.met) < len(world.dst.endpoints):
        assert time.monotonic() < deadline_s
    threading.Timer(0.05, meet, (world,)).start()
    for endpoint in world.dst.endpoints.values():
        assert endpoint.collect(patience_s=10.0).received.keys() == {"d"}


def test_a_source_that_cannot_be_told_takes_no_request_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that goes wrong with it: without its end, the request would hang."""
    world.acquire_and_publish()
    for endpoint in world.dst.endpoints.values():

        def refuse(*_: object, **__: object) -> None:
            raise RuntimeError("a surprise")

        monkeypatch.setattr(endpoint._remote_leases, "end", refuse)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    assert collect(world.dst)[0] == {"d"}


def test_a_rank_that_reads_nothing_needs_no_lease(world: World) -> None:
    """Its word proves pages that were read; what waits for nothing else must not fail for it."""
    wanted = request(world.src.layout, world.dst.layout, 21)
    empty = replace(wanted, intervals={name: [] for name in wanted.intervals})
    for endpoint in world.dst.endpoints.values():
        endpoint.submit(Load("d", REMOTE, LEASE, empty, seal(empty), gives_back=True))
    world.turn()
    meet(world)
    world.turn()
    assert collect(world.dst)[:2] == ({"d"}, {})


def test_a_transport_that_was_closed_under_it_fails_the_loads(world: World) -> None:
    world.acquire_and_publish()
    world.faults[-1] = Fault(delay_steps=3)
    order_load(world)
    world.turn()
    meet(world)
    world.turn()
    for transport in world.dst.transports.values():
        transport.close()
    world.dst.turn()
    received, failed, _ = collect(world.dst)
    assert (received, failed["d"].kind, failed["d"].is_quarantined) == (set(), "transfer", False)
    assert "was closed while this transfer was pending" in failed["d"].text


def test_an_endpoint_ends_while_a_source_does_not_answer(world: World) -> None:
    endpoint = world.dst.endpoints[0]
    with socket.create_server(("127.0.0.1", 0)) as mute:
        remote = RemoteEngine("mute", "life", Address("127.0.0.1", mute.getsockname()[1]))
        peers = Peers(EndpointOptions(handshake_timeout_s=3600.0), world.clock, endpoint.wake)
        endpoint._peers = endpoint._remote_leases._peers = peers
        endpoint.start()
        endpoint.submit(Renew("d", remote, LEASE))
        while not len(peers._client._asking):
            time.sleep(0.001)
        ending = threading.Thread(target=endpoint.close)
        ending.start()
        ending.join(PATIENCE_S)
        assert not ending.is_alive()


def test_before_the_memory_goes_loads_have_failed_and_every_word_is_cleared(world: World) -> None:
    """What has not been collected is told, and a thread that is busy with the memory keeps it."""
    world.acquire_and_publish()
    world.src.turn()
    assert world.words() == {WORD}
    order_load(world)
    world.dst.turn()
    (failed,) = world.dst.endpoints[0].end().failed.values()
    assert "put to sleep" in failed.text
    for endpoint in world.src.endpoints.values():
        assert endpoint.end().freed == {"r": "revoked"}
    assert world.words() == {0}


def test_leases_end_before_the_memory_goes_though_the_session_has_not_heard_of_them(world: World) -> None:
    """Else the engine would wait for ever for the end of a request that it published a moment before."""
    world.acquire_and_publish("published")
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Acquire(Lease("computing", SLOT + 1, WORD)))
        assert endpoint.end().freed == {"published": "revoked"}
    assert world.words() == {table[SLOT + 1] for table in world.src.tables.values()} == {0}


def test_requests_that_are_published_after_a_session_has_ended_are_freed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that could not be put to sleep goes on: it must not keep the blocks of each further prefill."""
    endpoint, is_over = world.src.endpoints[0], threading.Event()
    world.acquire_and_publish("before")
    world.src.turn()
    monkeypatch.setattr("kvreshard.session.endpoint.END_S", 0.05)
    monkeypatch.setattr(endpoint, "_turn", lambda: is_over.wait(PATIENCE_S) or 1.0)
    endpoint.start()
    with pytest.raises(KvReshardError, match="memory of the caches must stay"):
        endpoint.end()
    assert endpoint.collect().freed == {}
    is_over.set()
    assert endpoint._thread is not None
    endpoint._thread.join(PATIENCE_S)
    assert endpoint.collect().freed == {"before": "revoked"}
    for command in (Acquire(Lease("later", SLOT + 1, WORD)), Publish("later", 30.0)):
        endpoint.submit(command)
    assert endpoint.collect().freed == {"later": "revoked"}
    assert world.src.tables[0][SLOT + 1] == FREE


def test_a_session_that_is_busy_does_not_give_its_memory_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, is_over = world.dst.endpoints[0], threading.Event()
    monkeypatch.setattr("kvreshard.session.endpoint.END_S", 0.05)
    monkeypatch.setattr(endpoint, "_turn", lambda: is_over.wait(30) or 1.0)
    order_load(world)
    endpoint.start()
    time.sleep(0.02)
    with pytest.raises(KvReshardError, match="memory of the caches must stay"):
        endpoint.end()
    is_over.set()
    for is_quarantined, later in (
        (True, "e"),
        (False, "f"),
    ):  # what was under way may still be written, what comes later is not begun
        (failed,) = endpoint.collect().failed.values()
        assert (failed.kind, failed.is_quarantined) == ("fault", is_quarantined)
        assert "restart the engine" in failed.text
        order_load(world, name=later)
