"""How is one request carried out on a transport, from route to settled bytes, by a thread that waits for it?

`pull` runs on the destination rank and drives the steps of `session.pull` to their end, then reports to the source ranks
that the election appoints, readers and unread ones. `push` runs on a source rank and writes the lanes that it is the
source of; it always posts runs directly, since a destination page that several sources fill can not be written whole.

Refused: BindError before anything moves. Raises TransportError, after all transfers have settled, when one failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.bind import bind
from kvreshard.plan.copies import CopyList
from kvreshard.plan.fill import find_unwritten
from kvreshard.plan.route import Route
from kvreshard.session.pull import LeaseProof, Moved, Staging, Steps, pull_steps
from kvreshard.session.pull import post as post_copies
from kvreshard.transport.base import Direction, Transfer, Transport, TransportError
from kvreshard.transport.local import LocalMemory

STAGING_POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Mover:
    """What a rank needs to carry out requests: a transport that knows the peers, and its own memory.

    `peers`: rank of the other engine -> the name it was added under. `timeout_s` bounds the wait for one transfer.
    """

    transport: Transport
    memory: LocalMemory
    peers: Mapping[int, str]
    staging: Staging | None = None
    timeout_s: float = 60.0
    clock: Callable[[], float] = time.monotonic

    def pull(
        self,
        route: Route,
        request: Request,
        dst: EngineLayout,
        report: bytes = b"",
        lease: LeaseProof | None = None,
    ) -> Moved:
        """Read everything that the route's destination rank needs; `report` goes to the sources it reports to."""
        moved = self._drive(pull_steps(self, route, request, dst, lease))
        if report:
            for src_rank, reporters in route.reporters.items():
                if route.dst_rank in reporters:
                    self.transport.notify(self.peers[src_rank], report)
        return moved

    def push(self, routes: Iterable[Route], request: Request, src_rank: int) -> Moved:
        """Write what `src_rank` is the source of in the routes of the destination ranks."""
        started_s = self.clock()
        mine = [replace(r, lanes=tuple(lane for lane in r.lanes if lane.src_rank == src_rank)) for r in routes]
        lists = [copies for route in mine for copies in bind(route, request)]
        bind_s = self.clock() - started_s
        self._settle([self.post(Direction.WRITE, copies) for copies in lists])
        num_bytes, num_copies = sum(c.num_bytes for c in lists), sum(c.num_copies for c in lists)
        return Moved(num_bytes, num_bytes, num_copies, 0, bind_s, self.clock() - started_s)

    def fill(self, dst: EngineLayout, dst_rank: int, request: Request, copies: Iterable[CopyList]) -> int:
        """Zero what `copies`, all copies of the request to this rank, do not write in its new pages; returns bytes."""
        holes = find_unwritten(dst, dst_rank, request, copies)
        self.memory.zero(holes.start, holes.stop)
        return int((holes.stop - holes.start).sum())

    def post(self, direction: Direction, copies: CopyList) -> Transfer:
        """Post a copy list of the planner to the peer that it names."""
        return post_copies(self, direction, copies)

    def _drive(self, steps: Steps) -> Moved:
        try:
            waiting = next(steps)
            while True:
                if waiting is None:
                    time.sleep(STAGING_POLL_S)
                    waiting = next(steps)
                    continue
                try:
                    with contextlib.suppress(TransportError):  # the steps look at it themselves
                        waiting.wait(self.timeout_s)
                except TimeoutError as late:
                    waiting = steps.throw(late)
                else:
                    waiting = next(steps)
        except StopIteration as done:
            moved: Moved = done.value
            return moved

    def _settle(self, transfers: list[Transfer]) -> None:
        error: TransportError | TimeoutError | None = None
        for transfer in transfers:
            try:
                transfer.wait(self.timeout_s)
            except (TransportError, TimeoutError) as failed:
                error = error or failed
        if error is not None:
            raise error
