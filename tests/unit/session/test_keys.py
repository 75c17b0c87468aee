"""Do keys let in who is trusted, keep out who is not, and say on both sides why?"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.pairs.small import engine

from kvreshard.model import KvReshardError
from kvreshard.session import handshake_client
from kvreshard.session.engine_metadata import EngineMetadata, RankMetadata, make_engine_metadata
from kvreshard.session.exchange import read_mechanism
from kvreshard.session.handshake_client import HandshakeClient, fetch_engine_metadata, send_outcome
from kvreshard.session.handshake_messages import Address, HandshakeError, metadata_request
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.keys import Keys, read_keys, write_keys

LOCAL = Address("127.0.0.1", 0)
PATIENCE_S = 60.0


def engine_metadata() -> EngineMetadata:
    layout = engine("prefill")
    return make_engine_metadata(layout, bytes(32), {}, [RankMetadata(0, b"a very recognisable text", 4096, 512)], 30.0)


@pytest.fixture
def room(tmp_path: Path) -> Keys:
    return read_keys(write_keys(tmp_path, "room")[1])


@pytest.fixture
def listener(room: Keys) -> Iterator[HandshakeServer]:
    listener = HandshakeServer(LOCAL, engine_metadata(), keys=room)
    yield listener
    listener.close()


def own_keys(directory: Path, name: str, *trusted: str) -> Keys:
    """An engine's own pair, and a directory with the public keys of those it trusts."""
    trusts = directory / f"trusted-by-{name}"
    trusts.mkdir()
    for other in trusted:
        (trusts / f"{other}.key").write_bytes((directory / f"{other}.key").read_bytes())
    return read_keys(directory / f"{name}.key_secret", trusts)


def test_one_pair_for_all_is_enough(listener: HandshakeServer, room: Keys) -> None:
    assert fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S, room) == engine_metadata()
    send_outcome(listener.address, "decode", 0, "fine", True, PATIENCE_S, room)


def test_a_pair_each_works_where_both_trust(tmp_path: Path) -> None:
    for name in ("p", "d", "other"):
        write_keys(tmp_path, name)
    listener = HandshakeServer(LOCAL, engine_metadata(), keys=own_keys(tmp_path, "p", "d"))
    try:
        keys = own_keys(tmp_path, "d", "other", "p")
        assert fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S, keys) == engine_metadata()
    finally:
        listener.close()


def test_a_connection_that_is_lost_says_nothing_of_keys(listener: HandshakeServer, room: Keys) -> None:
    """Whoever is hung up on asks again, and then it is the right key."""
    with socket.create_server(("127.0.0.1", 0)) as gate, ExitStack() as opened:

        def forward() -> None:
            gate.accept()[0].close()
            for _ in range(2):  # for a look at the greeting, and for the question
                ends = gate.accept()[0], socket.create_connection(("127.0.0.1", listener.address.port))
                for here, there in (ends, ends[::-1]):
                    opened.enter_context(here)
                    threading.Thread(target=pump, args=(here, there), daemon=True).start()

        threading.Thread(target=forward, daemon=True).start()
        address = Address("127.0.0.1", gate.getsockname()[1])
        assert fetch_engine_metadata(address, "decode", 0, PATIENCE_S, room) == engine_metadata()


def pump(here: socket.socket, there: socket.socket) -> None:
    """All that comes, until the end."""
    with contextlib.suppress(OSError):
        while content := here.recv(1 << 16):
            there.sendall(content)
        there.shutdown(socket.SHUT_WR)


def test_the_key_of_an_engine_that_has_answered_is_tried_first(tmp_path: Path) -> None:
    """Each that is tried before it is a peer that could not connect, in that engine's log."""
    for name in ("p", "d", "one", "two"):
        write_keys(tmp_path, name)
    listener = HandshakeServer(LOCAL, engine_metadata(), keys=own_keys(tmp_path, "p", "d"))
    keys, refused = own_keys(tmp_path, "d", "one", "two", "p"), list[int]()
    with contextlib.closing(HandshakeClient()) as client, contextlib.closing(listener):
        for _ in range(3):
            client.ask(listener.address, metadata_request("decode", 0), PATIENCE_S, 1 << 20, keys).result()
            time.sleep(0.1)  # the listener sees refusals in its monitor
            refused.append(sum(listener._complaints.values()))
    assert 0 < refused[0] == refused[1] == refused[2]


