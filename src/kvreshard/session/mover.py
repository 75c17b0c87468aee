"""What does a rank need to carry out requests? A transport that knows the peers, and its own memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.copies import CopyList, PageCopies, PageFrame
from kvreshard.plan.fill import find_holes
from kvreshard.plan.route import Route
from kvreshard.session.staging import Staging
from kvreshard.transport.base import Copies, Direction, Transfer, Transport
from kvreshard.transport.framed import Frame, FramedCopies
from kvreshard.transport.local import LocalMemory
from kvreshard.transport.placed import ByObject


@dataclass(frozen=True, slots=True)
class Mover:
    """`peers`: rank of the other engine -> the name it was added under. `timeout_s` bounds the wait for one transfer."""

    transport: Transport
    memory: LocalMemory
    peers: Mapping[int, str]
    staging: Staging | None = None
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _frames: ByObject[PageFrame, Frame] = field(default_factory=ByObject, init=False, compare=False, repr=False)

    def post(self, direction: Direction, copies: CopyList | PageCopies) -> Transfer:
        """Post copies of the planner to the peer that they name. Raises TransportError."""
        reading = direction is Direction.READ
        peer = self.peers[copies.src_rank if reading else copies.dst_rank]
        return self.transport.post(peer, direction, self.ready(direction, copies))

    def ready(self, direction: Direction, copies: CopyList | PageCopies) -> Copies | FramedCopies:
        """The same copies as a transport sees them, from the side that posts."""
        reading = direction is Direction.READ
        if isinstance(copies, PageCopies):
            if reading:
                return FramedCopies(self._frame(copies.frame), copies.dst_page, copies.src_page, copies.run_pages)
            copies = copies.flat()
        local, remote = copies.dst_address, copies.src_address
        if not reading:
            local, remote = remote, local
        return Copies.of(local, remote, copies.length)

    def _frame(self, frame: PageFrame) -> Frame:
        """What a reader's transport knows a frame by: one object per frame, so that it is prepared once."""
        found = self._frames.get(frame)
        if found is not None:
            return found
        made = Frame.of(
            frame.dst_start,
            frame.src_start,
            frame.length,
            frame.dst_stride_bytes,
            frame.src_stride_bytes,
            frame.dst_count,
            frame.src_count,
        )
        return self._frames.put(frame, made)

    def fill(self, dst: EngineLayout, route: Route, request: Request) -> int:
        """Zero what no copy of a checked request writes in its new pages on the route's destination rank; returns bytes."""
        holes = find_holes(dst, route, request)
        self.memory.zero(holes.start, holes.stop)
        return int((holes.stop - holes.start).sum())
