"""Can this side talk to a peer that is nothing but bytes that were written down once?

`peer/*.hex` are of version 1, the only one. The tests say that today's side reads and writes them, and that an artificial version 2
that changes the card and everything that can change with it still does.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.pairs.small import engine

from kvreshard.model.form import Form, Step, Tree
from kvreshard.session import card as cards
from kvreshard.session import notes
from kvreshard.session.card import EngineCard, RankCard, decode_card, encode_card, make_card
from kvreshard.session.handshake import Address, Listener, fetch_card, tell_outcome
from kvreshard.session.hello import Hello, read_answer, read_hello
from kvreshard.session.notes import Heartbeat, Report, heartbeats, read_note, write_note

PEER = Path(__file__).parent / "peer"
PATIENCE_S = 60.0
KEY = bytes(range(32))
NAMES = (
    "answer-v1",
    "card-v1",
    "heartbeat-v1",
    "hello-card-v1",
    "hello-outcome-v1",
    "report-v1",
)


def golden(name: str, version: int = 1) -> bytes:
    return bytes.fromhex((PEER / f"{name}-v{version}.hex").read_text())


def card() -> EngineCard:
    layout = engine("prefill", tp=2)
    return make_card(layout, KEY, {"model": "m"}, [RankCard(r.rank, b"meta", 4096, 512) for r in layout.ranks], 4.0)


def test_nothing_is_missing() -> None:
    assert sorted(path.stem for path in PEER.iterdir()) == sorted(NAMES)


def test_today_reads_what_version_1_wrote() -> None:
    old = decode_card(golden("card"))
    assert old == card()
    assert old.decode_layout() == engine("prefill", tp=2)
    assert (old.key, old.lease_s) == (KEY, 4.0)
    assert read_hello(golden("hello-card")) == Hello("kvreshard.hello", 1, "card", "decode", 3)
    assert read_hello(golden("hello-outcome")) == Hello("kvreshard.hello", 1, "outcome", "decode", 3, "reads", False)
    assert read_answer(golden("answer")) == "noted"
    assert read_note(golden("report")) == Report(1, "d/1", "r", 2**64 - 1, 3, (0, 3), False)
    assert read_note(golden("heartbeat")) == Heartbeat(1, "d", (("r", 1), ("s", 2)))


def test_today_writes_what_version_1_reads() -> None:
    assert encode_card(card()) == golden("card")
    assert write_note(Report(1, "d/1", "r", 2**64 - 1, 3, (0, 3), False)) == golden("report")
    assert [write_note(note) for note in heartbeats("d", (("r", 1), ("s", 2)), 1)] == [golden("heartbeat")]


def up(tree: Tree) -> Tree:
    return {**tree, "facts": {**tree["facts"], "since": "before version 2"}}


def down(tree: Tree) -> Tree:
    return {**tree, "facts": {name: text for name, text in tree["facts"].items() if name != "since"}}


@pytest.fixture
def version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """This side is a release further: cards are of version 2, notes of version 2."""
    monkeypatch.setattr(cards, "CARD", Form(cards.FORM, (*cards.CARD.steps, Step(up, down))))
    monkeypatch.setattr(notes, "VERSION", 2)


def newer_card() -> EngineCard:
    """What an engine of version 2 says of itself."""
    return msgspec.structs.replace(card(), facts={"model": "m", "since": "version 2"})


@pytest.mark.usefixtures("version_2")
def test_version_2_reads_the_card_of_version_1_with_the_default_that_was_meant() -> None:
    found = decode_card(golden("card"))
    assert (found.version, found.facts, found.reads_notes) == (2, {"model": "m", "since": "before version 2"}, 1)


@pytest.mark.usefixtures("version_2")
def test_version_2_reads_notes_of_version_1_and_knows_who_reads_no_others() -> None:
    assert read_note(golden("report")) == Report(1, "d/1", "r", 2**64 - 1, 3, (0, 3), False)
    assert read_note(write_note(Heartbeat(2, "d", ()))) == Heartbeat(2, "d", ())
    assert read_note(write_note(Heartbeat(3, "d", ()))) is None
    assert (decode_card(golden("card")).reads_notes, card().reads_notes) == (1, 2)


def ask_as_bytes(address: Address, hello: bytes) -> bytes:
    """What an asker of version 1 gets."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(str(address))
        dealer.send_multipart([b"", hello])
        assert dealer.poll(int(PATIENCE_S * 1000))
        return bytes(dealer.recv_multipart()[-1])


@pytest.mark.usefixtures("version_2")
def test_a_listener_of_version_2_answers_version_1_in_version_1() -> None:
    listener = Listener(Address("127.0.0.1", 0), newer_card())
    try:
        old = msgspec.structs.replace(card(), version=1)
        got = ask_as_bytes(listener.address, golden("hello-card"))
        assert msgspec.msgpack.decode(got, type=EngineCard) == old
        assert read_answer(ask_as_bytes(listener.address, golden("hello-outcome"))) == "noted"
        assert fetch_card(listener.address, "decode", 0, PATIENCE_S) == newer_card()
    finally:
        listener.close()


@pytest.fixture
def old_listener() -> Iterator[tuple[Address, list[Any]]]:
    """A listener of version 1 that is nothing but bytes; what it was told is kept."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        told: list[Any] = []

        def serve() -> None:
            while len(told) < 2:
                *envelope, payload = router.recv_multipart()
                told.append(msgspec.msgpack.decode(payload))
                is_card = told[-1]["ask"] == "card"
                router.send_multipart([*envelope, golden("card" if is_card else "answer")])

        thread = threading.Thread(target=serve)
        thread.start()
        yield Address("127.0.0.1", port), told
        thread.join()


@pytest.mark.usefixtures("version_2")
def test_an_asker_of_version_2_can_work_with_a_listener_of_version_1(old_listener: tuple[Address, list[Any]]) -> None:
    address, told = old_listener
    found = fetch_card(address, "decode", 0, PATIENCE_S)
    tell_outcome(address, "decode", 0, "fine", True, PATIENCE_S)
    assert (found.version, found.facts["since"], found.reads_notes) == (2, "before version 2", 1)
    # Its hellos are of version 1 and have all that version 1 asks for.
    required = msgspec.msgpack.decode(golden("hello-card")).keys()
    assert all(hello["version"] == 1 and hello.keys() >= required for hello in told)
    assert told[0]["reads_card"] == 2
