"""What is read for one request: copies that are posted directly, and batches for the staging buffer.

1. Check the request.
2. Cut it once per pair of groups, to page ranges that overlap alike.
3. Transfers whose way is open (`cost`) are counted both ways, and read in the way that `CostModel.prefers_staging` says. Forced ways are kept.

Refused with BindError, before anything moves: what `request_check` refuses, and a page that does not fit the staging buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvreshard.model.tables import Request
from kvreshard.plan.bind import MIN_PAGED_COPIES, BoundPages, bind_ranges, gathered, group_aligned
from kvreshard.plan.copies import Copies
from kvreshard.plan.cost import CostModel, Work
from kvreshard.plan.pairs import GroupPair, PageRange
from kvreshard.plan.request_check import check_request
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch, fill_bytes, find_staged, pack, stage
from kvreshard.plan.transfer import RankTransfer


class ReadPlan(msgspec.Struct, frozen=True):
    """Copies to post directly, and batches for the staging buffer, in order."""

    direct: tuple[Copies, ...]
    batches: tuple[Batch, ...]


def plan_reads(route: Route, request: Request, staging_bytes: int = 0, min_paged: int = MIN_PAGED_COPIES) -> ReadPlan:
    """Everything that the route's destination rank reads. `staging_bytes`: of one batch, 0 without a buffer.

    Scattered pages stay pages from `min_paged` copies on. Raises BindError.
    """
    check_request(route, request)
    direct: list[BoundPages] = []
    batches: list[Batch] = []
    for pair in route.pairs:
        page_ranges = pair.page_ranges(request)
        for way, transfers in pair.by_way if page_ranges else ():
            bound = [] if way == "staged" and staging_bytes else list(bind_ranges(pair, transfers, page_ranges))
            if staging_bytes and (
                way == "staged" or (way is None and _is_staged(pair, transfers, page_ranges, bound, staging_bytes))
            ):
                batches += stage(pair, transfers, page_ranges, staging_bytes)
            else:
                direct += bound
    copies = [one for aligned in group_aligned(direct) for one in aligned.copies(min_paged)]
    return ReadPlan(tuple(gathered(copies)), tuple(pack(batches, staging_bytes, _model(route.transfers))))


def _is_staged(
    pair: GroupPair,
    transfers: tuple[RankTransfer, ...],
    page_ranges: Sequence[PageRange],
    bound: Sequence[BoundPages],
    staging_bytes: int,
) -> bool:
    """`is_staged`; of states, which are one page in every request, the first request decides for all."""
    if not pair.is_state:
        return is_staged(pair, transfers, page_ranges, bound, staging_bytes)
    cache = transfers[0].pattern_cache
    key = "is staged", staging_bytes, tuple([transfer.bases for transfer in transfers])
    return cache.get(pair, key, lambda: is_staged(pair, transfers, page_ranges, bound, staging_bytes), lambda _: 1)


def is_staged(
    pair: GroupPair,
    transfers: tuple[RankTransfer, ...],
    page_ranges: Sequence[PageRange],
    bound: Sequence[BoundPages],
    staging_bytes: int,
) -> bool:
    """Whether the page ranges of transfers whose way is open go through the buffer. `bound`: the same page ranges, read directly."""
    model = _model(transfers)
    aligned = group_aligned(bound)
    num_copies, num_bytes = sum(one.num_copies for one in aligned), sum(one.num_bytes for one in aligned)
    if not model.may_prefer_staging(num_copies, num_bytes):
        return False
    reads = read_bytes = runs = 0
    for staged in find_staged(pair, transfers, page_ranges):
        if staged.image.image_bytes > staging_bytes:
            return False
        num_fields = len(staged.image.bases.src)
        reads += num_fields * staged.num_reads
        read_bytes += num_fields * staged.num_read_bytes
        runs += num_fields * staged.num_runs
    num_batches = max(1.0, read_bytes / fill_bytes(staging_bytes, read_bytes, model))
    return model.prefers_staging(Work(num_copies, num_bytes, reads + int(num_batches), read_bytes, runs, num_batches))


def _model(transfers: Sequence[RankTransfer]) -> CostModel:
    choice = transfers[0].choice if transfers else None
    return CostModel() if choice is None else choice.model
