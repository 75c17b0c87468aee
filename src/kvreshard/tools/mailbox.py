"""Registered memory of a source rank that holds the answers to digest requests.

A source opens no connections to its readers. So a reader reads its answers, as it reads lease words.

An answer's place follows from the request's token, a random number. An entry is token, status, digest, size and a checksum of these. A reader
that finds half an answer, an older one or another reader's has no checksum for its token, and reads again.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum

from kvreshard.session.engine_metadata import MAILBOX_ENTRY_BYTES
from kvreshard.transport.base import MemoryRegion

# 512 KiB. A reader has 16 requests under way, at different places. Where two readers share a place, one repeats its request.
NUM_ENTRIES = 1 << 13
_BODY = struct.Struct("<QQQQ")
_ENTRY = struct.Struct("<QQQQ8s")


class Status(IntEnum):
    """Status of an answer. All but `DIGEST` are refusals."""

    DIGEST = 1
    NO_LEASE = 2
    NOT_READABLE = 3
    MALFORMED = 4
    TOO_MANY = 5
    FAULT = 6


@dataclass(frozen=True, slots=True)
class DigestAnswer:
    """One entry: the digest's value and the bytes that it covers, or why there is none."""

    token: int
    status: Status
    value: int = 0
    num_bytes: int = 0


class DigestMailbox:
    """The answers of one source rank, in page-aligned memory that peers may read."""

    def __init__(self, num_entries: int = NUM_ENTRIES) -> None:
        self._memory = mmap.mmap(-1, num_entries * MAILBOX_ENTRY_BYTES)
        self._num_entries = num_entries
        self._address = ctypes.addressof(ctypes.c_uint8.from_buffer(self._memory))

    def __len__(self) -> int:
        return self._num_entries

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(self._address, self._num_entries * MAILBOX_ENTRY_BYTES)

    def put(self, answer: DigestAnswer) -> None:
        """Write an answer at its place."""
        body = _BODY.pack(answer.token, answer.status, answer.value, answer.num_bytes)
        at = entry_offset(answer.token, self._num_entries)
        self._memory[at : at + _ENTRY.size] = body + _checksum(body)

    def has(self, token: int) -> bool:
        """Whether the mailbox still holds the answer to this token's request."""
        return read_answer(self._address + entry_offset(token, self._num_entries), token) is not None


def entry_offset(token: int, num_entries: int) -> int:
    """Place of an answer, in bytes from the mailbox's start."""
    return token % num_entries * MAILBOX_ENTRY_BYTES


def read_answer(address: int, token: int) -> DigestAnswer | None:
    """The answer at a local address, a copy of an entry; None unless it is whole and this token's."""
    found, status, value, num_bytes, checksum = _ENTRY.unpack(ctypes.string_at(address, _ENTRY.size))
    if found != token or checksum != _checksum(_BODY.pack(found, status, value, num_bytes)):
        return None
    is_known = status in Status.__members__.values()
    return DigestAnswer(token, Status(status) if is_known else Status.FAULT, value, num_bytes)


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8).digest()
