"""Is a wrong byte found, whoever made it, and does a comparison that cannot be made fail the load in time?"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.faulty_memory import Fault
from tests.pairs.small import request
from tests.unit.session.world import HOST, LEASE, OPTIONS, REMOTE, SLOT, WORD, World, make_world, meet, order_load, seal

from kvreshard.session.commands import Failure, Load, Revoke
from kvreshard.session.engine_metadata import MAILBOX_ENTRY_BYTES
from kvreshard.session.lease import Lease
from kvreshard.session.notes import VERSION
from kvreshard.testing.oracle import apply_request, differing_bytes, write_values
from kvreshard.tools import digest_check, digest_request, digest_server
from kvreshard.tools.digest_request import DigestRequest, write_request
from kvreshard.tools.mailbox import DigestAnswer, DigestMailbox, Status, entry_offset, read_answer
from kvreshard.tools.observer import ObserverOptions
from kvreshard.transport.local import HostMemory, LocalMemory

CHECKED = ObserverOptions(digest_share=1.0, digest_timeout_s=20.0)
FIELDS = ("layers.0.k",)


@pytest.fixture(params=[(1, 2), (4, 2), (2, 3)], ids=lambda sizes: f"{sizes[0]}->{sizes[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = make_world(*request.param, watched=CHECKED)
    yield made
    made.close()


def results(world: World) -> tuple[set[str], set[str], list[Failure]]:
    """(received on every rank, how the comparisons ended, failures of any rank), since the last call."""
    found = [endpoint.collect() for endpoint in world.dst.endpoints.values()]
    received = set.intersection(*(set(r.received) for r in found))
    return received, {c for r in found for c in r.checks.values()}, [f for r in found for f in r.failed.values()]


def load(world: World, times: int = 12) -> None:
    world.acquire_and_publish()
    wanted = order_load(world)
    write_values(world.src.layout, world.dst.layout, world.src.memory, wanted, 3)
    world.turn()
    meet(world)
    world.turn(times)


def before_the_check(monkeypatch: pytest.MonkeyPatch, what: Callable[[], None]) -> None:
    """Do something once, when the last byte has arrived and nothing has been asked yet."""
    real, done = digest_check.make_requests, list[int]()

    def made(*args: object, **more: object) -> object:
        if not done:
            done.append(1)
            what()
        return real(*args, **more)

    monkeypatch.setattr(digest_check, "make_requests", made)


def test_an_honest_load_is_equal_and_leaves_what_the_oracle_leaves(world: World) -> None:
    world.acquire_and_publish()
    wanted = order_load(world)
    write_values(world.src.layout, world.dst.layout, world.src.memory, wanted, 3)
    expected = {place: content.copy() for place, content in world.dst.memory.items()}
    apply_request(world.src.layout, world.dst.layout, world.src.memory, expected, wanted)
    world.turn()
    meet(world)
    world.turn(12)
    assert results(world) == ({"d"}, {"equal"}, [])
    assert differing_bytes(expected, world.dst.memory) == {}
    assert world.words() == {0}


def test_many_small_requests_say_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_request, "REQUEST_BYTES", 32)
    load(world, 100)
    world.clock.now_s += digest_check.RESEND_S  # two readers may have met at one place of the mailbox
    world.turn(100)
    assert results(world) == ({"d"}, {"equal"}, [])
    assert sum(observer.server.num_answered for observer in world.src.observers.values()) > 2 * digest_check.WINDOW


@pytest.mark.parametrize("number", [0, 3, 17])
def test_a_byte_that_flips_on_its_way_fails_the_load(world: World, number: int) -> None:
    world.faults[0] = Fault(corrupt_byte=number)
    load(world)
    received, checks, failures = results(world)
    assert (received, "different" in checks) == (set(), True)
    assert {failure.kind for failure in failures} == {"digest"}
    assert "wrong bytes: field 'layers." in failures[0].text
    assert "the source has" in failures[0].text


def test_pages_that_are_swapped_at_the_destination_fail_the_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def swap() -> None:
        rank = world.dst.layout.ranks[0]
        slab, memory = rank.slabs[0], world.dst.memory[rank.rank, rank.slabs[0].region]
        pages = [memory[slab.offset_bytes + page * slab.page_stride_bytes :][: slab.page_bytes] for page in (2, 3)]
        pages[0][:], pages[1][:] = pages[1].copy(), pages[0].copy()

    before_the_check(monkeypatch, swap)
    load(world)
    assert {failure.kind for failure in results(world)[2]} == {"digest"}


def test_a_source_that_is_gone_fails_the_load_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.acquire_and_publish()
    world.turn()
    order_load(world)
    world.dst.turn()
    meet(world)
    for _ in range(4):
        world.dst.turn()
        assert results(world) == (set(), set(), [])
        world.clock.now_s += CHECKED.digest_timeout_s / 4
    world.dst.turn()
    received, checks, failures = results(world)
    assert (received, checks, {failure.kind for failure in failures}) == (set(), {"unanswered"}, {"digest"})
    assert "the source has not sent the digest of field" in failures[0].text
    assert "within 20 s" in failures[0].text


def test_a_lost_request_is_asked_again(world: World) -> None:
    world.acquire_and_publish()
    world.turn()
    order_load(world)
    world.dst.turn()
    meet(world)
    world.dst.turn()
    for transport in world.src.transports.values():
        transport.notifications()  # lost
    world.clock.now_s += digest_check.RESEND_S
    world.turn(12)
    assert results(world) == ({"d"}, {"equal"}, [])


def test_a_lease_that_ends_before_the_answer_fails_the_load(world: World) -> None:
    world.acquire_and_publish()
    world.turn()
    order_load(world)
    world.dst.turn()
    meet(world)
    world.dst.turn()
    for endpoint in world.src.endpoints.values():
        endpoint.submit(Revoke(Lease("r", SLOT, WORD)))
    world.turn(6)
    _, checks, failures = results(world)
    assert (checks, {failure.kind for failure in failures}) == ({"refused"}, {"digest"})
    assert "no longer keeps the request's pages" in failures[0].text


class DeviceMemory(HostMemory):
    """Memory of a device that can be read."""

    def reaches(self, device: str) -> bool:
        return device == "cuda:0"


READ, UNREAD = ("cuda:0", DeviceMemory()), ("cuda:0", HostMemory())


@pytest.mark.parametrize("local", [(READ, READ), (READ, HOST), (HOST, READ)], ids=["both", "source", "destination"])
def test_device_memory_is_compared(local: tuple[tuple[str, LocalMemory], tuple[str, LocalMemory]]) -> None:
    world = make_world(2, 3, watched=CHECKED, local=local)
    load(world)
    assert results(world) == ({"d"}, {"equal"}, [])
    world.close()


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ((UNREAD, HOST), "source rank 1 cannot read its own memory"),
        ((HOST, UNREAD), "rank 1 here cannot read its own memory on cuda:0"),
    ],
    ids=["source", "destination"],
)
def test_memory_that_cannot_be_read_is_skipped_and_told_once(
    local: tuple[tuple[str, LocalMemory], tuple[str, LocalMemory]], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(2, 2, watched=CHECKED, local=local)
    for name in ("a", "b"):
        wanted = request(world.src.layout, world.dst.layout, 21)
        for endpoint in world.dst.endpoints.values():
            endpoint.submit(Load(name, REMOTE, LEASE, wanted, seal(wanted), gives_back=True))
    world.acquire_and_publish()
    world.turn()
    meet(world)
    world.turn(12)
    assert results(world) == ({"a", "b"}, {"skipped"}, [])
    told = [r.message for r in caplog.records if "digest not available" in r.message]
    assert len(told) == len(set(told)) > 0
    assert any(words in text for text in told)
    world.close()


def test_a_source_without_a_mailbox_is_skipped() -> None:
    world = make_world(1, 1, watched=CHECKED)
    engine_metadata = world.src.engine_metadata()
    ranks = {r.rank: msgspec.structs.replace(r, mailbox_entries=0) for r in engine_metadata.ranks}
    mine, (endpoint,) = world.dst.layout.ranks[0], world.dst.endpoints.values()
    meet_first = order_load(world)
    world.turn()
    meet(world)
    route = next(iter(endpoint._jobs)).handshake.result().route
    assert meet_first is not None
    told = digest_check.find_obstacle(route, world.src.layout, ranks, mine, endpoint._memory)
    assert "rank 0 of engine 'prefill' answers no digest requests" in told
    world.close()


def test_a_load_that_is_late_says_that_it_was_being_compared() -> None:
    world = make_world(1, 1, watched=dataclasses.replace(CHECKED, digest_timeout_s=1e6))
    world.acquire_and_publish()
    world.turn()
    order_load(world)
    world.dst.turn()
    meet(world)
    world.dst.turn()
    world.clock.now_s += OPTIONS.load_timeout_s
    world.dst.turn()
    (failure,) = results(world)[2]
    assert (failure.kind, "it was being compared with its source" in failure.text) == ("timeout", True)
    world.close()


def test_a_source_that_takes_its_time_is_not_asked_without_rest(world: World) -> None:
    """Each look at its mailbox is a read, and nothing is kept of those that are over."""
    world.acquire_and_publish()
    world.src.turn()
    order_load(world)
    world.dst.turn()
    meet(world)
    world.dst.turn(10)
    for endpoint in world.dst.endpoints.values():
        (job,) = endpoint._jobs
        for _ in range(200):
            endpoint.turn()
        assert len(job._posted) < 20
        assert not endpoint._event.is_set(), "a session that comes back at once has no rest"
    world.turn(20)
    assert results(world) == ({"d"}, {"equal"}, [])


def test_nobody_is_asked_without_a_share() -> None:
    world = make_world(1, 2)
    load(world)
    assert results(world) == ({"d"}, set(), [])
    assert [observer.server.num_answered for observer in world.src.observers.values()] == [0]
    world.close()


def test_a_share_is_a_share_and_the_same_everywhere() -> None:
    names = [f"cmpl-{number}" for number in range(4000)]
    chosen = [name for name in names if digest_check.is_chosen(name, 0.25)]
    assert 900 < len(chosen) < 1100
    assert set(chosen) <= {name for name in names if digest_check.is_chosen(name, 0.5)}


GOOD = DigestRequest(
    VERSION, "r", WORD, 7, b"key", FIELDS, (((0, None, None),), ((0, 2, None),), ((0, 8, None),)), ((0, 4),)
)


def hostile(**changes: object) -> DigestRequest:
    return msgspec.structs.replace(GOOD, **changes)


def status_of(world: World, asked: DigestRequest) -> Status:
    """What the source's rank 0 says to a question that came over the transport."""
    endpoint, transport = world.src.endpoints[0], world.dst.transports[0]
    if "src" not in transport._peers:
        transport.add_peer("src", world.src.transports[0].metadata())
    transport.notify("src", write_request(asked))
    endpoint.turn()
    mailbox = world.src.observers[0].mailbox
    answer = read_answer(mailbox.region.address + entry_offset(asked.token, len(mailbox)), asked.token)
    assert answer is not None
    return answer.status


