"""What a rank needs to carry out requests: a transport that knows the peers, and its own memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.copies import Copies
from kvreshard.plan.fill import find_holes
from kvreshard.plan.route import Route
from kvreshard.session.staging import Staging
from kvreshard.transport.base import Direction, Transfer, Transport
from kvreshard.transport.local import LocalMemory


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
        peer = self.peers[copies.src_rank if direction is Direction.READ else copies.dst_rank]
        return self.transport.post(peer, direction, copies)

    def fill(self, dst: EngineLayout, route: Route, request: Request) -> int:
        """Zero what no copy of a checked request writes in its new pages; returns bytes."""
        holes = find_holes(dst, route, request)
        self.memory.zero(holes.start, holes.stop)
        return int((holes.stop - holes.start).sum())
