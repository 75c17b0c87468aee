"""For one request: what is posted as it is, and what goes through the staging buffer?

A lane's choice (`cost`) is made for a page that has no neighbours. A request knows its tables: pages that lie side by side at
the source are one read of a staging batch, whatever the destination looks like, while a direct copy needs neighbours on both
sides. So a lane that may choose is looked at once more:

1. Check the request; bind each lane directly, which costs microseconds per lane while pages stay together.
2. Count the copies that are left, and the reads that staging would need: runs of neighbouring source pages where a slot
   is a whole page, else boxes of every page.
3. Take what the cost model finds cheaper. Forced lanes and lanes without a model keep their choice.

Refused with BindError, before anything moves: what `bind` refuses, and a page that does not fit the staging buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvreshard.model.tables import Request
from kvreshard.plan.bind import CutLane, bind_lane_pages, cut_lanes, distinct_overlaps, page_ids
from kvreshard.plan.copies import CopyList, PageCopies
from kvreshard.plan.cost import find_boxes
from kvreshard.plan.request_check import check_request
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch, stage_pieces

# Batches take turns, which the model does not count: where it finds both ways alike, reading directly was 14 to 18 % faster.
STAGING_MARGIN = 0.85
# Longer lists stay apart, so that their arrays are not copied once more.
MAX_GATHERED = 1 << 12


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Copies to post directly, and batches for the staging buffer, in order. `staged`: the lanes of the batches."""

    direct: tuple[CopyList | PageCopies, ...]
    batches: tuple[Batch, ...]
    staged: tuple[CutLane, ...] = ()

    def written(self) -> Iterator[CopyList | PageCopies]:
        """All copies of the request, those that go through staging as if they did not."""
        yield from self.direct
        for cut in self.staged:
            yield from bind_lane_pages(cut)


def plan_reads(route: Route, request: Request, staging_bytes: int = 0) -> ReadPlan:
    """Everything that the route's destination rank reads for a request. `staging_bytes`: of one batch, 0 without a buffer.

    Raises BindError.
    """
    check_request(route, request)
    direct: list[CopyList | PageCopies] = []
    batches: list[Batch] = []
    staged: list[CutLane] = []
    for cut in cut_lanes(route, request):
        wanted = cut.lane.choice.way if staging_bytes and cut.lane.choice is not None else "direct"
        can_change = bool(staging_bytes) and cut.lane.choice is not None and not cut.lane.choice.forced
        if wanted == "direct" or can_change:
            copies = list(bind_lane_pages(cut))
            if not can_change or not is_staging_cheaper(cut, copies, staging_bytes):
                direct += copies
                continue
        batches += stage_pieces(cut, staging_bytes)
        staged.append(cut)
    return ReadPlan(tuple(_gathered(direct)), tuple(batches), tuple(staged))


def _gathered(direct: Sequence[CopyList | PageCopies]) -> Iterator[CopyList | PageCopies]:
    """The same copies with the short lists of one source rank as one: a post costs as much as a hundred copies."""
    lists: defaultdict[tuple[int, int], list[CopyList]] = defaultdict(list)
    for copies in direct:
        if isinstance(copies, PageCopies) or copies.num_copies > MAX_GATHERED:
            yield copies
        else:
            lists[copies.src_rank, copies.dst_rank].append(copies)
    for (src_rank, dst_rank), found in lists.items():
        columns = [(one.src_address, one.dst_address, one.length) for one in found]
        yield CopyList(src_rank, dst_rank, *(np.concatenate(column) for column in zip(*columns, strict=True)))


def is_staging_cheaper(cut: CutLane, copies: Sequence[CopyList | PageCopies], staging_bytes: int) -> bool:
    """Whether the lane's cost model prefers staging to these copies, for this request."""
    lane, model = cut.lane, cut.lane.choice.model if cut.lane.choice is not None else None
    if model is None:
        return False
    num_copies = sum(one.num_joined_copies if isinstance(one, PageCopies) else one.num_copies for one in copies)
    num_bytes = sum(one.num_bytes for one in copies)
    if num_copies * model.copy_s <= num_bytes / model.move_bytes_per_s:
        return False  # moving the bytes once more costs all that staging could save
    num_reads, num_read_bytes, num_runs, longest = 0, 0, 0, 0
    overlaps, which = distinct_overlaps(cut.pieces)
    counts = np.bincount(which, minlength=len(overlaps))
    for index, overlap in enumerate(overlaps):
        pattern = lane.pattern(overlap)
        if not len(pattern.lengths):
            continue
        boxes, num_fields = find_boxes(pattern, model.max_gap_bytes), len(pattern.bases.src)
        longest = max(longest, boxes.slot_bytes)
        pieces = int(counts[index])
        groups = pieces
        if len(boxes.lengths) == 1 and boxes.slot_bytes == lane.src_page_stride_bytes:
            spans = cut.pieces.src_span[which == index]
            same = np.zeros(len(spans), dtype=np.int64)
            pages = np.sort(page_ids(cut.src, lane.src_span, spans, [boxes.src_pages], same)[:, 0])
            groups = 1 + int(np.count_nonzero(np.diff(pages) != 1))
            groups += num_fields * pieces * boxes.slot_bytes // staging_bytes // num_fields
        num_reads += num_fields * groups * len(boxes.lengths)
        num_read_bytes += num_fields * pieces * boxes.slot_bytes
        num_runs += num_fields * pieces * len(pattern.lengths)
    if longest > staging_bytes:
        return False
    staged_s = model.staged_s(num_reads, num_read_bytes, num_runs, num_bytes)
    return staged_s < STAGING_MARGIN * model.direct_s(num_copies, num_bytes)