@pytest.fixture
def source() -> Iterator[World]:
    made = make_world(1, 1, watched=CHECKED)
    made.acquire_and_publish()
    made.turn()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (GOOD, Status.DIGEST),
        (hostile(word=WORD + 1), Status.NO_LEASE),
        (hostile(request="another"), Status.NO_LEASE),
        (hostile(key=b""), Status.MALFORMED),
        (hostile(key=b"k" * 65), Status.MALFORMED),
        (hostile(fields=()), Status.MALFORMED),
        (hostile(fields=("nobody",)), Status.MALFORMED),
        (hostile(fields=FIELDS * 4000), Status.DIGEST),
        (hostile(within=()), Status.MALFORMED),
        (hostile(within=(((0, None, None),) * 9, (), ())), Status.MALFORMED),
        (hostile(within=((), ((5, 3, None),), ())), Status.MALFORMED),
        (hostile(within=((), ((0, 2, 0),), ())), Status.MALFORMED),
        (hostile(within=((), ((1 << 40, None, None),), ())), Status.MALFORMED),
        (hostile(intervals=()), Status.MALFORMED),
        (hostile(intervals=((4, 0),)), Status.MALFORMED),
        (hostile(intervals=((0, 1 << 48),)), Status.MALFORMED),
        (hostile(intervals=((0, 1 << 22),)), Status.MALFORMED),
        (hostile(intervals=tuple((2 * i, 2 * i + 1) for i in range(2000))), Status.MALFORMED),
        (hostile(intervals=((3, 9),)), Status.DIGEST),
        (hostile(intervals=((3, 22),)), Status.MALFORMED),
    ],
)
def test_a_hostile_request_is_answered_with_a_word(source: World, asked: DigestRequest, expected: Status) -> None:
    assert status_of(source, asked) is expected


