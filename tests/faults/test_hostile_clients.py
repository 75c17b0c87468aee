"""Does the listener live through every hostile client, with and without keys, and answer the next honest one?"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.hostile import CLIENTS, WHOLE, Client, push
from tests.faults.hostile import frame as zmtp_frame
from tests.pairs.small import engine

from kvreshard.session.connection_limits import Bounds
from kvreshard.session.engine_metadata import EngineMetadata, RankMetadata, make_engine_metadata
from kvreshard.session.handshake_client import fetch_engine_metadata
from kvreshard.session.handshake_messages import Address, HandshakeMessage
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.keys import Keys, read_keys, write_keys

LOCAL = Address("127.0.0.1", 0)
# Generous: what matters is that the answer comes at all, on a machine that may be busy.
PATIENCE_S = 60.0
BIG = 4 * 1024 * 1024


def engine_metadata(metadata: bytes = b"meta") -> EngineMetadata:
    layout = engine("prefill", tp=2)
    return make_engine_metadata(
        layout, bytes(32), {}, [RankMetadata(r.rank, metadata, 4096, 512) for r in layout.ranks], 30.0
    )


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return read_keys(write_keys(Path(tmp_path_factory.mktemp("keys")), "room")[1])


@pytest.fixture(scope="module")
def outcomes() -> list[HandshakeMessage]:
    return []


@pytest.fixture(scope="module")
def open_server(outcomes: list[HandshakeMessage]) -> Iterator[HandshakeServer]:
    listener = HandshakeServer(LOCAL, engine_metadata(b"x" * BIG), outcomes.append)
    yield listener
    listener.close()


@pytest.fixture(scope="module")
def server_with_keys(keys: Keys) -> Iterator[HandshakeServer]:
    listener = HandshakeServer(LOCAL, engine_metadata(), keys=keys)
    yield listener
    listener.close()


@pytest.mark.parametrize("name", CLIENTS)
def test_the_next_honest_client_is_answered(
    open_server: HandshakeServer, name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile clients", 1)
    with Client(open_server.address.port) as client:
        CLIENTS[name](client)
        assert fetch_engine_metadata(open_server.address, "decode", 0, PATIENCE_S).engine == "prefill"


@pytest.mark.parametrize("name", CLIENTS)
def test_the_next_honest_client_with_a_key_is_answered(
    server_with_keys: HandshakeServer, keys: Keys, name: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("hostile clients", 1)
    with Client(server_with_keys.address.port) as client:
        CLIENTS[name](client)
        assert fetch_engine_metadata(server_with_keys.address, "decode", 0, PATIENCE_S, keys).engine == "prefill"


def test_whoever_says_it_no_control_character_gets_in(
    open_server: HandshakeServer, outcomes: list[HandshakeMessage]
) -> None:
    with Client(open_server.address.port) as client:
        CLIENTS["writes_into_the_log"](client)
        fetch_engine_metadata(open_server.address, "decode", 0, PATIENCE_S)
    assert outcomes
    assert all(handshake_message.engine.isprintable() for handshake_message in outcomes)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_clients_that_ask_and_never_read_hold_no_copies_of_the_metadata() -> None:
    listener = HandshakeServer(LOCAL, engine_metadata(b"x" * BIG))
    try:
        fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S)
        before = resident_bytes()
        with Client(listener.address.port) as client:
            for _ in range(64):
                client.tell(*[WHOLE] * 8).setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S)
            grown = resident_bytes() - before
        # Each of the 64 has asked for 8 engine metadata of 8 MiB: 4 GiB. Two decoded engine metadata of the honest client are in the figure.
        assert grown < 256 * 1024 * 1024
    finally:
        listener.close()


def ends(plain: socket.socket) -> bool:
    """Whether the other side closes the connection; what it still sends is read."""
    plain.settimeout(PATIENCE_S)
    try:
        while plain.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_a_message_without_end_is_cut_off() -> None:
    listener = HandshakeServer(LOCAL, engine_metadata(), bounds=Bounds(max_visit_bytes=1 << 20))
    try:
        with Client(listener.address.port) as client:
            plain, part = client.join(), zmtp_frame(b"x" * 60_000, more=True)
            assert any(not push(plain, part) for _ in range(100_000))
        assert fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S).engine == "prefill"
    finally:
        listener.close()


@pytest.mark.parametrize("slow", [b"", b"\xff\0\0"])
def test_a_slow_visit_ends(slow: bytes) -> None:
    listener = HandshakeServer(LOCAL, engine_metadata(), bounds=Bounds(max_visit_s=0.05))
    try:
        with Client(listener.address.port) as client:
            assert ends(client.say(slow))
    finally:
        listener.close()


def test_the_oldest_visit_makes_room_for_the_newest() -> None:
    listener = HandshakeServer(LOCAL, engine_metadata(), bounds=Bounds(max_connections=3))
    try:
        with Client(listener.address.port) as client:
            plains = [client.join() for _ in range(4)]
            assert ends(plains[0])
            message = zmtp_frame(b"", more=True) + zmtp_frame(WHOLE)
            assert push(plains[3], message)
            plains[3].settimeout(PATIENCE_S)
            assert plains[3].recv(1)
    finally:
        listener.close()


@pytest.mark.parametrize(("reachable", "has_keys", "warns"), [(False, False, 0), (True, False, 1), (True, True, 0)])
def test_it_says_when_everybody_may_ask(
    reachable: bool,
    has_keys: bool,
    warns: int,
    keys: Keys,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The address is only said to be reachable: no test listens beyond this machine."""
    monkeypatch.setattr(Address, "is_loopback", property(lambda address: not reachable))
    with caplog.at_level(logging.WARNING):
        HandshakeServer(LOCAL, engine_metadata(), keys=keys if has_keys else None).close()
    assert len(caplog.records) == warns
    assert ("from everybody who reaches that port" in caplog.text) == bool(warns)
