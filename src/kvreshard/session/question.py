"""How is one rank asked for the digest of a part of a request, and how does it find the answer in its own memory?

The reader's side, `make_questions`: the lanes of its route, cut so that a question covers at most `QUESTION_BYTES`. A digest is
linear, so parts may be compared one by one. Each comes with the reader's own cells.

The source's side, `answer_question`:

1. The named fields must be its own and congruent; their cells are cut to the ownerships that the question names.
2. What it would cost is bounded before anything is read.
3. The digest, from its own memory and address maps, of the pages that it offered under the lease (`lease`): a reader that has read other
   pages gets another digest.

Refused with QuestionError: unknown fields, a wrong number of axes, too many tokens or bytes; with BindError what `verify`
refuses. Neither addresses nor pages come from a question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from kvreshard.model.errors import KvReshardError
from kvreshard.model.layout import EngineLayout, Rank
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.model.tables import PageTable, Request, Tokens
from kvreshard.plan.cover import count_common
from kvreshard.plan.lane import Lane
from kvreshard.session.notes import VERSION, Owned, Question
from kvreshard.session.orders import RemoteLease
from kvreshard.verify import Digest, Memory, digest_cells
from kvreshard.verify.cells import Cells, Cut, of_lane
from kvreshard.verify.digest import cut_tokens

# 16 MiB take some 6 ms to digest: what a session's thread may do at a stretch.
QUESTION_BYTES = 16 << 20
QUESTION_FIELDS = 128
# One page, or one state, may be larger than a question should be; a peer cannot ask for more than this.
MAX_BYTES = 8 * QUESTION_BYTES
MAX_TOKENS = 1 << 22
MAX_INTERVALS = 1 << 10
MAX_OWNERSHIPS = 4


class QuestionError(KvReshardError):
    """A question that this rank will not answer: of fields that it does not have, or too large."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One question's subject, seen by the reader: a lane's cells here, and the tokens of them."""

    src_rank: int
    mine: Cells
    intervals: tuple[Tokens, ...]

    def __str__(self) -> str:
        fields = self.mine.fields
        more = f" and {len(fields) - 1} more fields" if len(fields) > 1 else ""
        tokens = ", ".join(f"[{start}, {stop})" for start, stop in self.intervals)
        return f"field '{fields[0]}'{more}, tokens {tokens}, from source rank {self.src_rank}"

    def digest(self, request: Request, memory: Memory, key: bytes) -> Digest:
        """The reader's own digest of it."""
        return digest_cells(self.mine, request.dst_tables, {self.mine.group.name: self.intervals}, memory, key)


def readable(memory: object, rank: Rank) -> Memory | None:
    """The rank's memory for digests; None where it does not reach all of it."""
    if isinstance(memory, Memory) and all(memory.reaches(device) for device in set(rank.devices)):
        return memory
    return None


def make_questions(
    lanes: Sequence[Lane], request: Request, lease: RemoteLease, key: bytes, new_token: Callable[[], int]
) -> Iterator[tuple[Part, Question]]:
    """Every cell that the lanes move for the request, in exactly one question. `new_token()` gives a random word."""
    for lane in lanes:
        intervals = tuple((int(start), int(stop)) for start, stop in request.intervals[lane.dst_group.name])
        if not intervals:
            continue
        num_fields, num_tokens = _size(lane)
        parts = [intervals] if lane.is_state else list(cut_tokens(intervals, num_tokens))
        within = tuple((_to_owned(axis.dst.owned), _to_owned(axis.chosen)) for axis in lane.axes)
        cells = of_lane(lane, "dst")
        for first in range(0, len(lane.fields), num_fields):
            fields = lane.fields[first : first + num_fields]
            mine = cells.only(fields)
            for part in parts:
                yield (
                    Part(lane.src_rank, mine, part),
                    Question(
                        VERSION,
                        lease.request,
                        lease.word,
                        new_token(),
                        key,
                        fields,
                        within,
                        part,
                    ),
                )


def answer_question(
    question: Question, tables: Mapping[str, PageTable], layout: EngineLayout, rank: int, memory: Memory
) -> Digest:
    """The digest that was asked for, of the pages in `tables`, which were offered under the lease, from this rank's own memory.

    Raises QuestionError or another KvReshardError.
    """
    cells = _find_cells(question, layout, layout.rank_by_number[rank])
    _check_cost(question, cells)
    return digest_cells(cells, tables, {cells.group.name: question.intervals}, memory, question.key)


