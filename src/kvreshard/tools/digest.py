"""What is the digest of the bytes that one side has, in logical coordinates?

    digest = F[field] * sum over cells of (product over axes of A[axis, coordinate])
                      * sum over the cell's bytes of W[word] * 256^(byte in word) * (byte + C)        modulo 2^61 - 1

F, A, W and C are pseudo-random under the request's key (`weights`); the last axis with an end is read as words of four bytes
(`interior`), a state has its position for a coordinate (`pages`). Nothing in it depends on where a cell lies, so two layouts
agree exactly when their cells do, up to one miss in 2^53; why: docs/design/0006-digest.md.

- `digest_lanes`: per lane, from one side's own memory and address maps. This is how a transfer is verified: the source
  computes its lanes while the lease holds, the reader computes the same ones, `compare` says whether they are equal.
- `digest_parts`: the same per range of tokens, to find where a difference lies.
- `digest_cells`: some cells of one rank as one sum, for whoever asks about a part of a transfer.
- `digest_rank`, `digest_engine`: per field, each cell counted once over its replicas; digests of ranks add up to the engine's.

Refused with BindError: tables and intervals that do not fit (`pages`), a key of a wrong size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import product

from kvreshard.model.errors import BindError
from kvreshard.model.layout import EngineLayout
from kvreshard.model.tables import Request, Tokens
from kvreshard.plan.lane import Lane
from kvreshard.tools.cells import Cells, Side, of_lane, of_rank
from kvreshard.tools.interior import ordinary_pieces, packed_pieces
from kvreshard.tools.memory import Memory
from kvreshard.tools.modular import PRIME
from kvreshard.tools.pages import Intervals, Tables, page_rows
from kvreshard.tools.summation import make_block, sum_block
from kvreshard.tools.verdict import NOTHING, Digest, Part
from kvreshard.tools.weights import Role, Weights


def digest_lanes(
    lanes: Iterable[Lane],
    side: Side,
    request: Request,
    memory: Memory,
    key: bytes,
    fields: Collection[str] | None = None,
) -> dict[Part, Digest]:
    """The digest of every field of every lane, over the cells that the lane moves for the request.

    A side needs its own block tables only. `memory` holds that side's ranks of these lanes. `fields`: only these. A lane
    whose group has no intervals is left out.
    """
    weights, found = Weights(key), dict[Part, Digest]()
    for lane in lanes:
        found |= _digest_lane(lane, side, request, _intervals_of(lane, request), memory, weights, fields)
    return found


def digest_parts(
    lanes: Iterable[Lane],
    side: Side,
    request: Request,
    memory: Memory,
    key: bytes,
    tokens_per_part: int,
    fields: Collection[str] | None = None,
) -> dict[Part, Digest]:
    """As `digest_lanes`, cut at the multiples of `tokens_per_part`, rounded up to whole indices. A state is one part."""
    if tokens_per_part <= 0:
        raise BindError(f"parts of {tokens_per_part} tokens; a size must be positive")
    weights, found = Weights(key), dict[Part, Digest]()
    for lane in lanes:
        intervals = _intervals_of(lane, request)
        size = -(-tokens_per_part // lane.tokens_per_index) * lane.tokens_per_index
        for part in [intervals] if lane.is_state else cut_tokens(intervals, size):
            found |= _digest_lane(lane, side, request, part, memory, weights, fields)
    return found


def digest_cells(cells: Cells, tables: Tables, intervals: Intervals, memory: Memory, key: bytes) -> Digest:
    """One digest over all fields of `cells`, for the tokens of its group in `intervals`."""
    per_field = _digest_cells(cells, tables, intervals, memory, Weights(key))
    return sum(per_field.values(), NOTHING)


def digest_rank(
    layout: EngineLayout,
    rank: int,
    tables: Tables,
    intervals: Intervals,
    memory: Memory,
    key: bytes,
    fields: Collection[str] | None = None,
) -> dict[str, Digest]:
    """Per field the digest of those cells for which the rank answers: no rank of a lower number holds them.

    `intervals`: per group of this engine. `fields`: only these; leave out what the other engine does not have.
    """
    weights, found = Weights(key), defaultdict[str, Digest](lambda: NOTHING)
    for cells in of_rank(layout, rank, fields):
        for field, digest in _digest_cells(cells, tables, intervals, memory, weights).items():
            found[field] += digest
    return dict(found)


def digest_engine(
    layout: EngineLayout,
    tables: Tables,
    intervals: Intervals,
    memory_of_rank: Mapping[int, Memory],
    key: bytes,
    fields: Collection[str] | None = None,
) -> dict[str, Digest]:
    """Per field the digest of the whole engine. Post-condition: the sum of `digest_rank` over its ranks."""
    per_rank = [
        digest_rank(layout, rank.rank, tables, intervals, memory_of_rank[rank.rank], key, fields)
        for rank in layout.ranks
    ]
    return add_up(per_rank)


def add_up(digests: Iterable[Mapping[str, Digest]]) -> dict[str, Digest]:
    """Digests of disjoint cells, added field by field."""
    found = defaultdict[str, Digest](lambda: NOTHING)
    for per_field in digests:
        for field, digest in per_field.items():
            found[field] += digest
    return dict(found)


def _digest_lane(
    lane: Lane,
    side: Side,
    request: Request,
    intervals: tuple[Tokens, ...],
    memory: Memory,
    weights: Weights,
    fields: Collection[str] | None,
) -> dict[Part, Digest]:
    cells = of_lane(lane, side).only(fields)
    if not intervals or not cells.fields:
        return {}
    tables = request.src_tables if side == "src" else request.dst_tables
    digests = _digest_cells(cells, tables, {cells.group.name: intervals}, memory, weights)
    box = ", ".join(f"{a.name} {a.chosen}" for a in lane.axes)
    return {Part(field, lane.src_rank, lane.dst_rank, box, intervals): digest for field, digest in digests.items()}


def _digest_cells(
    cells: Cells, tables: Tables, intervals: Intervals, memory: Memory, weights: Weights
) -> dict[str, Digest]:
    """The digest of each of some congruent fields."""
    ordinary = [ordinary_pieces(cut, weights) for cut in cells.bounded[:-1]]
    packed = packed_pieces(cells, weights)
    values, presence, num_bytes = [0] * len(cells.fields), 0, 0
    for rows in page_rows(cells, tables, intervals):
        role, name = (Role.AXIS, cells.sequence.name) if cells.sequence else (Role.POSITION, "")
        row_weights = weights.along(role, name, rows.coordinates)
        for *pieces, last in product(*ordinary, packed):
            found = sum_block(make_block(rows, row_weights, pieces, last), cells.bases, memory)
            values = [(value + more) % PRIME for value, more in zip(values, found.values, strict=True)]
            presence, num_bytes = presence + found.presence, num_bytes + found.num_bytes
    presence = presence * weights.single(Role.PRESENCE) % PRIME
    return {
        field: Digest(weights.single(Role.FIELD, field) * (value + presence) % PRIME, num_bytes)
        for field, value in zip(cells.fields, values, strict=True)
    }


def _intervals_of(lane: Lane, request: Request) -> tuple[Tokens, ...]:
    name = lane.dst_group.name
    if name not in request.intervals:
        raise BindError(f"group '{name}': no token intervals; give an empty list to digest nothing")
    return tuple((int(start), int(stop)) for start, stop in request.intervals[name])


def cut_tokens(intervals: tuple[Tokens, ...], size: int) -> Iterator[tuple[Tokens, ...]]:
    """The intervals, cut at the multiples of `size`; pieces of one multiple together."""
    together: dict[int, list[Tokens]] = {}
    for start, stop in intervals:
        for number in range(start // size, -(-stop // size)):
            piece = (max(start, number * size), min(stop, (number + 1) * size))
            together.setdefault(number, []).append(piece)
    yield from (tuple(pieces) for pieces in together.values())
