"""For one request: what is posted as it is, and what goes through the staging buffer?

A lane's choice (`cost`) is made for a page that has no neighbours. A request knows its tables: pages that lie side by side at
the source are one read of a staging batch, whatever the destination looks like, while a direct copy needs neighbours on both
sides. So the choice is looked at once more:

1. Check the request. Where both sides' pages are of one size, cut it to pairs of pages (`whole`), all lanes of a stream at
   once; elsewhere bind each lane directly (`bind`), which costs microseconds while pages stay together.
2. Count the copies that are left, and the reads that staging would need: runs of neighbouring source pages where a slot
   is a whole page, else boxes of every page.
3. Take what the cost model finds cheaper. Forced lanes and lanes without a model keep their choice.

Refused with BindError, before anything moves: what `bind` refuses, and a page that does not fit the staging buffer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model.tables import Request
from kvreshard.plan.bind import CutLane, Runs, cut_stream, find_runs, list_copies
from kvreshard.plan.copies import Copies, CopyList, Page, PagedCopies
from kvreshard.plan.cost import Choice
from kvreshard.plan.request_check import check_request
from kvreshard.plan.route import Route
from kvreshard.plan.stage import Batch, fill_bytes, find_slots, pack, stage_pages, stage_pieces
from kvreshard.plan.stream import Sheaf, Stream
from kvreshard.plan.whole import MIN_FRAMED_COPIES, PagePairs, WholePages, direct_copies, pair_pages, part_copies

Int64s = NDArray[np.int64]
# Scattered pages for which the model finds both ways alike took 13 to 19 % longer staged; stretches that it finds 8 % faster staged
# were 1.4 times as fast (docs/design/0014).
STAGING_MARGIN = 0.95
# Longer lists stay apart, so that their arrays are not copied once more.
MAX_GATHERED = 1 << 12


class ReadPlan(msgspec.Struct, frozen=True):
    """Copies to post directly, and batches for the staging buffer, in order."""

    direct: tuple[Copies, ...]
    batches: tuple[Batch, ...]


@dataclass(slots=True)
class _Framed:
    """Whole pages of one frame, from every stream that has some."""

    sheaf: Sheaf
    src: list[Int64s] = field(default_factory=list)
    dst: list[Int64s] = field(default_factory=list)
    members: list[tuple[Sheaf, PagePairs]] = field(default_factory=list)


def plan_reads(route: Route, request: Request, staging_bytes: int = 0, min_framed: int = MIN_FRAMED_COPIES) -> ReadPlan:
    """Everything that the route's destination rank reads for a request. `staging_bytes`: of one batch, 0 without a buffer.

    Whole pages are posted by their frame, page by page, from `min_framed` copies on; fewer are listed, neighbours together.

    Raises BindError.
    """
    plan = _Plan(staging_bytes, min_framed)
    framed: dict[Page, _Framed] = {}
    for stream, pairs in _cut(route, request, plan):
        for sheaf in stream.sheaves:
            found = framed.get(sheaf.frame)
            if found is None:
                found = framed[sheaf.frame] = _Framed(sheaf)
            found.src += pairs.src
            found.dst += pairs.dst
            found.members.append((sheaf, pairs))
    for found in framed.values():
        plan.add_pages(found)
    choice = route.lanes[0].choice if route.lanes else None
    model = None if choice is None else choice.model
    batches = tuple(pack(plan.batches, staging_bytes, model)) if plan.batches else ()
    return ReadPlan(tuple(plan.direct if len(plan.direct) < 2 else _gathered(plan.direct)), batches)


def _cut(route: Route, request: Request, plan: _Plan) -> Iterator[tuple[Stream, PagePairs]]:
    """The streams of equal pages with what the request moves of them; the other lanes are given to the plan."""
    quick = None if route.quick is None else route.quick.cut(request)
    if quick is not None:
        for stream, found in zip(route.streams, quick, strict=True):
            if found is not None:
                yield stream, PagePairs(*found)
        return
    check_request(route, request)
    for stream in route.streams:
        if not request.intervals[stream.dst_group.name]:
            continue
        size = stream.page_indices
        if size is not None:
            yield stream, pair_pages(stream, size, request)
            continue
        for cut in cut_stream(stream, request):
            plan.add_lane(cut)


@dataclass(slots=True)
class _Plan:
    """A plan on its way."""

    staging_bytes: int
    min_framed: int
    direct: list[Copies] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)

    def add_lane(self, cut: CutLane) -> None:
        """A lane whose pages are not pairs."""
        wanted, can_change = _wanted(cut.lane.choice, self.staging_bytes)
        if wanted == "direct" or can_change:
            found = list(find_runs(cut))
            if not can_change or not is_staging_cheaper(cut, found, self.staging_bytes):
                for runs in found:
                    self.direct += list_copies(cut.lane, runs)
                return
        self.batches += stage_pieces(cut, self.staging_bytes)

    def add_pages(self, framed: _Framed) -> None:
        """Whole pages of one frame, and the parts of pages of the same lanes."""
        sheaf = framed.sheaf
        pages = WholePages.of(framed.src, framed.dst)
        wanted, can_change = _wanted(sheaf.lanes[0].choice, self.staging_bytes)
        # Parts of pages alone keep the lane's choice, unless its slots do not fit.
        if can_change and (len(pages.src_page) or sheaf.slot_bytes > self.staging_bytes):
            wanted = "staged" if are_pages_cheaper_staged(sheaf, pages, self.staging_bytes) else "direct"
        if wanted == "direct":
            self.direct += direct_copies(sheaf, pages, self.min_framed)
        elif len(pages.src_page):
            whole = (0, 0, sheaf.lanes[0].src_span.indices)
            for lane in sheaf.lanes:
                self.batches += stage_pages(lane, whole, pages.src_page, pages.dst_page, self.staging_bytes)
        for member, pairs in framed.members:
            for overlap, src_page, dst_page in pairs.parts:
                for lane in member.lanes:
                    if wanted == "direct":
                        self.direct.append(part_copies(lane, overlap, src_page, dst_page))
                    else:
                        ids = np.array([src_page]), np.array([dst_page])
                        self.batches += stage_pages(lane, overlap, *ids, self.staging_bytes)


def _wanted(choice: Choice | None, staging_bytes: int) -> tuple[str, bool]:
    """The way that was chosen for a lane, and whether this request may change it."""
    if choice is None or not staging_bytes:
        return "direct", False
    return choice.way, not choice.forced


def _gathered(direct: Sequence[Copies]) -> Iterator[Copies]:
    """The same copies with the short lists of one source rank as one: a post costs as much as a hundred copies."""
    lists: defaultdict[tuple[int, int], list[Copies]] = defaultdict(list)
    for copies in direct:
        if copies.num_copies > MAX_GATHERED or (isinstance(copies, PagedCopies)):
            yield copies
        else:
            lists[copies.src_rank, copies.dst_rank].append(copies)
    for (src_rank, dst_rank), found in lists.items():
        if len(found) == 1:
            yield found[0]
            continue
        flat = [one.flat() for one in found]
        src = np.concatenate([one.src_address for one in flat])
        dst = np.concatenate([one.dst_address for one in flat])
        yield CopyList(src_rank, dst_rank, src, dst, np.concatenate([one.length for one in flat]))


def are_pages_cheaper_staged(sheaf: Sheaf, pages: WholePages, staging_bytes: int) -> bool:
    """Whether the cost model prefers staging for these whole pages."""
    choice, num_pages = sheaf.lanes[0].choice, len(pages.src_page)
    if choice is None or sheaf.slot_bytes > staging_bytes:
        return False
    model, num_bytes = choice.model, sheaf.page_bytes * num_pages
    num_copies = sheaf.num_runs * (num_pages - pages.joined if sheaf.joins else num_pages)
    direct_s = model.direct_s(num_copies, num_bytes)
    num_batches = max(1.0, num_bytes / fill_bytes(staging_bytes, num_bytes, model))
    if direct_s <= model.staged_s(0, num_bytes, 0, num_bytes, num_batches):
        return False  # reading the bytes in any pieces and moving them once more costs all that staging could save
    groups = num_pages
    if sheaf.joins_boxes:
        groups = pages.num_src_runs() + num_pages * sheaf.slot_bytes // fill_bytes(staging_bytes, model=model)
    staged_s = model.staged_s(
        sheaf.num_boxes * groups, sheaf.box_bytes * num_pages, sheaf.num_runs * num_pages, num_bytes, num_batches
    )
    return staged_s < STAGING_MARGIN * direct_s


def is_staging_cheaper(cut: CutLane, direct: Sequence[Runs], staging_bytes: int) -> bool:
    """Whether the lane's cost model prefers staging to copying these runs one by one, for this request."""
    lane, model = cut.lane, cut.lane.choice.model if cut.lane.choice is not None else None
    if model is None:
        return False
    num_copies = sum(runs.num_copies for runs in direct)
    num_bytes = sum(runs.num_bytes for runs in direct)
    direct_s = model.direct_s(num_copies, num_bytes)
    num_batches = max(1.0, num_bytes / fill_bytes(staging_bytes, num_bytes, model))
    if direct_s <= model.staged_s(0, num_bytes, 0, num_bytes, num_batches):
        return False  # reading the bytes in any pieces and moving them once more costs all that staging could save
    num_reads, num_read_bytes, num_runs, longest = 0, 0, 0, 0
    for slots in find_slots(cut):
        boxes, num_fields, pieces = slots.slot.boxes, len(slots.pattern.bases.src), len(slots.src_page)
        longest = max(longest, boxes.slot_bytes)
        groups = pieces
        if len(boxes.lengths) == 1 and boxes.slot_bytes == lane.src_page_stride_bytes:
            groups = 1 + int(np.count_nonzero(np.diff(slots.src_page[:, 0]) != 1))
            groups += pieces * boxes.slot_bytes // fill_bytes(staging_bytes, model=model)
        num_reads += num_fields * groups * len(boxes.lengths)
        num_read_bytes += num_fields * pieces * boxes.slot_bytes
        num_runs += num_fields * pieces * len(slots.pattern.lengths)
    if longest > staging_bytes:
        return False
    staged_s = model.staged_s(num_reads, num_read_bytes, num_runs, num_bytes, num_batches)
    return staged_s < STAGING_MARGIN * direct_s
