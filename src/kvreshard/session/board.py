"""Where does a source rank put its answers, so that a reader gets them without being known to the source?

A reader knows its sources, not the other way round: a source has no connection to answer on, and should not open one for
whoever asks. So answers go the way of lease words: into registered memory of the source, where the reader reads them.

1. An `AnswerBoard` has entries of 64 bytes. An answer's place follows from the question's token, a random number.
2. An entry is token, what is said, digest, bytes, and a seal over all of it. A reader that sees half an answer, an older one, or
   another's at the same place, sees no valid seal for its token and reads again.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum

from kvreshard.transport.base import MemoryRegion

ENTRY_BYTES = 64
# 512 KiB. A reader has 16 questions under way, at different places; where two readers meet at one, one asks again.
NUM_ENTRIES = 1 << 13
_BODY = struct.Struct("<QQQQ")
_SEALED = struct.Struct("<QQQQ8s")


class Said(IntEnum):
    """What an answer says. Everything but `DIGEST` is a refusal."""

    DIGEST = 1
    NO_LEASE = 2
    NOT_READABLE = 3
    NOT_A_QUESTION = 4
    TOO_MUCH = 5
    FAULT = 6


@dataclass(frozen=True, slots=True)
class Answer:
    """One entry: the digest's value and how many bytes it covers, or why there is none."""

    token: int
    said: Said
    value: int = 0
    num_bytes: int = 0


class AnswerBoard:
    """A source rank's answers, in page-aligned memory that peers may read."""

    def __init__(self, num_entries: int = NUM_ENTRIES) -> None:
        self._memory = mmap.mmap(-1, num_entries * ENTRY_BYTES)
        self._num_entries = num_entries
        self._address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))

    def __len__(self) -> int:
        return self._num_entries

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self._address, self._num_entries * ENTRY_BYTES)

    def put(self, answer: Answer) -> None:
        """Write an answer over whatever was at its place."""
        at = entry_offset(answer.token, self._num_entries)
        self._memory[at : at + _SEALED.size] = _seal(answer)

    def has(self, token: int) -> bool:
        """Whether the question has been answered, and the answer still stands."""
        return read_answer(self._address + entry_offset(token, self._num_entries), token) is not None


def entry_offset(token: int, num_entries: int) -> int:
    """Where the answer of a question stands, in bytes from the board's start."""
    return token % num_entries * ENTRY_BYTES


def read_answer(address: int, token: int) -> Answer | None:
    """The answer at a local address, a copy of an entry; None unless it is whole and this token's."""
    found, said, value, num_bytes, seal = _SEALED.unpack(ctypes.string_at(address, _SEALED.size))
    if found != token or seal != _digest(_BODY.pack(found, said, value, num_bytes)):
        return None
    known = said in Said.__members__.values()
    return Answer(token, Said(said) if known else Said.FAULT, value, num_bytes)


def _seal(answer: Answer) -> bytes:
    body = _BODY.pack(answer.token, answer.said, answer.value, answer.num_bytes)
    return body + _digest(body)


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()
