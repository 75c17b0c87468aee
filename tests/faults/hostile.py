"""Clients that a listener must survive. Each connects to a port and returns what it keeps open while the next one is served.

They speak raw TCP, or ZMTP 3.0 by hand, since ZeroMQ's own sockets refuse to misbehave.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable, Iterator

import msgspec

Port = int
Kept = list[socket.socket]
CLIENTS: dict[str, Callable[[Port], Kept]] = {}

REQUEST = {"form": "kvreshard.handshake", "version": 1, "ask": "metadata", "engine": "d", "rank": 0}
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
# A hostile client never waits for long: what the server does not take within this is not sent.
PATIENCE_S = 5.0


def client(function: Callable[[Port], Kept]) -> Callable[[Port], Kept]:
    CLIENTS[function.__name__] = function
    return function


def dial(port: Port) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain


def said(port: Port, *parts: bytes) -> Kept:
    """Send raw bytes and stay connected."""
    plain = dial(port)
    push(plain, b"".join(parts))
    return [plain]


def push(plain: socket.socket, content: bytes) -> bool:
    """Send as long as the other side takes it; False once it does not."""
    try:
        plain.sendall(content)
    except OSError:
        return False
    return True


def frame(payload: bytes, *, more: bool = False, command: bool = False) -> bytes:
    flags = (1 if more else 0) | (4 if command else 0)
    if len(payload) < 256:
        return bytes([flags, len(payload)]) + payload
    return bytes([flags | 2]) + struct.pack(">Q", len(payload)) + payload


def ready(socket_type: bytes = b"DEALER", **properties: bytes) -> bytes:
    found = {"Socket-Type": socket_type, **properties}
    parts = (bytes([len(k)]) + k.encode() + struct.pack(">I", len(v)) + v for k, v in found.items())
    return frame(b"\x05READY" + b"".join(parts), command=True)


def peer(port: Port, socket_type: bytes = b"DEALER", **properties: bytes) -> socket.socket:
    """A connection that has done ZeroMQ's handshake properly, as far as the server goes along."""
    plain = dial(port)
    plain.sendall(GREETING)
    with contextlib.suppress(OSError):
        plain.recv(64, socket.MSG_WAITALL)
        plain.sendall(ready(socket_type, **properties))
        # libzmq takes no message before it has sent its own READY.
        header = plain.recv(2, socket.MSG_WAITALL)
        if len(header) == 2 and header[0] == 4:
            plain.recv(header[1], socket.MSG_WAITALL)
    return plain


def told(port: Port, *payloads: object) -> Kept:
    """Well-formed messages of two frames: an empty one and the payload, as msgpack unless it is bytes."""
    plain = peer(port)
    for payload in payloads:
        content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
        push(plain, frame(b"", more=True) + frame(content))
    return [plain]


# What is not ZeroMQ at all.


@client
def connects_and_leaves(port: Port) -> Kept:
    dial(port).close()
    return []


@client
def connects_and_says_nothing(port: Port) -> Kept:
    return [dial(port)]


@client
def resets_in_the_middle(port: Port) -> Kept:
    (plain,) = said(port, GREETING[:40])
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    plain.close()
    return []


