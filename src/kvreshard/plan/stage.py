"""Staging: pages of many short runs are read in few large pieces into a buffer and permuted locally.

1. The `Image` of a source page is all that a transfer copies from it, in boxes: runs joined over gaps that are cheaper read than posted
   around. The buffer holds one image per page and field, side by side.
2. A `Batch` is one filling of the buffer. Images of neighbouring pages become one read where both sides continue.
3. A `Move` goes from images to destination pages, by loops, not as a list. Several destination pages may take from one image.
4. `pack` puts batches of one source rank that fit the buffer together into one: each costs a post.
5. `prefers_staging` counts both ways of reading for one request, and asks the cost model.

Addresses in the buffer are offsets from its start; whoever owns the buffer adds its address.
Refused with BindError: an image that does not fit the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from kvreshard.model.errors import BindError
from kvreshard.plan.bind import group_aligned
from kvreshard.plan.budget import RequestBudget, nest_entries
from kvreshard.plan.byte_ranges import merged
from kvreshard.plan.copies import MAX_COPY_BYTES, CopyList, Int64s, PagedCopies, coalesce, joined_lists
from kvreshard.plan.cost import CostModel, Work
from kvreshard.plan.pairs import GroupPair, PageRange
from kvreshard.plan.pattern import RUN_BYTES, Bases, Pattern
from kvreshard.plan.refine import Loop, Run, fold
from kvreshard.plan.transfer import Overlap, RankTransfer

# What was read is permuted while it is still in a cache, and the first batch is permuted early. Of 3 to 16 MiB, 4 and 5 were the fastest in
# eighteen cases of 84 and 168 MB (HND TP 8 -> 4: 30 ms, 36 with 16 MiB; page 64 -> 16, random: 43, with 6 MiB 60), and below 3 the posts cost
# more than is saved. Of 671 MB it made no difference, and each batch costs processor time: so many per transfer, then they grow.
FILL_BYTES, MAX_FILL_BYTES = 5 << 20, 16 << 20
MAX_SMALL_BATCHES = 32


class Image(msgspec.Struct, frozen=True, eq=False):
    """What some overlaps of a transfer need of a source page: boxes, shape (n,), side by side in an image of `image_bytes`.

    `runs`: for each overlap those out of the image, of one field; their `src_byte` is one of the image.
    """

    bases: Bases
    offsets: Int64s
    lengths: Int64s
    image_bytes: int
    runs: tuple[tuple[Run, ...], ...]

    def cached_bytes(self) -> int:
        """About what it takes in memory."""
        runs = [run for found in self.runs for run in found]
        return 2 * self.offsets.nbytes + RUN_BYTES * sum(2 + len(run.loops) for run in runs)


class Move(msgspec.Struct, frozen=True, eq=False):
    """A strided local copy: for every field f, piece k and step of `loops`, `length` bytes

        from byte src_bases[f] + src_at[k] + ... of the buffer to address dst_bases[f] + dst_at[k] + ...

    Arrays of shapes (fields,) and (pieces,), in bytes. No step is negative.
    """

    length: int
    loops: tuple[Loop, ...]
    src_bases: Int64s
    src_at: Int64s
    dst_bases: Int64s
    dst_at: Int64s

    @property
    def num_bytes(self) -> int:
        runs = len(self.dst_bases) * len(self.dst_at)
        for loop in self.loops:
            runs *= loop.count
        return runs * self.length


class Batch(msgspec.Struct, frozen=True, eq=False):
    """One filling of the staging buffer, `buffer_bytes` of it. The `dst_address` of its reads are offsets in the buffer."""

    reads: CopyList
    moves: tuple[Move, ...]
    buffer_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of cache that come out of it."""
        return sum(move.num_bytes for move in self.moves)


