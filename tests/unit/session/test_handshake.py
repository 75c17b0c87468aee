"""Does the listener hand out its engine metadata, and live through everything else?"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest
import zmq
from tests.pairs.small import engine

from kvreshard.model import KvReshardError, LayoutMismatch, WireError
from kvreshard.model.changed import replace
from kvreshard.session import handshake_messages
from kvreshard.session.engine_metadata import (
    EngineMetadata,
    RankMetadata,
    check_compatibility,
    decode_engine_metadata,
    encode_engine_metadata,
    make_engine_metadata,
)
from kvreshard.session.handshake_client import HandshakeClient, fetch_engine_metadata, send_outcome
from kvreshard.session.handshake_messages import Address, HandshakeError, HandshakeMessage
from kvreshard.session.handshake_server import HandshakeServer

LOCAL = Address("127.0.0.1", 0)


def engine_metadata(name: str = "prefill", **compatibility: str) -> EngineMetadata:
    layout = engine(name, tp=2)
    return make_engine_metadata(
        layout, bytes(32), compatibility, [RankMetadata(r.rank, b"meta", 4096, 512) for r in layout.ranks], 30.0
    )


@pytest.fixture
def outcomes() -> list[HandshakeMessage]:
    return []


@pytest.fixture
def listener(outcomes: list[HandshakeMessage]) -> Iterator[HandshakeServer]:
    listener = HandshakeServer(LOCAL, engine_metadata(model="m"), outcomes.append)
    yield listener
    listener.close()


def say(address: Address, *frames: bytes, wait_ms: int = 2000) -> bytes | None:
    """Send raw frames; the answer's last frame, None if there is none in time."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(str(address))
        dealer.send_multipart(list(frames))
        return dealer.recv_multipart()[-1] if dealer.poll(wait_ms) else None


def test_the_engine_metadata_arrives_whole(listener: HandshakeServer) -> None:
    found = fetch_engine_metadata(listener.address, "decode", 1, 5.0)
    assert found == engine_metadata(model="m")
    assert found.decode_layout() == engine("prefill", tp=2)
    assert found.rank_by_number[1].lease_slots == 512


@pytest.mark.parametrize("lease_s", [float("nan"), float("inf"), -1.0, 0.0, 86_401.0])
def test_a_lease_lasts_seconds_that_there_are(lease_s: float) -> None:
    with pytest.raises(WireError, match=r"Expected `float` .* at `\$\.lease_s`"):
        decode_engine_metadata(encode_engine_metadata(replace(engine_metadata(model="m"), lease_s=lease_s)))


def test_an_outcome_arrives(listener: HandshakeServer, outcomes: list[HandshakeMessage]) -> None:
    send_outcome(listener.address, "decode", 1, "x" * 5000, False, 5.0)
    assert [
        (handshake_message.engine, handshake_message.rank, handshake_message.is_good, len(handshake_message.text))
        for handshake_message in outcomes
    ] == [("decode", 1, False, handshake_messages.MAX_TEXT)]


@pytest.mark.parametrize(
    ("frames", "answer"),
    [
        ([b"", b""], "not a kvreshard handshake message"),
        ([b"", b"\xff" * 100], "not a kvreshard handshake message"),
        ([b"", b"\x91" * 10_000], "not a kvreshard handshake message"),
        ([b"", msgspec.msgpack.encode(["get_meta_msg", 0, 7])], "not a kvreshard handshake message"),
        (
            [
                b"",
                msgspec.msgpack.encode(
                    ({"form": "x" * 900, "version": 1, "ask": "metadata", "engine": "e", "rank": 0}, 0, 0)
                ),
            ],
            "but 'x",
        ),
        ([b"a", b"b", b"c", b"d"], "not a kvreshard handshake message"),
        (
            [b"", msgspec.msgpack.encode((HandshakeMessage(handshake_messages.FORM, 9, "metadata", "e", 0), 0, 0))],
            "handshake message of version 9; this side reads version 1",
        ),
        (
            [
                b"",
                msgspec.msgpack.encode((HandshakeMessage(handshake_messages.FORM, 1, "metadata", "e" * 3000, 0), 0, 0)),
            ],
            "of length <= 256 - at `$[0].engine`",
        ),
    ],
)
def test_noise_gets_one_line_and_the_next_peer_the_metadata(
    listener: HandshakeServer, frames: list[bytes], answer: str
) -> None:
    reply = say(listener.address, *frames)
    assert reply is not None
    assert answer in msgspec.msgpack.decode(reply, type=handshake_messages.HandshakeAnswer).text
    assert fetch_engine_metadata(listener.address, "decode", 0, 5.0).engine == "prefill"


