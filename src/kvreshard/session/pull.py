"""The steps in which one rank reads its part of a request, as a generator, so that one thread can drive many.

`pull_steps` yields a `Transfer` that must settle first, or None while it waits for the staging buffer:

1. Decide what is read directly and what is staged (`plan.reads`), and take the staging buffer. If another load has kept it for
   `STAGING_PATIENCE_S`, since its source does not answer, everything is read directly. A refusal comes before anything is posted.
2. Fill the halves of the staging buffer in turn, permuting one while the other is read. Post the direct copies behind the first two.
3. Zero what no copy writes in newly allocated pages, while the first reads run. The order does not matter: these bytes are by definition
   those that no copy writes.
4. Wait until every transfer has settled, also after an error: destination memory must not be reused before.
5. Read each source rank's lease word, if anything was read. Another word than expected: the pages may have been freed during the read.

Raises BindError before anything moves; TransportError, StaleLease, or what the memory of the mover raises, after all transfers have settled.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from kvreshard.model.errors import BindError, KvReshardError
from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request
from kvreshard.plan.copies import CopyList
from kvreshard.plan.reads import ReadPlan, plan_reads
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch
from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.mover import NUM_HALVES, Mover, Staging, reads_into
from kvreshard.transport.base import Direction, Transfer, TransferState, TransportError

# A load has the buffer for some milliseconds per 16 MiB; one whose source is stopped keeps it.
STAGING_PATIENCE_S = 1.0


class StaleLease(KvReshardError):
    """The lease has ended before the read did: what arrived may belong to another request."""


@dataclass(frozen=True, slots=True)
class LeaseProof:
    """The word that every source rank must still have after the read.

    `addresses`: of the word, by source rank. `scratch_address`: registered local memory, 8 bytes per source rank.
    """

    word: int
    addresses: Mapping[int, int]
    scratch_address: int


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one rank's part of a request took. Seconds are wall time.

    `num_bytes` of cache arrived; `num_read_bytes` were read or written for it, gaps of staged reads included. `num_zeroed_bytes` of new
    pages were written by no copy. `post_s`: handing the direct transfers to the transport, part of the total. `num_early_bytes` arrived before
    the prefill had ended, and took `early_s` to read; `total_s` is from that end on.
    """

    num_bytes: int = 0
    num_read_bytes: int = 0
    num_copies: int = 0
    num_staged_bytes: int = 0
    bind_s: float = 0.0
    total_s: float = 0.0
    num_zeroed_bytes: int = 0
    post_s: float = 0.0
    num_early_bytes: int = 0
    early_s: float = 0.0

    @classmethod
    def by(cls, plan: ReadPlan) -> TransferStats:
        """What a plan reads, without times."""
        num_direct, num_staged = sum(c.num_bytes for c in plan.direct), sum(b.num_bytes for b in plan.batches)
        return cls(
            num_bytes=num_direct + num_staged,
            num_read_bytes=num_direct + sum(batch.reads.num_bytes for batch in plan.batches),
            num_copies=sum(c.num_copies for c in plan.direct) + sum(b.reads.num_copies for b in plan.batches),
            num_staged_bytes=num_staged,
        )

    def __add__(self, more: TransferStats) -> TransferStats:
        return TransferStats(*(getattr(self, one.name) + getattr(more, one.name) for one in fields(self)))


Steps = Generator[Transfer | float | None, None, TransferStats]


def pull_steps(
    mover: Mover,
    route: Route,
    request: Request,
    dst: EngineLayout,
    lease: LeaseProof | None = None,
    note: Callable[[Transfer], None] = lambda transfer: None,
    record: Callable[[str, str], None] = lambda event, text: None,
    whole: Route | None = None,
) -> Steps:
    """Read everything that the route's destination rank needs. Resume when what was yielded has settled, well or badly.

    `note` is called with every transfer that is posted: a driver that stops early must wait for each of them. `record` is called with an
    event and a text. `whole`: what the load reads in all, where `route` is only what is left of it; this decides what is zeroed.
    """
    if dst.engine != route.dst_engine:  # what is zeroed lies where this layout says
        raise BindError(
            f"the route ends at engine '{route.dst_engine}', and the layout is that of engine '{dst.engine}'; give the destination's"
        )
    started_s = mover.clock()
    plan = plan_reads(route, request, mover.staging.half_bytes if mover.staging else 0)
    bind_s = mover.clock() - started_s
    num_direct = sum(c.num_copies for c in plan.direct)
    record("bound", f"{num_direct} copies in {len(plan.direct)} lists, {len(plan.batches)} staged batches")
    if plan.batches and not (yield from _wait_for_buffer(mover)):
        record("not staged", f"another load has kept the staging buffer for {STAGING_PATIENCE_S:g} s")
        plan = plan_reads(route, request)
    posted: list[Transfer] = []
    error: Exception | None = None
    zeroed, post_s = 0, 0.0

    def begin() -> None:
        nonlocal zeroed, post_s
        began_s = mover.clock()
        for copies in plan.direct:
            posted.append(mover.post(Direction.READ, copies))
            note(posted[-1])
        post_s = mover.clock() - began_s
        if request.dst_new_pages:
            zeroed = mover.fill(dst, whole or route, request)
            record("zeroed", f"{zeroed} bytes")

    try:
        yield from run_batches(mover, plan.batches, note, begin)
    except Exception as failed:  # noqa: BLE001 (raised below, once all has settled)
        error = failed
    for transfer in posted:
        error = (yield from settled(transfer)) or error
    if error is None and lease is not None and (posted or plan.batches):
        record("settled", f"{len(posted)} direct transfers and {len(plan.batches)} batches; reading lease words")
        error = yield from check_words(mover, lease, route.src_ranks, note)
    if error is not None:
        raise error
    total_s = mover.clock() - started_s
    return replace(TransferStats.by(plan), bind_s=bind_s, total_s=total_s, num_zeroed_bytes=zeroed, post_s=post_s)


