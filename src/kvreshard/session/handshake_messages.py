"""The messages of handshakes: a `HandshakeMessage` asks for engine metadata or transfers, or reports how comparing the metadata went.

A `HandshakeAnswer` is one line.

Nothing is unpickled; texts are short and in one line.

A message travels as the first of three values, for the reason that `nixl_connector` gives.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Literal

import msgspec

from kvreshard.model.errors import KvReshardError
from kvreshard.model.form import SAME_RELEASE
from kvreshard.model.text import Name, plain

FORM = "kvreshard.handshake"
ANSWER_FORM = "kvreshard.handshake_answer"
VERSION = 1
MAX_MESSAGE_BYTES = 64 * 1024
MAX_TEXT = 2000
MAX_GROUPS = 256
MAX_TRANSFERS = 256
# Of a question without its transfers, at most: names of an engine and of who asks.
MAX_FRAME_BYTES = 4096


class HandshakeError(KvReshardError):
    """A peer could not be asked, or did not answer as it should."""


class TransferQuestion(msgspec.Struct, frozen=True):
    """A transfer that is asked for, by the id that a router chose, and what the reader knows of it: the lease word, 0 for nothing, and the
    number of pages of each group.

    `is_heard`: it knows that the source has the request. `only_end`: it wants to hear of nothing but the end, good or bad, and of when the
    source expects to compute for `lead_s` more seconds at most, if that is not 0.
    """

    transfer: Name
    word: Annotated[int, msgspec.Meta(ge=0)] = 0
    num_pages: Annotated[dict[Name, Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=MAX_GROUPS)] = {}
    only_end: bool = False
    is_heard: bool = False
    lead_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0


class HandshakeMessage(msgspec.Struct, frozen=True):
    """`ask`: for the engine metadata, for `transfers` (`session.statement`), or the outcome of comparing the metadata (`text`: the route in a
    sentence, or why there is none; of a question for transfers, who asks).
    """

    form: str
    version: int
    ask: Literal["metadata", "outcome", "transfers"]
    engine: Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    text: str = ""
    is_good: bool = True
    transfers: Annotated[tuple[TransferQuestion, ...], msgspec.Meta(max_length=MAX_TRANSFERS)] | msgspec.UnsetType = (
        msgspec.UNSET
    )


class HandshakeAnswer(msgspec.Struct, frozen=True):
    """The answer to everything but a request for engine metadata."""

    form: str
    version: int
    text: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens. An IPv6 address may be given in brackets."""

    host: str
    port: int

    def __post_init__(self) -> None:
        if self.host.startswith("[") and self.host.endswith("]"):
            object.__setattr__(self, "host", self.host[1:-1])

    def __str__(self) -> str:
        return f"tcp://{self.host_port}"

    @property
    def host_port(self) -> str:
        """As people write it: `10.0.0.1:5600`, `[fe80::1]:5600`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. A name that does not resolve counts as reachable."""
        try:
            found = {str(entry[4][0]) for entry in socket.getaddrinfo(self.host, None)}
        except OSError:
            return False
        return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def metadata_request(engine: str, rank: int) -> bytes:
    """The bytes of a request for engine metadata."""
    return _encode(HandshakeMessage(FORM, VERSION, "metadata", engine, rank))


def outcome_message(engine: str, rank: int, text: str, is_good: bool) -> bytes:
    """The bytes of a report of how the comparison of engine metadata went."""
    return _encode(HandshakeMessage(FORM, VERSION, "outcome", engine, rank, text[:MAX_TEXT], is_good))


def transfers_request(engine: str, rank: int, transfers: Sequence[TransferQuestion], asker: str) -> bytes:
    """The bytes of a question for transfers. It replaces the one that `asker`, a name that nobody guesses, has asked before."""
    return _encode(HandshakeMessage(FORM, VERSION, "transfers", engine, rank, asker, transfers=tuple(transfers)))


def count_fitting(transfers: Iterable[TransferQuestion]) -> int:
    """How many of some transfers, from the first on, one question may have: as many as there is room for, and at least one."""
    number, left = 0, MAX_MESSAGE_BYTES - MAX_FRAME_BYTES
    for known in islice(transfers, MAX_TRANSFERS):
        left -= len(msgspec.msgpack.encode(known))
        if number and left < 0:
            break
        number += 1
    return number


def _encode(message: HandshakeMessage) -> bytes:
    return msgspec.msgpack.encode((message, 0, 0))


def encode_answer(text: str) -> bytes:
    """The bytes of an answer."""
    return msgspec.msgpack.encode(HandshakeAnswer(ANSWER_FORM, VERSION, text))


_message_decoder = msgspec.msgpack.Decoder(tuple[HandshakeMessage, int, int])
_answer_decoder = msgspec.msgpack.Decoder(HandshakeAnswer)


def read_message(payload: bytes) -> HandshakeMessage | str:
    """A handshake message from anybody, or what is wrong with it. Never raises."""
    try:
        message, _, _ = _message_decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        return f"not a kvreshard handshake message: {plain(error, MAX_TEXT)}"
    if message.form != FORM:
        return f"not a kvreshard handshake message, but '{plain(message.form, 80)}'"
    if message.version != VERSION:
        return f"handshake message of version {message.version}; this side reads version {VERSION}: {SAME_RELEASE}"
    if len(message.text) > MAX_TEXT:
        return f"texts of more than {MAX_TEXT} characters are not accepted"
    return message


def read_answer(reply: bytes) -> str | None:
    """What a listener answered instead of engine metadata, in one line; None if it is no answer. Never raises."""
    try:
        answer = _answer_decoder.decode(reply)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        return None
    return plain(answer.text, MAX_TEXT) if answer.form == ANSWER_FORM else None