def test_an_oversized_message_is_dropped_and_the_next_one_served(listener: HandshakeServer) -> None:
    assert say(listener.address, b"", b"x" * (handshake_messages.MAX_MESSAGE_BYTES + 1), wait_ms=200) is None
    assert fetch_engine_metadata(listener.address, "decode", 0, 5.0).engine == "prefill"


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 64, b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"]
)
def test_a_client_that_does_not_speak_zeromq_hurts_nobody(listener: HandshakeServer, noise: bytes) -> None:
    with socket.create_connection((listener.address.host, listener.address.port)) as plain:
        plain.sendall(noise)
        assert fetch_engine_metadata(listener.address, "decode", 0, 5.0).engine == "prefill"


def test_a_listener_whose_owner_fails_lives(outcomes: list[HandshakeMessage]) -> None:
    def fail(handshake_message: HandshakeMessage) -> None:
        raise RuntimeError(handshake_message.text)

    listener = HandshakeServer(LOCAL, engine_metadata(), fail)
    try:
        with pytest.raises(HandshakeError, match=r"within 0.2 s"):
            send_outcome(listener.address, "decode", 0, "boom", True, 0.2)
        assert fetch_engine_metadata(listener.address, "decode", 0, 5.0).engine == "prefill"
    finally:
        listener.close()


@pytest.mark.timeout(60)
def test_nobody_there_is_said_with_address_and_remedy() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        with pytest.raises(
            HandshakeError, match=rf"nothing takes connections at tcp://127\.0\.0\.1:{port}: .*is the engine running"
        ):
            fetch_engine_metadata(Address("127.0.0.1", port), "decode", 0, 3600.0)


@pytest.mark.timeout(60)
def test_a_name_that_stands_for_nothing_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with pytest.raises(HandshakeError, match=r"tcp://nowhere:5 cannot be looked up: Name or service not known"):
        fetch_engine_metadata(Address("nowhere", 5), "decode", 0, 3600.0)


