"""How does an engine hand out its card, and how does a peer get it?

A `Listener` is one thread with one ZeroMQ ROUTER socket that answers hellos with the engine's card. `fetch_card` asks for it
and waits no longer than it is told. After a peer has compared, `tell_outcome` says how it went, so that a refusal stands in
both logs.

Whatever arrives, the listener lives: messages above `MAX_HELLO_BYTES` are dropped by ZeroMQ itself, everything else that is
not a hello gets one line as answer or none. Nothing is unpickled. Refused: a port that is taken (KvReshardError); a peer that
does not answer, or answers something else (HandshakeError).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import zmq

from kvreshard.model.errors import KvReshardError, WireError
from kvreshard.session.card import MAX_CARD_BYTES, EngineCard, decode_card, encode_card

logger = logging.getLogger(__name__)

FORM = "kvreshard.hello"
ANSWER_FORM = "kvreshard.answer"
VERSION = 1
MAX_HELLO_BYTES = 64 * 1024
MAX_TEXT = 2000
POLL_MS = 200
# A hello may be lost with its connection; an answer of megabytes from a busy engine takes less than this.
ASK_AGAIN_S = 5.0


class HandshakeError(KvReshardError):
    """A peer could not be asked, or did not answer as it should."""


class Hello(msgspec.Struct, frozen=True):
    """What a peer says: `ask` for the card, or the outcome of comparing it (`text`: the route in a sentence, or why not)."""

    form: str
    version: int
    ask: Literal["card", "outcome"]
    engine: str
    rank: int
    text: str = ""
    is_good: bool = True


class Answer(msgspec.Struct, frozen=True):
    """What the listener says to everything but a request for its card."""

    form: str
    version: int
    text: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"


class Listener:
    """Serves `card` on `address` (port 0: any free one) until `close`. `on_outcome` is called on the listener's thread.

    Raises KvReshardError if the address cannot be bound.
    """

    def __init__(
        self, address: Address, card: EngineCard, on_outcome: Callable[[Hello], None] = lambda hello: None
    ) -> None:
        self._card = encode_card(card)
        self._on_outcome = on_outcome
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_HELLO_BYTES)
        self._socket.setsockopt(zmq.IPV6, int(":" in address.host))
        try:
            self._socket.bind(str(address))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise KvReshardError(
                f"cannot listen for handshakes on {address}: {error}; give each engine a port of its own, and a host that "
                "is an address of this machine"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Address(address.host, int(endpoint.rsplit(":", 1)[1]))
        self._thread = threading.Thread(target=self._run, name="kvreshard-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. A second call does nothing."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._socket.poll(POLL_MS):
                    continue
                try:
                    self._serve(self._socket.recv_multipart(zmq.NOBLOCK))
                except zmq.ZMQError as error:
                    logger.debug("a handshake was dropped: %s", error)
                except Exception:  # a fault here must not end the listener: every later handshake would hang
                    logger.exception("a handshake failed")
        finally:
            self._context.destroy(linger=0)

    def _serve(self, frames: Sequence[bytes]) -> None:
        *envelope, payload = frames
        if not envelope:
            return
        hello = read_hello(payload)
        if isinstance(hello, str):
            reply = msgspec.msgpack.encode(Answer(ANSWER_FORM, VERSION, hello))
        elif hello.ask == "card":
            reply = self._card
        else:
            self._on_outcome(hello)
            reply = msgspec.msgpack.encode(Answer(ANSWER_FORM, VERSION, "noted"))
        self._socket.send_multipart([*envelope, reply], zmq.NOBLOCK)


_hello_decoder = msgspec.msgpack.Decoder(Hello)


def read_hello(payload: bytes) -> Hello | str:
    """A hello from a stranger, or what is wrong with it."""
    try:
        hello = _hello_decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        return f"not a kvreshard hello: {str(error)[:MAX_TEXT]}"
    if hello.form != FORM:
        return f"not a kvreshard hello, but '{hello.form[:80]}'"
    if hello.version != VERSION:
        return f"hello of version {hello.version}; this side speaks version {VERSION}: upgrade the older side"
    if len(hello.text) > MAX_TEXT or len(hello.engine) > MAX_TEXT:
        return f"texts of more than {MAX_TEXT} characters are not accepted"
    return hello


def fetch_card(address: Address, engine: str, rank: int, timeout_s: float) -> EngineCard:
    """The card of the engine that listens there. Raises HandshakeError naming the address and the remedy."""
    reply = _ask(address, Hello(FORM, VERSION, "card", engine, rank), timeout_s)
    try:
        return decode_card(reply)
    except WireError as error:
        answer = _read_answer(reply)
        raise HandshakeError(f"the engine at {address} answered: {answer or error}") from error


def tell_outcome(address: Address, engine: str, rank: int, text: str, is_good: bool, timeout_s: float) -> None:
    """Tell the other side how the comparison went. Raises HandshakeError if it cannot be told."""
    _ask(address, Hello(FORM, VERSION, "outcome", engine, rank, text[:MAX_TEXT], is_good), timeout_s)


def _ask(address: Address, hello: Hello, timeout_s: float) -> bytes:
    """The listener's answer. Asks again on a fresh connection now and then: a hello changes nothing but a log."""
    deadline_s = time.monotonic() + timeout_s
    with zmq.Context() as context:
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise HandshakeError(
                    f"no kvreshard engine answers at {address} within {timeout_s:g} s; is it running, does it use "
                    "ReshardConnector, and can this host reach that port?"
                )
            reply = _ask_once(context, address, hello, min(left_s, ASK_AGAIN_S))
            if reply is not None:
                return reply


def _ask_once(context: zmq.Context[Any], address: Address, hello: Hello, timeout_s: float) -> bytes | None:
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CARD_BYTES)
        socket.setsockopt(zmq.IPV6, int(":" in address.host))
        try:
            socket.connect(str(address))
            socket.send_multipart([b"", msgspec.msgpack.encode(hello)])
            if not socket.poll(max(1, int(timeout_s * 1000))):
                return None
            frames: list[Any] = socket.recv_multipart()
        except zmq.ZMQError as error:
            raise HandshakeError(f"the engine at {address} cannot be asked: {error}") from error
    return bytes(frames[-1])


def _read_answer(reply: bytes) -> str | None:
    try:
        answer = msgspec.msgpack.decode(reply, type=Answer)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
    return answer.text[:MAX_TEXT] if answer.form == ANSWER_FORM else None