def settled(transfer: Transfer) -> Generator[Transfer | None, None, Exception | None]:
    """Wait until a transfer has settled; its error, or the driver's when it gave up waiting."""
    try:
        yield transfer
    except TimeoutError as gave_up:
        return gave_up
    return transfer.error


def take_buffer(mover: Mover) -> bool:
    """Take the staging buffer if it is free; whether that worked."""
    return mover.staging is not None and mover.staging.take(mover.clock())


def _wait_for_buffer(mover: Mover) -> Generator[Transfer | None, None, bool]:
    """Wait for the staging buffer, but not for long, nor for a load that has had it for long; whether it was taken."""
    began_s = mover.clock()
    while not take_buffer(mover):
        if mover.staging is None or mover.clock() >= min(began_s, mover.staging.taken_s) + STAGING_PATIENCE_S:
            return False
        yield None
    return True


def run_batches(
    mover: Mover, batches: Sequence[Batch], note: Callable[[Transfer], None], meanwhile: Callable[[], None]
) -> Generator[Transfer | None, None, None]:
    """Fill one half of the buffer, which this load has taken, while the other is permuted; then free it. Without batches it is not touched.

    `meanwhile` is called as soon as both halves are being read into. Raises once everything that was posted here has settled, or the driver has
    given up waiting; the buffer is free when all has settled.
    """
    staging = mover.staging
    if staging is None or not batches:
        meanwhile()
        return
    under_way: deque[tuple[Batch, int, Transfer]] = deque()
    last: dict[int, Transfer] = {}

    def post(number: int) -> None:
        if number < len(batches):
            address = staging.half(number)
            transfer = last[address] = mover.post(Direction.READ, reads_into(address, batches[number]))
            under_way.append((batches[number], address, transfer))
            note(transfer)

    try:
        for number in range(NUM_HALVES):
            post(number)
        meanwhile()
        for number in range(len(batches)):
            batch, address, transfer = under_way.popleft()
            error = yield from settled(transfer)
            if error is not None:
                raise error
            for move in batch.moves:
                mover.memory.move(address, move)
            post(number + NUM_HALVES)
    except Exception:
        for _, _, transfer in under_way:
            yield from settled(transfer)
        raise
    finally:
        _give_when_settled(staging, last.values())


def _give_when_settled(staging: Staging, reads: Iterable[Transfer]) -> None:
    """Give the buffer back once nothing is read into it: a driver may have given up waiting."""
    pending = next((read for read in reads if read.state is TransferState.PENDING), None)
    if pending is None:
        staging.give()
    else:
        pending.add_done_callback(lambda _: _give_when_settled(staging, reads))


def check_words(
    mover: Mover, lease: LeaseProof, src_ranks: tuple[int, ...], note: Callable[[Transfer], None]
) -> Generator[Transfer | None, None, Exception | None]:
    """Read the lease words, all at once; an error if one could not be read or is not the expected one."""
    reads: list[tuple[int, int, Transfer]] = []
    error: Exception | None = None
    for index, rank in enumerate(src_ranks):
        local = lease.scratch_address + index * WORD_BYTES
        ctypes.c_uint64.from_address(local).value = ~lease.word & (2**64 - 1)
        try:
            copies = CopyList.of([lease.addresses[rank]], [local], WORD_BYTES, src_rank=rank)
            reads.append((rank, local, mover.post(Direction.READ, copies)))
            note(reads[-1][2])
        except TransportError as failed:
            error = failed
    for rank, local, transfer in reads:
        error = (yield from settled(transfer)) or error
        found = ctypes.c_uint64.from_address(local).value
        if error is None and found != lease.word:
            error = StaleLease(
                f"source rank {rank} no longer holds the lease of this request (its word is {found:#x}, expected "
                f"{lease.word:#x}): its pages may have been reused while they were read; "
                "compute the prompt again, or give leases more time"
            )
    return error