class StagedPages(msgspec.Struct, frozen=True, eq=False):
    """The page ranges of a transfer that share an image, with the source pages that hold them, ascending and each once."""

    transfer: RankTransfer
    page_ranges: tuple[PageRange, ...]
    pages: Int64s

    @property
    def image(self) -> Image:
        return _image_of(self.transfer, tuple([page_range.overlap for page_range in self.page_ranges]))

    @property
    def num_fields(self) -> int:
        """Fields that are read apart; those that are fused count as one."""
        return len(self.transfer.pattern(self.page_ranges[0].overlap).bases.src)

    @property
    def least_reads(self) -> int:
        """Descriptors of one field if neighbouring pages are one read; found without an image."""
        return 1 + int(np.count_nonzero(self.pages[1:] - self.pages[:-1] != 1))

    def num_reads(self, image: Image) -> int:
        """Descriptors of one field, where a batch holds all. Neighbouring pages are one read where the image is a whole page."""
        if len(image.lengths) > 1 or image.image_bytes != self.transfer.src_page_stride_bytes:
            return len(self.pages) * len(image.lengths)
        return self.least_reads

    def num_runs(self, image: Image) -> int:
        """Runs that are moved of one field."""
        return sum(
            one.count * sum([run.num_repeats for run in runs])
            for one, runs in zip(self.page_ranges, image.runs, strict=True)
        )


