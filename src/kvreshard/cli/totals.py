"""The cost of one request between two engines: bytes, operations and predicted seconds, per pair of ranks.

The request is bound as an engine would bind it, so numbers of operations are exact. An operation is a descriptor that is posted directly, or a
read into the staging buffer. Seconds are the cost model's, for one decode rank alone; contention on a network is not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvreshard.model.tables import Request
from kvreshard.plan import Route, plan_reads
from kvreshard.plan.copies import Copies
from kvreshard.plan.cost import CostModel, Work

# What a rank of the connector has unless its options say otherwise (`vllm.options`).
STAGING_BYTES = 64 << 20


@dataclass(slots=True)
class PairTotal:
    """What `dst_rank` reads from `src_rank`: bytes of cache, bytes of them that are staged, operations, predicted seconds."""

    dst_rank: int
    src_rank: int
    num_bytes: int = 0
    num_staged_bytes: int = 0
    num_operations: int = 0
    seconds: float = 0.0


def count_totals(routes: Sequence[Route], request: Request, cost: CostModel) -> list[PairTotal]:
    """One entry per pair of ranks that exchange anything, by decode rank. Raises BindError."""
    totals: dict[tuple[int, int], PairTotal] = {}

    def total_of(copies: Copies) -> PairTotal:
        pair = copies.dst_rank, copies.src_rank
        return totals.setdefault(pair, PairTotal(*pair))

    for route in routes:
        plan = plan_reads(route, request, STAGING_BYTES)
        for copies in plan.direct:
            total = total_of(copies)
            total.num_bytes += copies.num_bytes
            total.num_operations += copies.num_copies
            work = Work(copies.num_copies, copies.num_bytes, num_reads=0, num_read_bytes=0, num_runs=0)
            total.seconds += cost.direct_s(work)
        for batch in plan.batches:
            total, reads = total_of(batch.reads), batch.reads
            num_runs = sum(
                prod(loop.count for loop in move.loops) * len(move.dst_bases) * len(move.dst_at) for move in batch.moves
            )
            total.num_bytes += batch.num_bytes
            total.num_staged_bytes += batch.num_bytes
            total.num_operations += reads.num_copies
            work = Work(0, batch.num_bytes, reads.num_copies, reads.num_bytes, num_runs, num_batches=1)
            total.seconds += cost.staged_s(work)
    return [totals[key] for key in sorted(totals)]
