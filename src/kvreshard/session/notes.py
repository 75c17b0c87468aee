"""The notifications between ranks, which travel through the transport: `Report` (a rank has done with a lease) and `Heartbeat` (leases still wanted).

Both carry the words of their leases, which only readers of the lease know: a rank cannot free another's pages by a guess.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

VERSION = 1
# Well below the transport's limit of 64 KiB per notification. A lease takes its name, its word, and the encoding of both.
MAX_HEARTBEAT_BYTES = 32 << 10
LEASE_BYTES = 20


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """`reporter`, a rank of engine `consumer`, has done with `request`; `reporters`: all ranks that report to this source rank."""

    version: int
    consumer: str
    request: str
    word: int
    reporter: int
    reporters: tuple[int, ...]
    is_good: bool = True


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag="heartbeat"):
    """Engine `consumer` still wants these (request, word) leases."""

    version: int
    consumer: str
    leases: tuple[tuple[str, int], ...]


Note = Report | Heartbeat
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Note)


def write_note(note: Note) -> bytes:
    """The bytes of a note."""
    return _encoder.encode(note)


def read_note(payload: bytes) -> Note | None:
    """The note, or None for anything else: another version, another program, noise. Never raises."""
    try:
        note = _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        return None
    return note if note.version == VERSION else None


def heartbeats(consumer: str, leases: Iterable[tuple[str, int]]) -> Iterator[Heartbeat]:
    """Heartbeats of at most `MAX_HEARTBEAT_BYTES` for all leases (request, word)."""
    together: list[tuple[str, int]] = []
    num_bytes = 0
    for request, word in leases:
        lease_bytes = len(request.encode()) + LEASE_BYTES
        if together and num_bytes + lease_bytes > MAX_HEARTBEAT_BYTES:
            yield Heartbeat(VERSION, consumer, tuple(together))
            together, num_bytes = [], 0
        together.append((request, word))
        num_bytes += lease_bytes
    if together:
        yield Heartbeat(VERSION, consumer, tuple(together))
