"""What do ranks tell one another through the transport's notifications, and how is a stranger's message survived?

Two kinds, as msgpack arrays behind a version: a `Report` (this rank has done with a request, well or badly) and a `Heartbeat`
(these requests are still wanted). Both carry the leases' words, which only those know who were told: a rank cannot free another's
pages by a guess. `read_note` gives None for everything that is not exactly one of them; nothing raises.

Notes of an earlier version are read: a later one may only add values at the end that have defaults. A note is written in the
newest version that both sides know, which a reader learns from the source's card (`reads_notes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

VERSION = 1
# Well below the transport's limit of 64 KiB per notification. A lease takes its name, its word, and what says so.
MAX_HEARTBEAT_BYTES = 32 << 10
LEASE_BYTES = 20


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """`reporter`, a rank of engine `consumer`, has done with `request`; `reporters`: all ranks that tell this source rank."""

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
_decoder = msgspec.msgpack.Decoder(Report | Heartbeat)


def write_note(note: Note) -> bytes:
    """The bytes of a note."""
    return _encoder.encode(note)


def read_note(payload: bytes) -> Note | None:
    """The note, or None for anything else: a later version, another program, noise."""
    try:
        note = _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        return None
    return note if 1 <= note.version <= VERSION else None


def heartbeats(consumer: str, leases: Iterable[tuple[str, int]], version: int = VERSION) -> Iterator[Heartbeat]:
    """As many heartbeats as it takes, in `version`."""
    together: list[tuple[str, int]] = []
    num_bytes = 0
    for request, word in leases:
        lease_bytes = len(request.encode()) + LEASE_BYTES
        if together and num_bytes + lease_bytes > MAX_HEARTBEAT_BYTES:
            yield Heartbeat(version, consumer, tuple(together))
            together, num_bytes = [], 0
        together.append((request, word))
        num_bytes += lease_bytes
    if together:
        yield Heartbeat(version, consumer, tuple(together))