def fill_bytes(buffer_bytes: int, total_bytes: int = 0, model: CostModel = CostModel()) -> int:  # noqa: B008 (frozen)
    """How much one batch fills of a buffer where so much is staged, unless a single image is larger."""
    least = max(FILL_BYTES, model.least_batch_bytes)
    return min(buffer_bytes, max(least, min(MAX_FILL_BYTES, total_bytes // MAX_SMALL_BATCHES)))


def find_staged(
    pair: GroupPair,
    transfers: tuple[RankTransfer, ...],
    page_ranges: Sequence[PageRange],
    budget: RequestBudget | None = None,
) -> Iterator[StagedPages]:
    """What some transfers of a pair move of some pieces, as images.

    Pieces that other requests have too share one image, so that a source page which meets several destination pages is read once. The ends
    of a request have images of their own. `budget`: the request's, where it has not been counted yet. Raises BindError where the pieces have too
    many runs.
    """
    budget = budget or RequestBudget()
    of_transfer: list[list[PageRange]] = [[] for _ in transfers]
    for page_range in page_ranges:
        for number in pair.holders(page_range, transfers, budget):
            of_transfer[number].append(page_range)
    for transfer, held in zip(transfers, of_transfer, strict=True):
        budget.spend(len(held), 0)
        together: dict[object, list[PageRange]] = {}
        for page_range in held:
            pattern = transfer.pattern(page_range.overlap)
            budget.spend(0, nest_entries(len(pattern.runs)) + len(pattern.lengths))
            if len(pattern.lengths):
                # Where fields are fused differently, they have other bases.
                key = pattern.bases.src.tobytes(), None if page_range.recurs else page_range.first
                together.setdefault(key, []).append(page_range)
        for found in together.values():
            members = sorted(found, key=lambda page_range: page_range.overlap)
            pages = [
                one.page_ids(one.src, transfer.src_span, step)
                for one in members
                for step in _source_steps(transfer, one)
            ]
            yield StagedPages(transfer, tuple(members), np.unique(np.concatenate(pages)))


def _source_steps(transfer: RankTransfer, page_range: PageRange) -> list[int]:
    """In which pages of a source span a page range has runs."""
    return sorted(set(transfer.pattern(page_range.overlap).src_pages.tolist()))


def _image_of(transfer: RankTransfer, overlaps: tuple[Overlap, ...]) -> Image:
    """Kept for the next request."""
    max_gap_bytes = transfer.choice.model.max_gap_bytes
    key = "image", max_gap_bytes, overlaps
    return transfer.pattern_cache.get(
        transfer.bases,
        key,
        lambda: make_image([transfer.pattern(one) for one in overlaps], max_gap_bytes),
        Image.cached_bytes,
    )


def make_image(patterns: Sequence[Pattern], max_gap_bytes: int) -> Image:
    """The image of patterns with equal bases, none of them empty."""
    starts = np.concatenate([pattern.src_offsets for pattern in patterns])
    boxes = merged(
        starts, starts + np.concatenate([pattern.lengths for pattern in patterns]), max_gap_bytes=max_gap_bytes
    )
    lengths = boxes.stop - boxes.start
    image_offsets = np.cumsum(lengths) - lengths
    return Image(
        patterns[0].bases,
        boxes.start,
        lengths,
        int(lengths.sum()),
        tuple(tuple(_image_runs(pattern, boxes.start, image_offsets)) for pattern in patterns),
    )


def _image_runs(pattern: Pattern, offsets: Int64s, image_offsets: Int64s) -> list[Run]:
    """The runs of a pattern out of boxes at these offsets in the page and in the image, as few loops."""
    box = np.searchsorted(offsets, pattern.src_offsets, side="right") - 1
    at = image_offsets[box] + pattern.src_offsets - offsets[box]
    columns = (pattern.src_pages, pattern.dst_pages, at, pattern.dst_offsets, pattern.lengths)
    runs = [Run(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return fold(sorted(runs, key=lambda run: (run.src_page, run.dst_page, run.length)))


def stage(
    pair: GroupPair,
    transfers: tuple[RankTransfer, ...],
    page_ranges: Sequence[PageRange],
    staging_bytes: int,
    budget: RequestBudget | None = None,
) -> Iterator[Batch]:
    """Batches of what some transfers of a pair move, transfer by transfer. `budget`: see `find_staged`. Raises BindError if one image does not
    fit the buffer.
    """
    for staged in find_staged(pair, transfers, page_ranges, budget):
        transfer, image = staged.transfer, staged.image
        size, num_fields = image.image_bytes, staged.num_fields
        if size > staging_bytes:
            raise BindError(
                f"fields {transfer.fields[0]}, ...: one page needs {size} bytes of staging, the buffer has {staging_bytes}; give a larger "
                "buffer or read directly"
            )
        fill = fill_bytes(staging_bytes, len(staged.pages) * size * num_fields, transfer.choice.model)
        pages_each = min(len(staged.pages), max(1, fill // size))
        yield from _batches(staged, image, pages_each, max(1, fill // (size * pages_each)))


def _batches(staged: StagedPages, image: Image, pages_each: int, fields_each: int) -> Iterator[Batch]:
    """Batches of so many pages of so many fields."""
    transfer, size = staged.transfer, image.image_bytes
    paths = [
        path
        for page_range, runs in zip(staged.page_ranges, image.runs, strict=True)
        for path in _paths(transfer, page_range, runs)
    ]
    image_offsets = np.cumsum(image.lengths) - image.lengths
    for low in range(0, len(staged.pages), pages_each):
        held = staged.pages[low : low + pages_each]
        source = (held[:, None] * transfer.src_page_stride_bytes + image.offsets).reshape(-1)
        place = (np.arange(len(held))[:, None] * size + image_offsets).reshape(-1)
        reads = coalesce(source, place, np.tile(image.lengths, len(held)), max_bytes=MAX_COPY_BYTES)
        moves = [move for path in paths for move in path.moves(held, size)]
        # Fields differ by their bases only: the reads of one are found once, and written out for all of them.
        for first in range(0, len(image.bases.src), fields_each):
            src, dst = (bases[first : first + fields_each] for bases in (image.bases.src, image.bases.dst))
            at = np.arange(len(src), dtype=np.int64) * (len(held) * size)
            columns = (src[:, None] + reads[0]).reshape(-1), (at[:, None] + reads[1]).reshape(-1)
            listed = CopyList(transfer.src_rank, transfer.dst_rank, *columns, np.tile(reads[2], len(src)))
            yield Batch(
                listed,
                tuple(replace(move, src_bases=at, dst_bases=dst) for move in moves),
                len(src) * len(held) * size,
            )


class _Path(msgspec.Struct, frozen=True, eq=False):
    """Runs from source pages, ascending, to destination pages, both of shape (n,); the latter as byte offsets of their pool."""

    runs: tuple[Run, ...]
    src_page: Int64s
    dst_at: Int64s

    def moves(self, held: Int64s, image_bytes: int) -> Iterator[Move]:
        """Of those whose source page is among `held`, which has all of a stretch; without bases."""
        low, high = np.searchsorted(self.src_page, (held[0], held[-1] + 1)).tolist()
        if low == high:
            return
        src_at, dst_at = np.searchsorted(held, self.src_page[low:high]) * image_bytes, self.dst_at[low:high]
        for run in self.runs:
            yield Move(run.length, run.loops, held, src_at + run.src_byte, held, dst_at + run.dst_byte)


def _paths(transfer: RankTransfer, page_range: PageRange, runs: Iterable[Run]) -> Iterator[_Path]:
    together: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        together.setdefault((run.src_page, run.dst_page), []).append(run)
    for (src_step, dst_step), found in together.items():
        src_page = page_range.page_ids(page_range.src, transfer.src_span, src_step)
        dst_at = page_range.page_ids(page_range.dst, transfer.dst_span, dst_step) * transfer.dst_page_stride_bytes
        order = np.argsort(src_page, kind="stable")
        yield _Path(tuple(found), src_page[order], dst_at[order])


def pack(batches: Iterable[Batch], staging_bytes: int, model: CostModel) -> Iterator[Batch]:
    """The same batches, neighbours of one source rank as one where they fit the buffer together."""
    waiting: list[Batch] = []
    filled, most = 0, fill_bytes(staging_bytes, model=model)
    for batch in batches:
        if waiting and (waiting[0].reads.src_rank != batch.reads.src_rank or filled + batch.buffer_bytes > most):
            yield _packed(waiting)
            waiting, filled = [], 0
        waiting.append(batch)
        filled += batch.buffer_bytes
    if waiting:
        yield _packed(waiting)


def _packed(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    at, reads, moves = 0, [], []
    for batch in batches:
        own = batch.reads
        reads.append(CopyList(own.src_rank, own.dst_rank, own.src_address, own.dst_address + at, own.length))
        moves += [replace(move, src_bases=move.src_bases + at) for move in batch.moves]
        at += batch.buffer_bytes
    return Batch(joined_lists(reads), tuple(moves), at)


def prefers_staging(
    pair: GroupPair,
    transfers: tuple[RankTransfer, ...],
    page_ranges: Sequence[PageRange],
    bound: Sequence[PagedCopies],
    staging_bytes: int,
) -> bool:
    """Whether page ranges of transfers whose way is open go through the buffer. `bound`: the same page ranges, read directly.

    A state is one page in every request, so the first request decides for all.
    """
    if not pair.is_state:
        return _is_predicted_faster(pair, transfers, page_ranges, bound, staging_bytes)
    cache = transfers[0].pattern_cache
    key = "prefers staging", staging_bytes, tuple([transfer.bases for transfer in transfers])
    return cache.get(
        pair, key, lambda: _is_predicted_faster(pair, transfers, page_ranges, bound, staging_bytes), lambda _: 1
    )


def _is_predicted_faster(
    pair: GroupPair,
    transfers: tuple[RankTransfer, ...],
    page_ranges: Sequence[PageRange],
    bound: Sequence[PagedCopies],
    staging_bytes: int,
) -> bool:
    model = transfers[0].choice.model
    aligned = group_aligned(bound)
    num_copies, num_bytes = sum(one.num_copies for one in aligned), sum(one.num_bytes for one in aligned)
    if not model.may_prefer_staging(num_copies, num_bytes):
        return False
    found = list(find_staged(pair, transfers, page_ranges))
    least_reads = sum(staged.num_fields * staged.least_reads for staged in found)
    if not model.may_prefer_staging(num_copies, num_bytes, least_reads):
        return False
    reads = read_bytes = runs = 0
    for staged in found:
        image, num_fields = staged.image, staged.num_fields
        if image.image_bytes > staging_bytes:
            return False
        reads += num_fields * staged.num_reads(image)
        read_bytes += num_fields * len(staged.pages) * image.image_bytes
        runs += num_fields * staged.num_runs(image)
    num_batches = max(1.0, read_bytes / fill_bytes(staging_bytes, read_bytes, model))
    return model.prefers_staging(Work(num_copies, num_bytes, reads + int(num_batches), read_bytes, runs, num_batches))