@pytest.mark.timeout(60)
def test_a_resolver_that_does_not_answer_holds_up_nobody_else(
    listener: HandshakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    looking_up = socket.getaddrinfo

    def look_up(host: str, *rest: object) -> object:
        if host == "nowhere" and gate.wait(60.0):
            raise socket.gaierror("Name or service not known")
        return looking_up(host, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with contextlib.closing(HandshakeClient()) as client:
        handshake_message = handshake_messages.metadata_request("decode", 0)
        mute = [client.ask(Address("nowhere", port), handshake_message, 3600.0, 1 << 20) for port in range(1, 100)]
        assert client.ask(listener.address, handshake_message, 3600.0, 1 << 20).result(60.0)
        port = listener.address.port
        assert not any(answer.done() for answer in mute)
        gate.set()
        assert client.ask(Address("localhost", port), handshake_message, 3600.0, 1 << 20).result(60.0)


def test_a_peer_that_speaks_something_else_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")

        def answer() -> None:
            other.recv_multipart()
            other.send(b"handshake message yourself")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeError, match=r"not engine metadata.*is the port that of a kvreshard engine"):
            fetch_engine_metadata(Address("127.0.0.1", port), "decode", 0, 5.0)
        thread.join()


def test_a_port_that_is_taken_is_said_with_the_remedy(listener: HandshakeServer) -> None:
    with pytest.raises(KvReshardError, match=r"cannot listen for handshakes on tcp.*in use.*port of its own"):
        HandshakeServer(listener.address, engine_metadata())


def test_metadata_of_a_later_version_and_other_things_are_refused() -> None:
    good = engine_metadata()
    with pytest.raises(
        WireError, match="engine_metadata of version 7; this side reads version 1: run the same release"
    ):
        decode_engine_metadata(encode_engine_metadata(msgspec.structs.replace(good, version=7)))
    with pytest.raises(WireError, match=r"'kvreshard\.layout', not a 'kvreshard\.engine_metadata'"):
        decode_engine_metadata(encode_engine_metadata(msgspec.structs.replace(good, form="kvreshard.layout")))
    message = encode_engine_metadata(good)
    for length in range(0, len(message), 7):
        with pytest.raises(WireError):
            decode_engine_metadata(message[:length])


def test_a_rank_that_nobody_can_reach_is_refused() -> None:
    layout = engine("prefill", tp=2)
    with pytest.raises(WireError, match=r"ranks \[0, 1\] are described and \[0\] can be reached"):
        make_engine_metadata(layout, bytes(32), {}, [RankMetadata(0, b"", 0, 0)], 30.0)


def test_facts_that_differ_are_named_with_both_values_and_may_be_allowed() -> None:
    mine, theirs = (
        engine_metadata("decode", model="a", dtype="bf16", only_here="1"),
        engine_metadata("prefill", model="b", dtype="fp8"),
    )
    with pytest.raises(LayoutMismatch) as caught:
        check_compatibility(mine, theirs)
    for text in ("model is 'b' there and 'a' here", "dtype is 'fp8' there and 'bf16' here", "allow_mismatch"):
        assert text in str(caught.value)
    assert "only_here" not in str(caught.value)
    check_compatibility(mine, theirs, allowed=("model", "dtype"))
    check_compatibility(mine, replace_info(theirs, mine))


@pytest.mark.parametrize("who", ["reader", "source", "neither"])
def test_a_value_that_either_side_accepts_may_differ(who: str) -> None:
    """The newer engine of the two knows the older one's version; the older one knows nothing of the newer."""
    mine, theirs = engine_metadata("decode", runtime="2"), engine_metadata("prefill", runtime="3")
    if who == "reader":
        mine = msgspec.structs.replace(mine, accepts={"runtime": ["1", "3"]})
    if who == "source":
        theirs = msgspec.structs.replace(theirs, accepts={"runtime": ["2"]})
    mine = msgspec.structs.replace(mine, accepts={**mine.accepts, "model": ["b"]})
    if who == "neither":
        with pytest.raises(LayoutMismatch, match="runtime is '3' there and '2' here"):
            check_compatibility(mine, theirs)
    else:
        check_compatibility(mine, theirs)
        check_compatibility(theirs, mine)


def replace_info(engine_metadata: EngineMetadata, other: EngineMetadata) -> EngineMetadata:
    return msgspec.structs.replace(engine_metadata, compatibility=dict(other.compatibility))


def test_an_address_is_written_as_zeromq_wants_it() -> None:
    assert (str(Address("::1", 5)), str(replace(LOCAL, port=7))) == ("tcp://[::1]:5", "tcp://127.0.0.1:7")
    assert Address("[::1]", 5) == Address("::1", 5)


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_engines_meet_over_ipv6(host: str) -> None:
    with socket.socket(socket.AF_INET6) as probe:
        if probe.connect_ex(("::1", 9)) == errno.EADDRNOTAVAIL:
            pytest.skip("no IPv6 on the loopback of this machine")
    listener = HandshakeServer(Address(host, 0), engine_metadata(model="m"))
    try:
        assert fetch_engine_metadata(Address(host, listener.address.port), "decode", 0, 5.0) == engine_metadata(
            model="m"
        )
    finally:
        listener.close()
