"""What is read for one request: copies that are posted directly, and batches for the staging buffer.

1. Check the request.
2. Cut it once per pair of groups, to page ranges that overlap alike.
3. Transfers whose way is open (`cost`) are counted both ways, and read in the way that `CostModel.prefers_staging` says. Forced ways are kept.

Refused with BindError, before anything moves: what `request_check` refuses, a page that does not fit the staging buffer, and a request that
is more than a `RequestBudget`.
"""

from __future__ import annotations

import msgspec

from kvreshard.model.tables import Request
from kvreshard.plan.bind import MIN_PAGED_COPIES, gathered, group_aligned
from kvreshard.plan.budget import RequestBudget
from kvreshard.plan.copies import Copies, PagedCopies
from kvreshard.plan.request_check import check_request
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch, pack, prefers_staging, stage


class ReadPlan(msgspec.Struct, frozen=True):
    """Copies to post directly, and batches for the staging buffer, in order."""

    direct: tuple[Copies, ...]
    batches: tuple[Batch, ...]


def plan_reads(route: Route, request: Request, staging_bytes: int = 0, min_paged: int = MIN_PAGED_COPIES) -> ReadPlan:
    """Everything that the route's destination rank reads. `staging_bytes`: of one batch, 0 without a buffer.

    Scattered pages stay pages from `min_paged` copies on. Raises BindError.
    """
    check_request(route, request)
    direct: list[PagedCopies] = []
    batches: list[Batch] = []
    budget = RequestBudget()
    for pair in route.pairs:
        page_ranges = pair.page_ranges(request)
        for way, transfers in pair.by_way if page_ranges else ():
            is_staged = way == "staged" and bool(staging_bytes)
            bound = [] if is_staged else list(pair.copies(page_ranges, transfers, budget))
            if is_staged or (
                staging_bytes and way is None and prefers_staging(pair, transfers, page_ranges, bound, staging_bytes)
            ):
                for batch in stage(pair, transfers, page_ranges, staging_bytes, budget if is_staged else None):
                    budget.spend_listed(batch.reads.num_copies)
                    batches.append(batch)
            else:
                direct += bound
    posted = [one for aligned in group_aligned(direct) for one in aligned.copies(min_paged, budget)]
    packed = pack(batches, staging_bytes, route.transfers[0].choice.model) if batches else ()
    return ReadPlan(tuple(gathered(posted)), tuple(packed))