@client
def speaks_http(port: Port) -> Kept:
    return said(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


@client
def speaks_tls(port: Port) -> Kept:
    return said(port, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", os.urandom(506))


@client
def speaks_noise(port: Port) -> Kept:
    noise = random.Random(5)
    return [kept for size in (1, 9, 10, 63, 64, 65, 4000) for kept in said(port, noise.randbytes(size))]


@client
def sends_zeros(port: Port) -> Kept:
    return said(port, b"\0" * 100_000)


@client
def greets_in_an_old_version(port: Port) -> Kept:
    return (
        said(port, b"\xff" + b"\0" * 8 + b"\x7f\x00\x05\x00\x00")
        + said(port, b"\x01\x00")
        + said(port, b"\x05\x00abcd")
    )


@client
def greets_byte_by_byte_and_stops(port: Port) -> Kept:
    plain = dial(port)
    for byte in GREETING[:20]:
        plain.sendall(bytes([byte]))
    return [plain]


@client
def stops_after_each_byte_of_the_greeting(port: Port) -> Kept:
    return [kept for length in range(len(GREETING)) for kept in said(port, GREETING[:length])]


@client
def wants_an_unknown_mechanism(port: Port) -> Kept:
    return said(port, GREETING[:12], b"MAGIC".ljust(20, b"\0"), b"\0" * 32, b"\x04\x20" + b"x" * 32)


@client
def wants_plain_passwords(port: Port) -> Kept:
    handshake_message = frame(b"\x05HELLO\x05admin\x05admin", command=True)
    return said(port, GREETING[:12], b"PLAIN".ljust(20, b"\0"), b"\0" * 32, handshake_message)


@client
def wants_keys_and_sends_noise(port: Port) -> Kept:
    handshake_message = frame(b"\x05HELLO" + os.urandom(194), command=True)
    return said(port, GREETING[:12], b"CURVE".ljust(20, b"\0"), b"\0" * 32, handshake_message)


# ZeroMQ, misused.


@client
def is_of_a_strange_socket_type(port: Port) -> Kept:
    return [peer(port, kind) for kind in (b"SUB", b"XPUB", b"ROUTER", b"PAIR", b"", b"x" * 255)]


@client
def has_huge_properties(port: Port) -> Kept:
    return [peer(port, Identity=b"x" * size) for size in (255, 256, 60_000, 1_000_000)]


@client
def has_a_property_longer_than_its_message(port: Port) -> Kept:
    lying = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 2**31 - 1) + b"DEALER"
    return said(port, GREETING, frame(lying, command=True))


@client
def announces_more_than_there_is(port: Port) -> Kept:
    kept = []
    for size in (60_000, 2**31, 2**63 - 1, 2**64 - 1):
        plain = peer(port)
        push(plain, b"\x02" + struct.pack(">Q", size) + b"x" * 10)
        kept.append(plain)
    return kept


@client
def sends_too_large_a_hello(port: Port) -> Kept:
    return told(port, b"x" * (64 * 1024 + 1)) + told(port, b"x" * 4_000_000)


@client
def never_ends_its_message(port: Port) -> Kept:
    plain = peer(port)
    part = frame(b"x" * 60_000, more=True)
    for _ in range(2000):
        if not push(plain, part):
            break
    return [plain]


@client
def sends_a_thousand_frames(port: Port) -> Kept:
    plain = peer(port)
    push(plain, frame(b"", more=True) * 1000 + frame(msgspec.msgpack.encode(REQUEST)))
    return [plain]


@client
def sends_one_frame_only(port: Port) -> Kept:
    plain = peer(port)
    push(plain, frame(b"") + frame(msgspec.msgpack.encode(REQUEST)))
    return [plain]


@client
def uses_one_name_twice(port: Port) -> Kept:
    kept = [peer(port, Identity=b"twin") for _ in range(3)]
    for plain in kept:
        push(plain, frame(b"", more=True) + frame(msgspec.msgpack.encode(REQUEST)))
    return kept


@client
def sends_unknown_commands(port: Port) -> Kept:
    plain = peer(port)
    for name in (b"\x04PING", b"\x05ERROR\x00", b"\x04JOIN", b"\x09SUBSCRIBE", b"\xff" * 40, b""):
        push(plain, frame(name, command=True))
    return [plain]


@client
def pings_without_end(port: Port) -> Kept:
    plain = peer(port)
    push(plain, frame(b"\x04PING\x00\x00" + b"x" * 16, command=True) * 20_000)
    return [plain]


# Well-formed messages with something else in them.


@client
def says_nothing_in_a_message(port: Port) -> Kept:
    return told(port, b"")


@client
def says_noise(port: Port) -> Kept:
    noise = random.Random(7)
    return told(port, *(noise.randbytes(size) for size in range(200)))


@client
def truncates_its_hello(port: Port) -> Kept:
    whole = msgspec.msgpack.encode(REQUEST)
    return told(port, *(whole[:length] for length in range(len(whole))))


@client
def nests_deeply(port: Port) -> Kept:
    return told(port, b"\x91" * 60_000, b"\x81\xa1x" * 20_000)


@client
def announces_huge_containers(port: Port) -> Kept:
    return told(
        port, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"
    )


@client
def sends_values_out_of_range(port: Port) -> Kept:
    wrong: Iterator[dict[str, object]] = (
        {**REQUEST, key: value}
        for key in (*REQUEST, "reads_card", "is_good", "text")
        for value in (-1, 0, 2**63, 2**64 - 1, -(2**63), 1.5, None, "", "x" * 5000, [], {}, True, b"\xff")
    )
    return [kept for value in wrong for kept in told(port, value)]


@client
def writes_into_the_log(port: Port) -> Kept:
    text = "ok\nERROR everything is lost\r\x1b[2J\u202e"
    return told(port, {**REQUEST, "engine": text}, {**REQUEST, "ask": "outcome", "text": text, "engine": text})


@client
def sends_text_that_is_not_utf8(port: Port) -> Kept:
    return told(port, msgspec.msgpack.encode(REQUEST).replace(b"\xa6engine\xa1d", b"\xa6engine\xa1\xff"))


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return (os._exit, (66,))


@client
def sends_a_pickle(port: Port) -> Kept:
    return told(port, pickle.dumps(_Bomb()))


@client
def speaks_as_another_connector(port: Port) -> Kept:
    return told(port, [b"get_meta_msg", 0, 7]) + told(port, [b"get_meta_msg", 99, 99], 5)


# Too much of what is allowed.


@client
def replays_one_hello(port: Port) -> Kept:
    plain = peer(port)
    push(plain, (frame(b"", more=True) + frame(msgspec.msgpack.encode(REQUEST))) * 5000)
    return [plain]


@client
def asks_and_never_reads(port: Port) -> Kept:
    return [kept for _ in range(64) for kept in told(port, *[REQUEST] * 16)]


@client
def floods_with_outcomes(port: Port) -> Kept:
    return [
        kept
        for rank in range(20)
        for kept in told(
            port, *({**REQUEST, "ask": "outcome", "rank": rank * 100 + i, "text": "x" * 2000} for i in range(100))
        )
    ]


@client
def floods_with_noise(port: Port) -> Kept:
    return [kept for _ in range(20) for kept in told(port, *[b"x" * 60_000] * 100)]


@client
def opens_a_thousand_connections(port: Port) -> Kept:
    return [plain for _ in range(1000) for plain in dial_if_there(port)]


@client
def comes_and_goes(port: Port) -> Kept:
    for _ in range(500):
        for plain in dial_if_there(port):
            plain.close()
    return []


@client
def holds_many_finished_connections(port: Port) -> Kept:
    return [kept for _ in range(200) for kept in told(port)]


def dial_if_there(port: Port) -> Kept:
    """A flood does not stop because one of its connections was refused."""
    with contextlib.suppress(OSError):
        return [dial(port)]
    return []