def _size(lane: Lane) -> tuple[int, int]:
    """Fields and tokens of one question about a lane."""
    per_index = lane.element_bytes * prod(
        count_common(axis.extent, axis.src.owned, axis.dst.owned, axis.chosen)
        for axis in lane.axes
        if axis.extent is not None
    )
    if lane.is_state:
        return max(1, min(QUESTION_FIELDS, QUESTION_BYTES // max(1, per_index))), 1
    page = lane.src_group.tokens_per_page or 1
    indices = max(1, page // lane.tokens_per_index)
    num_fields = max(1, min(QUESTION_FIELDS, len(lane.fields), QUESTION_BYTES // max(1, per_index * indices)))
    tokens = QUESTION_BYTES // max(1, per_index * num_fields) * lane.tokens_per_index
    tokens = max(lane.tokens_per_index, min(tokens, MAX_TOKENS))
    return num_fields, tokens // lane.tokens_per_index * lane.tokens_per_index


def _find_cells(question: Question, layout: EngineLayout, rank: Rank) -> Cells:
    shards = []
    for name in question.fields:
        shard = rank.shard_by_field.get(name)
        if shard is None:
            raise QuestionError(f"field '{name[:80]}' is not on rank {rank.rank} of engine '{layout.engine}'")
        shards.append(shard)
    if not shards:
        raise QuestionError("a question names no fields")
    field, geometry = layout.field_by_name[shards[0].field], shards[0].geometry
    for shard in shards:
        other = layout.field_by_name[shard.field]
        if (other.axes, other.element_bytes, shard.geometry) != (field.axes, field.element_bytes, geometry):
            raise QuestionError(f"fields '{field.name}' and '{other.name}' differ in shape; ask for them one by one")
    if len(question.within) != len(field.axes) or any(len(owned) > MAX_OWNERSHIPS for owned in question.within):
        raise QuestionError(f"{len(question.within)} axes are named; field '{field.name}' has {len(field.axes)}")
    sequence = field.sequence
    return Cells(
        question.fields,
        np.array([rank.base_address(shard) for shard in shards], dtype=np.int64),
        field.element_bytes,
        layout.group_by_name[geometry.group],
        geometry.page_stride_bytes,
        tuple(
            Cut(axis.name, axis.extent, mapped, tuple(_from_owned(owned) for owned in owners))
            for axis, mapped, owners in zip(field.axes, geometry.axes, question.within, strict=True)
        ),
        sequence.tokens_per_index if sequence else 1,
        sequence.keep_partial if sequence else False,
    )


def _check_cost(question: Question, cells: Cells) -> None:
    intervals = question.intervals
    ends = [end for interval in intervals for end in interval]
    if not intervals or len(intervals) > MAX_INTERVALS or any(high < low for low, high in pairwise(ends)):
        raise QuestionError(f"{len(intervals)} token intervals; give 1 to {MAX_INTERVALS}, ascending and disjoint")
    num_tokens = sum(stop - start for start, stop in intervals)
    widths = [high - low for low, high in (axis.bounds() for axis in cells.bounded)]
    if min(widths, default=1) <= 0:
        raise QuestionError(f"no cell of field '{cells.fields[0]}' lies on this rank and in the box that is asked for")
    indices = 1 if cells.sequence is None else num_tokens // cells.tokens_per_index + len(intervals)
    num_bytes = cells.element_bytes * prod(widths) * indices * len(cells.fields)
    if num_tokens > MAX_TOKENS or num_bytes > MAX_BYTES:
        raise QuestionError(
            f"{num_tokens} tokens of {num_bytes} bytes in one question; at most {MAX_TOKENS} and {MAX_BYTES} are answered"
        )


def _to_owned(owned: Ownership) -> Owned:
    return (owned.start, owned.stop, None) if isinstance(owned, Interval) else (owned.start, owned.run, owned.step)


def _from_owned(owned: Owned) -> Ownership:
    start, second, step = owned
    if step is None:
        return Interval(start, second)
    return Cyclic(start, second or 0, step)