numbers = st.one_of(st.integers(0, 40), st.integers(0, 1 << 48))
owned = st.tuples(numbers, st.none() | numbers, st.none() | numbers)


@given(
    asked=st.builds(
        DigestRequest,
        st.just(VERSION),
        st.just("r"),
        st.just(WORD),
        st.integers(0, 2**64 - 1),
        st.binary(max_size=70),
        st.lists(st.sampled_from([*FIELDS, "layers.1.v", "x"]), max_size=3).map(tuple),
        st.lists(st.lists(owned, max_size=3).map(tuple), max_size=4).map(tuple),
        st.lists(st.tuples(numbers, numbers), max_size=3).map(tuple),
    )
)
def test_any_request_gets_a_word_and_never_a_fault(asked: DigestRequest) -> None:
    world = make_world(1, 1, watched=CHECKED)
    world.acquire_and_publish()
    world.turn(1)
    assert status_of(world, asked) in (Status.DIGEST, Status.MALFORMED)
    world.close()


def test_a_flood_of_requests_is_answered_a_bounded_number_at_a_turn(
    source: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, leases = source.src.observers[0].server, source.src.endpoints[0]._own.book
    monkeypatch.setattr(digest_server, "WORK_S", 0.0)
    monkeypatch.setattr(digest_server, "MAX_WAITING", 10)
    for token in range(100):
        server.take(hostile(token=token), leases)
        server.take(hostile(token=token), leases)
    assert len(server) == 10
    assert source.src.endpoints[0].turn() == 0.0
    assert (len(server), server.num_answered) == (9, 1)
    mailbox = source.src.observers[0].mailbox
    late = read_answer(mailbox.region.address + entry_offset(50, len(mailbox)), 50)
    assert late == DigestAnswer(50, Status.TOO_MANY)


def test_half_an_answer_is_none() -> None:
    mailbox = DigestMailbox(4)
    mailbox.put(DigestAnswer(9, Status.DIGEST, 5, 64))
    at = mailbox.region.address + entry_offset(9, 4)
    assert read_answer(at, 9) == DigestAnswer(9, Status.DIGEST, 5, 64)
    assert read_answer(at, 13) is None
    entry = np.ctypeslib.as_array((ctypes.c_uint8 * MAILBOX_ENTRY_BYTES).from_address(at))
    for byte in range(40):
        entry[byte] ^= 1
        assert read_answer(at, 9) is None
        entry[byte] ^= 1
    assert mailbox.has(9)
    assert not mailbox.has(5)
