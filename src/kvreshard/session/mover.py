"""What does a rank need to carry out requests? A transport that knows the peers, and its own memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.copies import CopyList
from kvreshard.plan.fill import find_unwritten
from kvreshard.transport.base import Copies, Direction, Transfer, Transport
from kvreshard.transport.local import LocalMemory


@dataclass(frozen=True, slots=True)
class Staging:
    """A registered buffer for staged lanes: `size_bytes` from `address`. One request at a time fills it."""

    address: int
    size_bytes: int
    taken: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Mover:
    """`peers`: rank of the other engine -> the name it was added under. `timeout_s` bounds the wait for one transfer."""

    transport: Transport
    memory: LocalMemory
    peers: Mapping[int, str]
    staging: Staging | None = None
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.monotonic

    def post(self, direction: Direction, copies: CopyList) -> Transfer:
        """Post a copy list of the planner to the peer that it names. Raises TransportError."""
        reading = direction is Direction.READ
        peer = self.peers[copies.src_rank if reading else copies.dst_rank]
        local, remote = copies.dst_address, copies.src_address
        if not reading:
            local, remote = remote, local
        return self.transport.post(peer, direction, Copies.of(local, remote, copies.length))

    def fill(self, dst: EngineLayout, dst_rank: int, request: Request, copies: Iterable[CopyList]) -> int:
        """Zero what `copies`, all copies of the request to this rank, do not write in its new pages; returns bytes."""
        holes = find_unwritten(dst, dst_rank, request, copies)
        self.memory.zero(holes.start, holes.stop)
        return int((holes.stop - holes.start).sum())
