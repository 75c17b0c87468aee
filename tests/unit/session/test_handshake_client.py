"""Are many listeners asked at once, each once at a time, and does a question end when it is cancelled or the client is closed?"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from tests.faults.hostile import GREETING, frame, ready
from tests.unit.session.test_handshake import engine_metadata

from kvreshard.session import handshake_client
from kvreshard.session.handshake_client import HandshakeClient, read_engine_metadata
from kvreshard.session.handshake_messages import Address, HandshakeError, metadata_request
from kvreshard.session.handshake_server import HandshakeServer

REQUEST = metadata_request("decode", 0)
PATIENCE_S = 60.0
HOUR_S = 3600.0


@pytest.fixture
def listener() -> Iterator[HandshakeServer]:
    with contextlib.closing(HandshakeServer(Address("127.0.0.1", 0), engine_metadata())) as made:
        yield made


@pytest.fixture
def client() -> Iterator[HandshakeClient]:
    with contextlib.closing(HandshakeClient(max_at_once=2)) as made:
        yield made


@contextlib.contextmanager
def mute() -> Iterator[Address]:
    """A host that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Address("127.0.0.1", server.getsockname()[1])


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"


def test_an_address_is_asked_one_question_at_a_time(listener: HandshakeServer, client: HandshakeClient) -> None:
    with mute() as address:
        first, second = (client.ask(address, REQUEST, HOUR_S, 1 << 20) for _ in range(2))
        answers = [client.ask(listener.address, REQUEST, HOUR_S, 1 << 20) for _ in range(5)]
        assert all(
            read_engine_metadata(listener.address, one.result(PATIENCE_S)) == engine_metadata() for one in answers
        )
        assert len(client._asking) == 1
        second.cancel()
        third = client.ask(address, REQUEST, HOUR_S, 1 << 20)
        assert not first.done()
        first.cancel()
        until(lambda: [one.answer for one in list(client._asking.values())] == [third])
        third.cancel()
        until(lambda: not len(client._asking) and not client._waiting and not client._next)


def test_what_gave_way_is_asked_anew(
    listener: HandshakeServer, client: HandshakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two places, and three hosts that say nothing: the listener behind one of them starts to answer later."""
    monkeypatch.setattr(handshake_client, "AGAIN_S", 0.05)
    with mute() as first, mute() as second, socket.create_server(("127.0.0.1", 0)) as late:
        address = Address("127.0.0.1", late.getsockname()[1])
        waits = client.ask(address, REQUEST, HOUR_S, 1 << 20)
        others = [client.ask(one, REQUEST, HOUR_S, 1 << 20) for one in (first, second)]
        assert client.ask(listener.address, REQUEST, HOUR_S, 1 << 20).result(PATIENCE_S)
        until(lambda: address not in client._asking)
        until(lambda: address in client._asking)
        late.close()
        assert isinstance(waits.exception(PATIENCE_S), HandshakeError)
        assert not any(one.done() for one in others)


def test_a_question_that_has_waited_for_all_of_its_time_fails(client: HandshakeClient) -> None:
    with mute() as address:
        answers = [client.ask(address, REQUEST, 0.05, 1 << 20) for _ in range(3)]
        assert all(isinstance(one.exception(PATIENCE_S), HandshakeError) for one in answers)


def test_closing_ends_every_question_and_takes_no_more(client: HandshakeClient) -> None:
    with mute() as first, mute() as second, mute() as third:
        answers = [client.ask(one, REQUEST, HOUR_S, 1 << 20) for one in (first, second, third, third)]
        until(lambda: len(client._asking) == 2)
        client.close()
        thread = client._thread
        assert thread is not None
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert all(one.cancelled() for one in answers)
        assert client.ask(first, REQUEST, HOUR_S, 1 << 20).cancelled()
        client.close()


def test_an_answer_without_an_end_is_given_up(client: HandshakeClient) -> None:
    """ZeroMQ keeps all frames of a message until the last has come."""
    sent = [0]

    def serve(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as plain:
            plain.sendall(GREETING)
            plain.recv(64, socket.MSG_WAITALL)
            plain.sendall(ready(b"ROUTER"))
            plain.sendall(frame(b"", more=True))
            while True:
                plain.sendall(frame(bytes(1 << 18), more=True))
                sent[0] += 1 << 18

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(HandshakeError, match=rf"what listens at {address} answers with more than 1048576 bytes"):
            client.ask(address, REQUEST, PATIENCE_S, 1 << 20).result(PATIENCE_S)
        serving.join(PATIENCE_S)
        assert not serving.is_alive()
