"""What a rank carries out requests with: a transport that knows the peers, its own memory, and a buffer for staged reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.copies import Copies, CopyList
from kvreshard.plan.fill import find_holes
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch
from kvreshard.transport.base import Direction, Transfer, Transport, TransportError
from kvreshard.transport.local import LocalMemory

NUM_HALVES = 2


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


@dataclass(frozen=True, slots=True)
class Mover:
    """`peers`: rank of the other engine -> the name it was added under. `timeout_s` bounds the wait for one transfer."""

    transport: Transport
    memory: LocalMemory
    peers: Mapping[int, str]
    staging: Staging | None = None
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.monotonic

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
