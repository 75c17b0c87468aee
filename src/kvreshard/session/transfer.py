"""One request from route to settled bytes, on a thread that waits for it: `pull` on the destination rank, `push` on a source rank.

`push` always posts runs directly: a destination page that several sources fill cannot be written whole.

Raises UsageError and BindError before anything moves; TransportError, after all transfers have settled, when one failed; and TimeoutError when one has
not settled within the mover's `timeout_s`: then its memory must not be reused.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvreshard.model.errors import BindError, UsageError
from kvreshard.model.expect import expect, expect_whole
from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.bind import bind
from kvreshard.plan.route import Route
from kvreshard.session.mover import Mover
from kvreshard.session.pull import LeaseProof, Steps, TransferStats, pull_steps
from kvreshard.transport.base import Direction, Transfer, TransportError

STAGING_POLL_S = 0.001


def pull(
    mover: Mover,
    route: Route,
    request: Request,
    dst: EngineLayout,
    report: bytes = b"",
    lease: LeaseProof | None = None,
) -> TransferStats:
    """Read everything that the route's destination rank needs, then send `report` to the source ranks that it reports to."""
    expect(mover, Mover, "a mover", "Mover(transport, memory, peers)")
    expect(route, Route, "a route", "what `kvreshard.compile_routes` returns for one rank")
    expect(dst, EngineLayout, "the destination's layout", "what `kvreshard.describe` or `kvreshard.relocate` returns")
    _check_places(route, dst)
    expect(report, bytes, "a report", "bytes, which the source ranks get as a notification")
    told = [src_rank for src_rank, reporters in route.reporters.items() if report and route.dst_rank in reporters]
    missing = [src_rank for src_rank in told if src_rank not in mover.peers]
    if missing:
        raise UsageError(
            f"rank {route.dst_rank} reports to source rank {missing[0]}, which is not among the peers of its mover; add it to them"
        )
    moved = _drive(pull_steps(mover, route, request, dst, lease), mover.timeout_s)
    for src_rank in told:
        mover.transport.notify(mover.peers[src_rank], report)
    return moved


def push(mover: Mover, routes: Iterable[Route], request: Request, src_rank: int) -> TransferStats:
    """Write what `src_rank` is the source of in the routes of the destination ranks."""
    expect(mover, Mover, "a mover", "Mover(transport, memory, peers)")
    expect(routes, Iterable, "routes", "what `kvreshard.compile_routes` returns")
    expect_whole(src_rank, "the source rank")
    routes = list(routes)
    for route in routes:
        expect(route, Route, "a route", "what `kvreshard.compile_routes` returns for one rank")
    if routes and not any(src_rank in route.reporters for route in routes):
        known = sorted({rank for route in routes for rank in route.reporters})
        raise UsageError(
            f"{src_rank} is no source rank of these routes, whose source ranks are {', '.join(map(str, known))}"
        )
    started_s = mover.clock()
    mine = [
        replace(r, transfers=tuple(transfer for transfer in r.transfers if transfer.src_rank == src_rank))
        for r in routes
    ]
    lists = [copies for route in mine for copies in bind(route, request)]
    bind_s = mover.clock() - started_s
    posted: list[Transfer] = []
    try:
        for copies in lists:
            posted.append(mover.post(Direction.WRITE, copies))
    finally:
        _settle(posted, mover.timeout_s)
    num_bytes, num_copies = sum(c.num_bytes for c in lists), sum(c.num_copies for c in lists)
    return TransferStats(num_bytes, num_bytes, num_copies, 0, bind_s, mover.clock() - started_s)


def _check_places(route: Route, dst: EngineLayout) -> None:
    """Raises BindError unless the layout's fields lie where the route writes them: what is zeroed lies where the layout says."""
    rank = dst.rank_by_number.get(route.dst_rank)
    for transfer in route.transfers if dst.engine == route.dst_engine else ():
        known = () if rank is None else [field for field in transfer.fields if field in rank.shard_number]
        if rank is None or len(known) < len(transfer.fields):
            raise BindError(
                f"the route writes field '{transfer.fields[0]}' of rank {route.dst_rank}, which the layout of engine '{dst.engine}' "
                "does not have; give the layout that the route was compiled with"
            )
        here = rank.shard_addresses[[rank.shard_number[field] for field in known]]
        apart = np.flatnonzero(here != transfer.bases.dst)
        if len(apart):
            first = int(apart[0])
            raise BindError(
                f"field '{known[first]}' of rank {rank.rank} lies at {int(here[first]):#x} in the layout, and the route writes it at "
                f"{int(transfer.bases.dst[first]):#x}; give the layout that the route was compiled with: relocate first, then compile"
            )


def _drive(steps: Steps, timeout_s: float) -> TransferStats:
    try:
        waiting = next(steps)
        while True:
            if not isinstance(waiting, Transfer):
                time.sleep(STAGING_POLL_S)
                waiting = next(steps)
                continue
            try:
                with contextlib.suppress(TransportError):  # the steps check the transfer
                    waiting.wait(timeout_s)
            except TimeoutError as late:
                waiting = steps.throw(late)
            else:
                waiting = next(steps)
    except StopIteration as done:
        moved: TransferStats = done.value
        return moved


def _settle(transfers: list[Transfer], timeout_s: float) -> None:
    error: TransportError | TimeoutError | None = None
    for transfer in transfers:
        try:
            transfer.wait(timeout_s)
        except (TransportError, TimeoutError) as failed:
            error = error or failed
    if error is not None:
        raise error
