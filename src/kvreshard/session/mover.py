"""What a rank carries out requests with: a transport that knows the peers, its own memory, a buffer for staged reads, and room for lease words."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
from msgspec.structs import replace

from kvreshard.model.errors import UsageError
from kvreshard.model.expect import expect
from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.copies import Copies, CopyList
from kvreshard.plan.fill import find_holes
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch
from kvreshard.session.lease import WORD_BYTES
from kvreshard.transport.base import Direction, MemoryRegion, Transfer, Transport, TransportError
from kvreshard.transport.local import LocalMemory

NUM_HALVES = 2
SCRATCH_WORDS = 1 << 14
NO_PLACE = 0


@dataclass(slots=True, eq=False)
class Staging:
    """A registered buffer for staged copies. One request at a time has it, since `taken_s`, and reads into one half while the other is permuted."""

    address: int
    size_bytes: int
    taken_s: float = 0.0
    _taken: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_taken(self) -> bool:
        return self._taken.locked()

    def take(self, now_s: float) -> bool:
        """Take it if it is free; whether that worked."""
        is_free = self._taken.acquire(blocking=False)
        self.taken_s = now_s if is_free else self.taken_s
        return is_free

    def give(self) -> None:
        """Give it back."""
        self._taken.release()

    @property
    def half_bytes(self) -> int:
        """Bytes of one half, which one batch fills."""
        return self.size_bytes // NUM_HALVES

    def half(self, number: int) -> int:
        """Address of the half that the batch of this number fills."""
        return self.address + number % NUM_HALVES * self.half_bytes


def reads_into(address: int, batch: Batch) -> CopyList:
    """The reads of a batch into the half at an address."""
    reads = batch.reads
    return replace(reads, dst_address=reads.dst_address + address)


class Scratch:
    """Registered memory into which a rank reads the lease words of its sources, 8 bytes per source rank of a load: first fit, of `num_words` words."""

    def __init__(self, num_words: int = SCRATCH_WORDS) -> None:
        self._words = np.zeros(num_words, dtype=np.uint64)
        # One byte per word: 0 if it is free.
        self._is_taken = bytearray(num_words)
        self._num_words: dict[int, int] = {}

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(int(self._words.ctypes.data), self._words.nbytes)

    def __len__(self) -> int:
        """Places that are taken."""
        return len(self._num_words)

    def take(self, num_words: int) -> int | None:
        """The address of `num_words` free words, None while there are none. A load without sources gets `NO_PLACE`."""
        if not num_words:
            return NO_PLACE
        start = self._is_taken.find(bytes(num_words))
        if start < 0:
            return None
        self._is_taken[start : start + num_words] = b"\1" * num_words
        address = self.region.address + start * WORD_BYTES
        self._num_words[address] = num_words
        return address

    def give(self, address: int | None) -> None:
        """Free a place. An address that is not taken, or None, changes nothing."""
        num_words = 0 if address is None else self._num_words.pop(address, 0)
        if address is not None and num_words:
            start = (address - self.region.address) // WORD_BYTES
            self._is_taken[start : start + num_words] = bytes(num_words)


@dataclass(frozen=True, slots=True)
class Mover:
    """`peers`: rank of the other engine -> the name it was added under. `timeout_s` bounds the wait for one transfer."""

    transport: Transport
    memory: LocalMemory
    peers: Mapping[int, str]
    staging: Staging | None = None
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        for what, part, method in (("transport", self.transport, "post"), ("memory", self.memory, "zero")):
            if not callable(getattr(part, method, None)):
                raise UsageError(
                    f"the {what} of a mover is of type {type(part).__name__}; write Mover(transport, memory, peers)"
                )
        expect(self.peers, Mapping, "the peers of a mover", "rank of the other engine -> the name given to `add_peer`")
        if self.staging is not None:
            expect(self.staging, Staging, "the staging of a mover", "a registered buffer, or None")
        expect(self.timeout_s, Real, "timeout_s of a mover", "seconds")
        if not 0 <= self.timeout_s <= threading.TIMEOUT_MAX:
            raise UsageError(
                f"timeout_s of a mover is {self.timeout_s}, and must be from 0 to {threading.TIMEOUT_MAX:.0f} seconds"
            )
        if not callable(self.clock):
            raise UsageError(
                f"the clock of a mover is of type {type(self.clock).__name__}, and must be a function that returns seconds"
            )

    def post(self, direction: Direction, copies: Copies) -> Transfer:
        """Post copies to the peer that they name. Raises TransportError."""
        rank = copies.src_rank if direction is Direction.READ else copies.dst_rank
        if rank not in self.peers:
            known = ", ".join(map(str, self.peers)) or "none"
            raise TransportError(f"rank {rank} is not among the peers of this mover, which are {known}; add it to them")
        return self.transport.post(self.peers[rank], direction, copies)

    def fill(self, dst: EngineLayout, route: Route, request: Request) -> int:
        """Zero what no copy of a checked request writes in its new pages; returns bytes."""
        holes = find_holes(dst, route, request)
        self.memory.zero(holes.start, holes.stop)
        return int((holes.stop - holes.start).sum())
