"""How is one request carried out on a transport, from route to settled bytes?

`pull` runs on the destination rank:

1. Bind (or stage) the route for the request; nothing is posted if that is refused.
2. Post the direct lanes at once. Fill the staging buffer batch by batch, permuting each when its reads are done.
3. Zero what no copy writes in newly allocated pages, while the reads run.
4. Wait until every transfer has settled, also after the first error: destination memory is not given back before.
5. Report to the source ranks that the election appoints, readers and unread ones.

`push` runs on a source rank and writes the lanes that it is the source of; it always posts runs directly, since a
destination page that several sources fill can not be written whole.

Refused: BindError before anything moves. Raises TransportError, after all transfers have settled, when one failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.bind import bind
from kvreshard.plan.copies import CopyList
from kvreshard.plan.fill import find_unwritten
from kvreshard.plan.request_check import check_request
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch, stage
from kvreshard.transport.base import Copies, Direction, Transfer, Transport, TransportError
from kvreshard.transport.local import LocalMemory


@dataclass(frozen=True, slots=True)
class Staging:
    """A registered buffer for staged lanes: `size_bytes` from `address`. One request at a time fills it."""

    address: int
    size_bytes: int
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class Moved:
    """What one rank's part of a request took. Seconds are wall time.

    `num_bytes` of cache arrived; `num_read_bytes` were read or written for it, gaps of staged reads included.
    """

    num_bytes: int
    num_read_bytes: int
    num_copies: int
    num_staged_bytes: int
    bind_s: float
    total_s: float


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

    def pull(self, route: Route, request: Request, dst: EngineLayout, report: bytes = b"") -> Moved:
        """Read everything that the route's destination rank needs; `report` goes to the sources it reports to."""
        started_s = self.clock()
        check_request(route, request)
        direct, staged = _split(route, self.staging is not None)
        lists = list(bind(direct, request))
        in_staging = [] if self.staging is None else self._stage_all(staged, request, self.staging)
        bind_s = self.clock() - started_s
        transfers = [self._post(Direction.READ, copies) for copies in lists]
        error: TransportError | TimeoutError | None = None
        try:
            self._run_batches(in_staging)
        except (TransportError, TimeoutError) as failed:
            error = failed
        if request.dst_new_pages:
            self.fill(dst, route.dst_rank, request, [*lists, *bind(staged, request)])
        self._settle(transfers, error)
        if report:
            for src_rank, reporters in route.reporters.items():
                if route.dst_rank in reporters:
                    self.transport.notify(self.peers[src_rank], report)
        num_direct, num_staged = sum(c.num_bytes for c in lists), sum(batch.num_bytes for batch in in_staging)
        num_read = num_direct + sum(batch.reads.num_bytes for batch in in_staging)
        num_copies = sum(c.num_copies for c in lists) + sum(b.reads.num_copies for b in in_staging)
        return Moved(num_direct + num_staged, num_read, num_copies, num_staged, bind_s, self.clock() - started_s)

    def push(self, routes: Iterable[Route], request: Request, src_rank: int) -> Moved:
        """Write what `src_rank` is the source of in the routes of the destination ranks."""
        started_s = self.clock()
        mine = [replace(r, lanes=tuple(lane for lane in r.lanes if lane.src_rank == src_rank)) for r in routes]
        lists = [copies for route in mine for copies in bind(route, request)]
        bind_s = self.clock() - started_s
        self._settle([self._post(Direction.WRITE, copies) for copies in lists], None)
        num_bytes, num_copies = sum(c.num_bytes for c in lists), sum(c.num_copies for c in lists)
        return Moved(num_bytes, num_bytes, num_copies, 0, bind_s, self.clock() - started_s)

    def fill(self, dst: EngineLayout, dst_rank: int, request: Request, copies: Iterable[CopyList]) -> None:
        """Zero what `copies`, all copies of the request to this rank, do not write in its newly allocated pages."""
        holes = find_unwritten(dst, dst_rank, request, copies)
        self.memory.zero(holes.start, holes.stop)

    def _stage_all(self, staged: Route, request: Request, staging: Staging) -> list[Batch]:
        return [batch for lane in staged.lanes for batch in stage(lane, request, staging.size_bytes)]

    def _post(self, direction: Direction, copies: CopyList) -> Transfer:
        reading = direction is Direction.READ
        peer = self.peers[copies.src_rank if reading else copies.dst_rank]
        local, remote = copies.dst_address, copies.src_address
        if not reading:
            local, remote = remote, local
        return self.transport.post(peer, direction, Copies.of(local, remote, copies.length))

    def _run_batches(self, batches: list[Batch]) -> None:
        if self.staging is None or not batches:
            return
        with self.staging.lock:
            for batch in batches:
                self._run_batch(batch, self.staging)

    def _run_batch(self, batch: Batch, staging: Staging) -> None:
        reads = replace(batch.reads, dst_address=batch.reads.dst_address + staging.address)
        self._post(Direction.READ, reads).wait(self.timeout_s)
        for move in batch.moves:
            loops = [(loop.count, loop.src_step, loop.dst_step) for loop in move.loops]
            self.memory.move(
                staging.address,
                move.slot_bytes,
                move.dst_bases,
                move.dst_pages,
                move.length,
                loops,
                move.slot_offset,
                move.dst_offset,
            )

    def _settle(self, transfers: list[Transfer], error: TransportError | TimeoutError | None) -> None:
        for transfer in transfers:
            try:
                transfer.wait(self.timeout_s)
            except (TransportError, TimeoutError) as failed:
                error = error or failed
        if error is not None:
            raise error


def _split(route: Route, can_stage: bool) -> tuple[Route, Route]:
    """The lanes that are read directly, and those that go through staging."""
    staged = [lane for lane in route.lanes if can_stage and lane.choice is not None and lane.choice.way == "staged"]
    direct = [lane for lane in route.lanes if lane not in staged]
    return replace(route, lanes=tuple(direct)), replace(route, lanes=tuple(staged))
