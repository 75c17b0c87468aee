"""Followers and listeners over real sockets: what is new comes at once, and a listener holds one question of each reader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from tests.ports import free_ports
from tests.unit.session.world import KEY, make_world

from kvreshard.session import exchange, handshake_messages, handshake_server
from kvreshard.session import follower as followers
from kvreshard.session.follower import Follower
from kvreshard.session.handshake_messages import (
    MAX_MESSAGE_BYTES,
    MAX_TRANSFERS,
    Address,
    HandshakeError,
    TransferQuestion,
    count_fitting,
    transfers_request,
)
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.statement import Answer, Statement

Taken = list[tuple[str, Answer | HandshakeError]]


@pytest.fixture
def shown() -> Rendezvous:
    return Rendezvous(KEY)


@pytest.fixture
def server(shown: Rendezvous) -> Iterator[HandshakeServer]:
    world = make_world(1, 1)
    made = HandshakeServer(Address("127.0.0.1", 0), world.src.engine_metadata(), rendezvous=shown)
    yield made
    made.close()
    world.close()


@pytest.fixture
def follower() -> Iterator[Follower]:
    made = Follower("decode", 0, None, lambda: None)
    yield made
    made.close()


def until(follower: Follower, is_enough: Callable[[Taken], bool], seconds: float = 10.0) -> Taken:
    """Turns of a follower until it has taken enough."""
    taken: Taken = []
    until_s = time.monotonic() + seconds
    while not is_enough(taken):
        assert time.monotonic() < until_s, taken
        taken += follower.take()
        follower.ask()
        time.sleep(0.002)
    return taken


def begin(shown: Rendezvous, server: HandshakeServer, transfer: str, word: int = 77) -> None:
    shown.register(transfer, transfer)
    shown.begin(transfer, transfer, Statement("prefill", "i", transfer, 1, word, 40, {}, False, b""))
    server.wake()


def test_what_is_new_is_told_at_once(shown: Rendezvous, server: HandshakeServer, follower: Follower) -> None:
    follower.follow("r", server.address, TransferQuestion("x", is_heard=True))
    follower.ask()
    time.sleep(0.1)
    assert follower.take() == []
    began_s = time.monotonic()
    begin(shown, server, "x")
    ((name, answer),) = until(follower, bool)
    assert time.monotonic() - began_s < 2.0  # not only when the question has been held long enough
    assert isinstance(answer, Answer)
    assert (name, answer.state) == ("r", "found")
    follower.follow("r", server.address, TransferQuestion("x", 77))
    follower.ask()
    shown.end("x", "x", "aborted")
    server.wake()
    ((_, ended),) = until(follower, bool)
    assert isinstance(ended, Answer)
    assert (ended.state, ended.text) == ("ended", "aborted")
    assert len(follower) == 0


def test_who_waits_for_a_request_is_told_when_it_has_come(
    shown: Rendezvous, server: HandshakeServer, follower: Follower
) -> None:
    """Its reader may not wait as long as a listener holds a question (`transfer_wait_s`)."""
    follower.follow("r", server.address, TransferQuestion("x"))
    follower.ask()
    time.sleep(0.2)
    assert follower.take() == []
    began_s = time.monotonic()
    shown.register("x", "x")
    if shown.has_changed:  # as the engine's thread does after each step
        server.wake()
    assert until(follower, bool) == [("r", Answer("heard"))]
    assert time.monotonic() - began_s < 2.0


def test_a_question_of_which_nothing_is_new_is_answered_before_it_is_asked_again(
    shown: Rendezvous, server: HandshakeServer, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = server._answer, list[float]()

    def count(frames: Sequence[bytes], now_s: float) -> int:
        asked.append(now_s)
        return answer(frames, now_s)

    monkeypatch.setattr(server, "_answer", count)
    for module, name in ((handshake_server, "HOLD_S"), (exchange, "ASK_AGAIN_S")):
        monkeypatch.setattr(module, name, getattr(module, name) / 5)
    shown.register("x", "x")
    follower.follow("r", server.address, TransferQuestion("x", is_heard=True))
    assert until(follower, bool) == [("r", Answer("heard"))]
    assert len(asked) == 1


def test_one_question_is_held_of_each_reader(
    shown: Rendezvous, server: HandshakeServer, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "PAUSE_S", 0.0)
    for number in range(60):
        follower.follow(f"r{number}", server.address, TransferQuestion(f"x{number}", is_heard=True))
        follower.ask()
        time.sleep(0.005)
    until_s = time.monotonic() + 5.0
    while len(server._held) != 1 and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(server._held) == 1
    for number in range(60):
        begin(shown, server, f"x{number}")
    taken = until(follower, lambda taken: len(taken) >= 60)
    assert {name for name, _ in taken} == {f"r{number}" for number in range(60)}


def test_a_source_that_is_named_at_two_addresses_answers_at_both(
    shown: Rendezvous, server: HandshakeServer, follower: Follower
) -> None:
    for name, host in (("a", "127.0.0.1"), ("b", "localhost")):
        follower.follow(name, Address(host, server.address.port), TransferQuestion(f"x-{name}", is_heard=True))
        follower.ask()
        time.sleep(0.3)  # the question is held
    began_s = time.monotonic()
    for name in ("a", "b"):
        begin(shown, server, f"x-{name}")
    taken = until(follower, lambda taken: len(taken) >= 2)
    assert time.monotonic() - began_s < 2.0  # not only when it is asked again, since nobody has answered
    assert {name for name, _ in taken} == {"a", "b"}


def test_more_than_one_question_has_room_for_take_turns(
    shown: Rendezvous, server: HandshakeServer, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake_messages, "MAX_TRANSFERS", 4)
    for number in range(10):
        begin(shown, server, f"x{number}")
        follower.follow(f"r{number}", server.address, TransferQuestion(f"x{number}"))
    taken = until(follower, lambda taken: len(taken) >= 10)
    assert sorted(name for name, _ in taken) == sorted(f"r{number}" for number in range(10))


def test_a_name_that_was_given_to_another_transfer_gets_no_answer_about_the_former(
    shown: Rendezvous, server: HandshakeServer, follower: Follower
) -> None:
    begin(shown, server, "x")
    follower.follow("r", server.address, TransferQuestion("x"))
    follower.ask()
    time.sleep(0.2)  # the answer is there
    follower.drop("r")
    follower.follow("r", server.address, TransferQuestion("y"))
    shown.register("y", "y")
    server.wake()
    ((_, answer),) = until(follower, bool)
    assert answer == Answer("heard")


def test_who_cannot_be_asked_is_an_error_for_all_that_wait() -> None:
    follower = Follower("decode", 0, None, lambda: None)
    address = Address("127.0.0.1", free_ports(1))
    for name in ("a", "b"):
        follower.follow(name, address, TransferQuestion(name))
    taken = until(follower, lambda taken: len(taken) >= 2)
    follower.close()
    assert all(isinstance(error, HandshakeError) and "nothing takes connections" in str(error) for _, error in taken)


def test_an_engine_that_shows_nothing_says_so(follower: Follower) -> None:
    world = make_world(1, 1)
    server = HandshakeServer(Address("127.0.0.1", 0), world.src.engine_metadata())
    follower.follow("r", server.address, TransferQuestion("x"))
    ((_, error),) = until(follower, bool)
    server.close()
    world.close()
    assert isinstance(error, HandshakeError)
    assert "does not show prefills" in str(error)


def test_who_cannot_be_asked_is_asked_again_only_after_a_while() -> None:
    follower, address, errors = Follower("decode", 0, None, lambda: None), Address("127.0.0.1", free_ports(1)), 0
    until_s = time.monotonic() + 0.5 * followers.RETRY_S
    while time.monotonic() < until_s:
        errors += len(follower.take())
        follower.follow("r", address, TransferQuestion("x"))  # as its callers do, each time they have heard of it
        wait_s = follower.ask()
        time.sleep(0.002)
    follower.drop("r")
    follower.close()
    assert errors == 1
    assert wait_s <= followers.RETRY_S


@pytest.mark.parametrize(("length", "num_groups"), [(36, 32), (200, 1), (256, 6), (256, 256)])
def test_a_question_has_room_for_what_is_asked(length: int, num_groups: int) -> None:
    groups = {f"group.{number}": 60_000 for number in range(num_groups)}
    wanted = [TransferQuestion(f"{i:04d}".ljust(length, "x"), 2**63 - 1, groups, lead_s=0.5) for i in range(300)]
    number = count_fitting(wanted)
    assert 1 <= number <= MAX_TRANSFERS
    assert len(transfers_request("e" * 256, 0, wanted[:number], "a" * 32)) <= MAX_MESSAGE_BYTES


def test_long_names_beside_it_keep_nobody_from_an_answer(
    shown: Rendezvous, server: HandshakeServer, follower: Follower
) -> None:
    for i in range(240):
        follower.follow(f"h{i}", server.address, TransferQuestion(f"{i:04d}".ljust(256, "x")))
    begin(shown, server, "honest")
    follower.follow("honest", server.address, TransferQuestion("honest"))
    taken = until(follower, lambda taken: any(name == "honest" for name, _ in taken), 30.0)
    assert all(isinstance(answer, Answer) for _, answer in taken)
