"""What one request costs between two engines: bytes, operations and predicted seconds, per pair of ranks.

The request is bound as an engine would bind it, so the numbers of operations are exact: a descriptor that is posted directly, or a read into
the staging buffer. Seconds are the cost model's, of one decode rank alone; what ranks do to one another on a network is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvreshard.model.tables import Request
from kvreshard.plan import Route, plan_reads
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
    for route in routes:
        plan = plan_reads(route, request, STAGING_BYTES)
        for copies in plan.direct:
            total = totals.setdefault((route.dst_rank, copies.src_rank), PairTotal(route.dst_rank, copies.src_rank))
            total.num_bytes += copies.num_bytes
            total.num_operations += copies.num_copies
            total.seconds += cost.direct_s(
                Work(copies.num_copies, copies.num_bytes, num_reads=0, num_read_bytes=0, num_runs=0)
            )
        for batch in plan.batches:
            total = totals.setdefault(
                (route.dst_rank, batch.reads.src_rank), PairTotal(route.dst_rank, batch.reads.src_rank)
            )
            reads, moves = batch.reads, batch.moves
            num_runs = sum(
                prod(loop.count for loop in move.loops) * len(move.dst_bases) * len(move.dst_at) for move in moves
            )
            total.num_bytes += batch.num_bytes
            total.num_staged_bytes += batch.num_bytes
            total.num_operations += reads.num_copies
            total.seconds += cost.staged_s(
                Work(0, batch.num_bytes, reads.num_copies, reads.num_bytes, num_runs, num_batches=1)
            )
    return [totals[key] for key in sorted(totals)]
