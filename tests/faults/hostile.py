"""Clients that a listener must survive. What each has opened stays open while the next one is served.

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

REQUEST = {"form": "kvreshard.handshake", "version": 1, "ask": "metadata", "engine": "d", "rank": 0}
# As it travels: the first of three values.
WHOLE = msgspec.msgpack.encode((REQUEST, 0, 0))
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
# A hostile client never waits for long: what the server does not take within this is not sent.
PATIENCE_S = 5.0


class Client(contextlib.ExitStack):
    """All connections of one client. Leaving it closes them, also those made before one was refused."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self.port = port

    def dial(self) -> socket.socket:
        plain = self.enter_context(socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return plain

    def say(self, *parts: bytes) -> socket.socket:
        """Send raw bytes and stay connected."""
        plain = self.dial()
        push(plain, b"".join(parts))
        return plain

    def join(self, socket_type: bytes = b"DEALER", **properties: bytes) -> socket.socket:
        """A connection that has done ZeroMQ's handshake properly, as far as the server goes along."""
        plain = self.dial()
        plain.sendall(GREETING)
        with contextlib.suppress(OSError):
            plain.recv(64, socket.MSG_WAITALL)
            plain.sendall(ready(socket_type, **properties))
            # libzmq takes no message before it has sent its own READY.
            header = plain.recv(2, socket.MSG_WAITALL)
            if len(header) == 2 and header[0] == 4:
                plain.recv(header[1], socket.MSG_WAITALL)
        return plain

    def tell(self, *payloads: object) -> socket.socket:
        """Well-formed messages of two frames: an empty one and the payload, as msgpack unless it is bytes."""
        plain = self.join()
        for payload in payloads:
            content = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
            push(plain, frame(b"", more=True) + frame(content))
        return plain


CLIENTS: dict[str, Callable[[Client], object]] = {}


def client(function: Callable[[Client], object]) -> Callable[[Client], object]:
    CLIENTS[function.__name__] = function
    return function


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


# What is not ZeroMQ at all.


@client
def connects_and_leaves(me: Client) -> None:
    me.dial().close()


@client
def connects_and_says_nothing(me: Client) -> None:
    me.dial()


@client
def resets_in_the_middle(me: Client) -> None:
    plain = me.say(GREETING[:40])
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    plain.close()


@client
def speaks_http(me: Client) -> None:
    me.say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


@client
def speaks_tls(me: Client) -> None:
    me.say(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", os.urandom(506))


@client
def speaks_noise(me: Client) -> None:
    noise = random.Random(5)
    for size in (1, 9, 10, 63, 64, 65, 4000):
        me.say(noise.randbytes(size))


@client
def sends_zeros(me: Client) -> None:
    me.say(b"\0" * 100_000)


@client
def greets_in_an_old_version(me: Client) -> None:
    me.say(b"\xff" + b"\0" * 8 + b"\x7f\x00\x05\x00\x00")
    me.say(b"\x01\x00")
    me.say(b"\x05\x00abcd")


@client
def greets_byte_by_byte_and_stops(me: Client) -> None:
    plain = me.dial()
    for byte in GREETING[:20]:
        plain.sendall(bytes([byte]))


@client
def stops_after_each_byte_of_the_greeting(me: Client) -> None:
    for length in range(len(GREETING)):
        me.say(GREETING[:length])


@client
def wants_an_unknown_mechanism(me: Client) -> None:
    me.say(GREETING[:12], b"MAGIC".ljust(20, b"\0"), b"\0" * 32, b"\x04\x20" + b"x" * 32)


@client
def wants_plain_passwords(me: Client) -> None:
    handshake_message = frame(b"\x05HELLO\x05admin\x05admin", command=True)
    me.say(GREETING[:12], b"PLAIN".ljust(20, b"\0"), b"\0" * 32, handshake_message)


@client
def wants_keys_and_sends_noise(me: Client) -> None:
    handshake_message = frame(b"\x05HELLO" + os.urandom(194), command=True)
    me.say(GREETING[:12], b"CURVE".ljust(20, b"\0"), b"\0" * 32, handshake_message)


# ZeroMQ, misused.


@client
def is_of_a_strange_socket_type(me: Client) -> None:
    for kind in (b"SUB", b"XPUB", b"ROUTER", b"PAIR", b"", b"x" * 255):
        me.join(kind)


@client
def has_huge_properties(me: Client) -> None:
    for size in (255, 256, 60_000, 1_000_000):
        me.join(Identity=b"x" * size)


@client
def has_a_property_longer_than_its_message(me: Client) -> None:
    lying = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 2**31 - 1) + b"DEALER"
    me.say(GREETING, frame(lying, command=True))


@client
def announces_more_than_there_is(me: Client) -> None:
    for size in (60_000, 2**31, 2**63 - 1, 2**64 - 1):
        plain = me.join()
        push(plain, b"\x02" + struct.pack(">Q", size) + b"x" * 10)


@client
def sends_too_large_a_hello(me: Client) -> None:
    me.tell(b"x" * (64 * 1024 + 1))
    me.tell(b"x" * 4_000_000)


@client
def never_ends_its_message(me: Client) -> None:
    plain = me.join()
    part = frame(b"x" * 60_000, more=True)
    for _ in range(2000):
        if not push(plain, part):
            break


@client
def sends_a_thousand_frames(me: Client) -> None:
    plain = me.join()
    push(plain, frame(b"", more=True) * 1000 + frame(WHOLE))


@client
def sends_one_frame_only(me: Client) -> None:
    plain = me.join()
    push(plain, frame(b"") + frame(WHOLE))


@client
def uses_one_name_twice(me: Client) -> None:
    for plain in [me.join(Identity=b"twin") for _ in range(3)]:
        push(plain, frame(b"", more=True) + frame(WHOLE))


@client
def sends_unknown_commands(me: Client) -> None:
    plain = me.join()
    for name in (b"\x04PING", b"\x05ERROR\x00", b"\x04JOIN", b"\x09SUBSCRIBE", b"\xff" * 40, b""):
        push(plain, frame(name, command=True))


@client
def pings_without_end(me: Client) -> None:
    plain = me.join()
    push(plain, frame(b"\x04PING\x00\x00" + b"x" * 16, command=True) * 20_000)


# Well-formed messages with something else in them.


@client
def says_nothing_in_a_message(me: Client) -> None:
    me.tell(b"")


@client
def says_noise(me: Client) -> None:
    noise = random.Random(7)
    me.tell(*(noise.randbytes(size) for size in range(200)))


@client
def truncates_its_hello(me: Client) -> None:
    me.tell(*(WHOLE[:length] for length in range(len(WHOLE))))


@client
def nests_deeply(me: Client) -> None:
    me.tell(b"\x91" * 60_000, b"\x81\xa1x" * 20_000)


@client
def announces_huge_containers(me: Client) -> None:
    me.tell(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")


@client
def sends_values_out_of_range(me: Client) -> None:
    wrong: Iterator[object] = (
        ({**REQUEST, key: value}, 0, 0)
        for key in (*REQUEST, "reads_card", "is_good", "text")
        for value in (-1, 0, 2**63, 2**64 - 1, -(2**63), 1.5, None, "", "x" * 5000, [], {}, True, b"\xff")
    )
    for value in wrong:
        me.tell(value)


@client
def writes_into_the_log(me: Client) -> None:
    text = "ok\nERROR everything is lost\r\x1b[2J\u202e"
    me.tell(({**REQUEST, "engine": text}, 0, 0), ({**REQUEST, "ask": "outcome", "text": text, "engine": text}, 0, 0))


@client
def sends_text_that_is_not_utf8(me: Client) -> None:
    me.tell(WHOLE.replace(b"\xa6engine\xa1d", b"\xa6engine\xa1\xff"))


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[int]]:
        return (os._exit, (66,))


@client
def sends_a_pickle(me: Client) -> None:
    me.tell(pickle.dumps(_Bomb()))


@client
def speaks_as_another_connector(me: Client) -> None:
    me.tell([b"get_meta_msg", 0, 7])
    me.tell([b"get_meta_msg", 99, 99], 5)


# Too much of what is allowed.


@client
def replays_one_hello(me: Client) -> None:
    plain = me.join()
    push(plain, (frame(b"", more=True) + frame(WHOLE)) * 5000)


@client
def asks_and_never_reads(me: Client) -> None:
    for _ in range(64):
        me.tell(*[WHOLE] * 16)


@client
def floods_with_outcomes(me: Client) -> None:
    for rank in range(20):
        me.tell(
            *(({**REQUEST, "ask": "outcome", "rank": rank * 100 + i, "text": "x" * 2000}, 0, 0) for i in range(100))
        )


@client
def floods_with_noise(me: Client) -> None:
    for _ in range(20):
        me.tell(*[b"x" * 60_000] * 100)


@client
def opens_a_thousand_connections(me: Client) -> None:
    for _ in range(1000):
        with contextlib.suppress(OSError):  # a flood does not stop because one of its connections was refused
            me.dial()


@client
def comes_and_goes(me: Client) -> None:
    for _ in range(500):
        with contextlib.suppress(OSError):
            me.dial().close()


@client
def holds_many_finished_connections(me: Client) -> None:
    for _ in range(200):
        me.tell()