def test_of_many_addresses_the_keys_of_the_last_are_known(room: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests name addresses, and one engine may have millions: 127.0.0.0/8, or a name in capitals."""
    monkeypatch.setattr(handshake_client, "MAX_SERVER_KEYS", 3)
    server = HandshakeServer(Address("0.0.0.0", 0), engine_metadata(), keys=room)
    addresses = [Address(f"127.0.0.{number}", server.address.port) for number in (1, 2, 1, 3, 4, 1)]
    with contextlib.closing(server), contextlib.closing(HandshakeClient()) as client:
        for address in addresses:
            client.ask(address, metadata_request("decode", 0), 20.0, 1 << 20, room).result(20.0)
        assert list(client._server_keys) == [addresses[3], addresses[4], addresses[5]]


def test_a_stranger_is_refused_at_once_and_both_sides_say_why(
    listener: HandshakeServer, room: Keys, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "trusted").mkdir()
    write_keys(tmp_path, "stranger")
    (tmp_path / "trusted" / "room.key").write_bytes((tmp_path / "room.key").read_bytes())
    stranger = read_keys(tmp_path / "stranger.key_secret", tmp_path / "trusted")
    with caplog.at_level(logging.WARNING), pytest.raises(HandshakeError) as caught:
        fetch_engine_metadata(listener.address, "decode", 0, 10 * PATIENCE_S, stranger)
    assert f"does not trust this engine's key {stranger.public.decode()}" in str(caught.value)
    assert "curve_public_keys_dir" in str(caught.value)
    assert f"a peer with the unknown public key {stranger.public.decode()} was refused" in caplog.text
    assert fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S, room).engine == "prefill"


def test_another_engine_in_its_place_is_not_believed(listener: HandshakeServer, room: Keys, tmp_path: Path) -> None:
    write_keys(tmp_path, "mine")
    with pytest.raises(HandshakeError, match="has none of the 1 keys that this one trusts"):
        fetch_engine_metadata(listener.address, "decode", 0, 10 * PATIENCE_S, read_keys(tmp_path / "mine.key_secret"))
    assert fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S, room).engine == "prefill"


def test_a_greeting_tells_whether_keys_are_wanted(listener: HandshakeServer) -> None:
    open_server = HandshakeServer(LOCAL, engine_metadata())
    try:
        assert (read_mechanism(listener.address, PATIENCE_S), read_mechanism(open_server.address, PATIENCE_S)) == (
            "CURVE",
            "NULL",
        )
    finally:
        open_server.close()
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = Address("127.0.0.1", other.getsockname()[1])

        def say_something_else() -> None:
            with other.accept()[0] as plain:
                plain.sendall(b"x" * 64)

        answer = threading.Thread(target=say_something_else)
        answer.start()
        assert read_mechanism(address, PATIENCE_S) is None
        answer.join()
    assert read_mechanism(address, PATIENCE_S) is None


@pytest.mark.parametrize("attempt", range(5))
def test_keys_on_one_side_only_are_told_whoever_hangs_up_first(
    listener: HandshakeServer, room: Keys, attempt: int
) -> None:
    test_keys_on_one_side_only_are_told_at_once(listener, room)


def test_keys_on_one_side_only_are_told_at_once(listener: HandshakeServer, room: Keys) -> None:
    with pytest.raises(
        HandshakeError, match="wants a key and this one has none: give this engine a curve_secret_key_file"
    ):
        fetch_engine_metadata(listener.address, "decode", 0, 10 * PATIENCE_S)
    open_server = HandshakeServer(LOCAL, engine_metadata())
    try:
        with pytest.raises(HandshakeError, match="uses no keys and this one does: give both"):
            fetch_engine_metadata(open_server.address, "decode", 0, 10 * PATIENCE_S, room)
    finally:
        open_server.close()


def test_a_peer_without_keys_stands_in_the_servers_log(
    listener: HandshakeServer, room: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with pytest.raises(HandshakeError):
                fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S)
        fetch_engine_metadata(listener.address, "decode", 0, PATIENCE_S, room)
    lines = [
        record.getMessage() for record in caplog.records if "could not connect: it has no keys" in record.getMessage()
    ]
    assert len(set(lines)) == len(lines) >= 1  # the first, the second, the fourth, ...; ZeroMQ asks again by itself


def carry(front: socket.socket, target: Address, seen: bytearray, is_over: threading.Event) -> None:
    """Pass on all bytes between whoever connects to `front` and `target`, and keep it."""
    with ExitStack() as stack:
        ends: dict[socket.socket, socket.socket] = {}
        while not is_over.is_set():
            for ready in select.select([front, *ends], [], [], 0.05)[0]:
                if ready is front:
                    near = stack.enter_context(front.accept()[0])
                    far = stack.enter_context(socket.create_connection((target.host, target.port)))
                    ends |= {near: far, far: near}
                elif content := ready.recv(1 << 16):
                    seen += content
                    ends[ready].sendall(content)
                else:
                    ends[ready].shutdown(socket.SHUT_WR)
                    del ends[ready]


@pytest.mark.parametrize("has_keys", [True, False])
def test_a_reader_on_the_way_sees_nothing_where_there_are_keys(room: Keys, has_keys: bool) -> None:
    keys, seen, is_over = room if has_keys else None, bytearray(), threading.Event()
    listener = HandshakeServer(LOCAL, engine_metadata(), keys=keys)
    try:
        with socket.create_server(("127.0.0.1", 0)) as front:
            carrier = threading.Thread(target=carry, args=(front, listener.address, seen, is_over))
            carrier.start()
            try:
                way = Address("127.0.0.1", front.getsockname()[1])
                assert fetch_engine_metadata(way, "decode", 0, PATIENCE_S, keys) == engine_metadata()
            finally:
                is_over.set()
                carrier.join()
    finally:
        listener.close()
    assert len(seen) > 500
    assert (b"recognisable" in seen) == (not has_keys)


def test_a_secret_is_for_its_owner_only(tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path / "new", "room")
    assert (stat.S_IMODE(secret.stat().st_mode), stat.S_IMODE(public.stat().st_mode)) == (0o600, 0o644)
    assert sorted(path.name for path in secret.parent.iterdir()) == ["room.key", "room.key_secret"]
    keys = read_keys(secret)
    assert keys.secret.decode() in secret.read_text()
    assert keys.secret.decode() not in public.read_text() + repr(keys)
    secret.chmod(0o640)
    with pytest.raises(KvReshardError, match=r"may be read by others; make it yours alone: chmod 600"):
        read_keys(secret)


def test_keys_are_not_overwritten(tmp_path: Path) -> None:
    before = read_keys(write_keys(tmp_path, "room")[1])
    with pytest.raises(KvReshardError, match=r"a key 'room' in .* already"):
        write_keys(tmp_path, "room")
    assert read_keys(tmp_path / "room.key_secret") == before
    (tmp_path / "room.key_secret").unlink()
    with pytest.raises(KvReshardError, match="already"):
        write_keys(tmp_path, "room")
    assert not (tmp_path / "room.key_secret").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "there is no key file"),
        ("", "No public key found"),
        ('public-key = "short"', "not 40 characters of Z85"),
        (f'public-key = "{"x" * 40}"', "has no secret key; `kvreshard keys` writes one"),
        (f'public-key = "{"x" * 40}"\nsecret-key = "{"~" * 40}"', "not 40 characters of Z85"),
    ],
)
def test_what_is_no_key_file_is_named(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "room.key_secret"
    if text is not None:
        path.touch(0o600)
        path.write_text(text)
    with pytest.raises(KvReshardError, match=told):
        read_keys(path)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    _, secret = write_keys(tmp_path, "room")
    with pytest.raises(KvReshardError, match="nowhere is not a directory"):
        read_keys(secret, tmp_path / "nowhere")


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its keys an engine would start, and refuse all others."""
    _, secret = write_keys(tmp_path, "room")

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("listdir", "scandir"):  # which of them is used depends on the version of Python
        monkeypatch.setattr(os, name, refuse)
    with pytest.raises(KvReshardError, match=r"not a directory that can be read \(Permission denied\)"):
        read_keys(secret, tmp_path)
