"""The digest of cached values in logical coordinates: two layouts that hold the same bytes have the same digest.

    digest = sum over rows, units of a row: R[field, row] * U[unit] * (value + C)        modulo 2^64

A row is a token, or a coordinate of a state's first axis. A unit is two bytes of an element, or one where elements have an odd
size, read as a signed number; its number counts the units of a row in logical order, whichever of them the rank holds. R, U and C are
pseudo-random numbers of 64 bits under a key. No term depends on where a cell lies, so layouts agree; it is a sum, so digests of disjoint cells
add up. A difference is missed once in 2^44: docs/design/0006.

- `digest_transfers`: per transfer and field, from one side's own memory and address maps. Each destination rank's cells are in exactly one
  of its transfers, so replicas count once per rank that has them.
- `compare`: the two sides' digests, and the parts that differ.
- `digest_cells`: some cells of one rank as one sum.

Raises BindError: tables and intervals that do not fit (`cells`), a key of a wrong size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

import numpy as np

from kvreshard.model.errors import BindError, UsageError
from kvreshard.model.expect import expect
from kvreshard.model.tables import Request, Tokens
from kvreshard.plan.transfer import RankTransfer
from kvreshard.tools.cells import Cells, Int64s, Intervals, Side, Tables, find_rows, of_transfer
from kvreshard.transport.local import LocalMemory

MAX_KEY_BYTES = 64
# Units that are read at once: 256 KiB stay in a core's second-level cache.
UNITS_AT_ONCE = 1 << 17
MAX_LINES_IN_MESSAGE = 8


@dataclass(frozen=True, slots=True)
class Digest:
    """A sum modulo 2^64 over some cells, and how many bytes they have."""

    value: int
    num_bytes: int

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.value + other.value) % 2**64, self.num_bytes + other.num_bytes)

    def __str__(self) -> str:
        return f"{self.value:016x} of {self.num_bytes} bytes"


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """Some cells: a box of one field that one rank reads from another, and the tokens of it."""

    field: str
    src_rank: int
    dst_rank: int
    box: str
    tokens: tuple[Tokens, ...]

    def __str__(self) -> str:
        tokens = ", ".join(f"[{start}, {stop})" for start, stop in self.tokens)
        box = f" ({self.box})" if self.box else ""
        return f"field '{self.field}'{box}, source rank {self.src_rank} -> destination rank {self.dst_rank}, tokens {tokens}"


@dataclass(frozen=True, slots=True)
class Difference:
    """A part whose digests differ; None where a side has no digest of it."""

    part: Part
    src: Digest | None
    dst: Digest | None

    def __str__(self) -> str:
        return f"{self.part}: the source has {self.src or 'no digest'}, the destination {self.dst or 'no digest'}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many parts and bytes were compared, and which differ, sorted."""

    num_parts: int
    num_bytes: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        """Whether every part was there on both sides, with one digest. False where there was no part (`num_parts` 0): nothing was compared."""
        return self.num_parts > 0 and not self.differences

    def __str__(self) -> str:
        if not self.num_parts:
            return "nothing was compared: no tokens of these fields were digested; are the names of the fields right?"
        if self.equal:
            return f"{self.num_parts} parts of {self.num_bytes} bytes are equal on both sides"
        lines = [str(difference) for difference in self.differences[:MAX_LINES_IN_MESSAGE]]
        if len(self.differences) > MAX_LINES_IN_MESSAGE:
            lines.append(f"and {len(self.differences) - MAX_LINES_IN_MESSAGE} more")
        return f"{len(self.differences)} of {self.num_parts} parts differ:\n  " + "\n  ".join(lines)


def compare(src: Mapping[Part, Digest], dst: Mapping[Part, Digest]) -> Verdict:
    """The verdict over all parts that either side has."""
    for digests in (src, dst):
        expect(digests, Mapping, "the digests of a side", "what `digest_transfers` returns")
        for part, digest in digests.items():
            expect(part, Part, "a part of the digests", "what `digest_transfers` returns")
            expect(digest, Digest, "a digest", "what `digest_transfers` returns")
    parts = sorted({*src, *dst})
    found = tuple(Difference(part, src.get(part), dst.get(part)) for part in parts if src.get(part) != dst.get(part))
    return Verdict(len(parts), sum(digest.num_bytes for digest in src.values()), found)


def digest_transfers(
    transfers: Iterable[RankTransfer],
    side: Side,
    request: Request,
    memory: LocalMemory,
    key: bytes,
    fields: Collection[str] | None = None,
) -> dict[Part, Digest]:
    """The digest of every field of every transfer, over the cells that the transfer moves for the request.

    A side needs its own block tables only. `memory` holds that side's ranks of these transfers. `fields`: only these. A transfer
    whose group has no intervals is left out. Names that no transfer has bring nothing: a rank need not hold
    all fields. Raises UsageError for arguments of other types, BindError for a request that does not fit.
    """
    expect(transfers, Iterable, "the transfers", "`route.transfers` of what `kvreshard.compile_routes` returns")
    expect(request, Request, "a request", "Request(src_tables, dst_tables, intervals, dst_new_pages)")
    expect(key, bytes, "the key of a digest", "bytes, the same on both sides")
    if not callable(getattr(memory, "weighted_sums", None)):
        raise UsageError(f"the memory is of type {type(memory).__name__}; for host memory give kvreshard.HostMemory()")
    if side not in get_args(Side):
        raise UsageError(f"side is {side!r:.80}, and must be {' or '.join(map(repr, get_args(Side)))}")
    if fields is not None:
        expect(fields, Collection, "the fields", "['layers.0.attn.k', ...], or None for all")
        if isinstance(fields, str):
            raise UsageError(f"the fields are the text {fields!r:.80}; give a list of names")
    tables = request.src_tables if side == "src" else request.dst_tables
    found = dict[Part, Digest]()
    for transfer in transfers:
        expect(transfer, RankTransfer, "a transfer", "one of `route.transfers`")
        cells, name = of_transfer(transfer, side).only(fields), transfer.dst_group.name
        if name not in request.intervals:
            raise BindError(f"group '{name}': no token intervals; give an empty list to digest nothing")
        intervals = tuple((int(start), int(stop)) for start, stop in request.intervals[name])
        if not intervals:
            continue
        box = ", ".join(f"{axis.name} {axis.chosen}" for axis in transfer.axes)
        digests = _digest_fields(cells, tables, {cells.group.name: intervals}, memory, key)
        for field, digest in zip(cells.fields, digests, strict=True):
            found[Part(field, transfer.src_rank, transfer.dst_rank, box, intervals)] = digest
    return found


def digest_cells(cells: Cells, tables: Tables, intervals: Intervals, memory: LocalMemory, key: bytes) -> Digest:
    """One digest over all fields of `cells`, for the tokens of its group in `intervals`."""
    return sum(_digest_fields(cells, tables, intervals, memory, key), Digest(0, 0))


def cut_tokens(intervals: tuple[Tokens, ...], size: int) -> Iterator[tuple[Tokens, ...]]:
    """The intervals, cut at the multiples of `size`; pieces of one multiple together."""
    together: dict[int, list[Tokens]] = {}
    for start, stop in intervals:
        for number in range(start // size, -(-stop // size)):
            piece = (max(start, number * size), min(stop, (number + 1) * size))
            together.setdefault(number, []).append(piece)
    yield from (tuple(pieces) for pieces in together.values())


def _digest_fields(cells: Cells, tables: Tables, intervals: Intervals, memory: LocalMemory, key: bytes) -> list[Digest]:
    """The digest of each of some congruent fields."""
    unit_bytes = 2 if cells.element_bytes % 2 == 0 else 1
    runs, units = _describe_row(cells, unit_bytes, key)
    presence = weights(key, "presence", np.zeros(1, np.int64))
    at_once = max(1, UNITS_AT_ONCE // max(1, units.size))
    values, num_rows = [0] * len(cells.fields), 0
    for coordinates, offsets in find_rows(cells, tables, intervals):
        num_rows += len(offsets)
        # The number of tokens that a state has absorbed is in its digest: the right bytes of another moment have another digest.
        is_state = cells.sequence is None
        role = f"state\0{tables[cells.group.name].num_tokens}" if is_state else "row"
        for number, (field, base) in enumerate(zip(cells.fields, cells.bases, strict=True)):
            row_weights = weights(key, f"{role}\0{field}", coordinates)
            for first in range(0, len(offsets) if units.size else 0, at_once):
                part = slice(first, first + at_once)
                sums = memory.weighted_sums(base + offsets[part], runs, units, unit_bytes)
                values[number] += int((row_weights[part] * (sums + presence * units.sum())).sum())
    return [Digest(value % 2**64, num_rows * units.size * unit_bytes) for value in values]


def _describe_row(cells: Cells, unit_bytes: int, key: bytes) -> tuple[Int64s, Int64s]:
    """The runs of adjacent units of a row, as byte offsets of shape (m,), and the weights of their units, shape (m, k)."""
    offsets = numbers = np.zeros(1, dtype=np.int64)
    for cut in cells.inner:
        coordinates = np.arange(*cut.bounds(), dtype=np.int64)
        offsets = (offsets[:, None] + cut.locate(coordinates)).reshape(-1)
        numbers = (numbers[:, None] * (cut.axis.extent or 1) + coordinates).reshape(-1)
    inside = np.arange(cells.element_bytes // unit_bytes, dtype=np.int64)
    offsets = (offsets[:, None] + inside * unit_bytes).reshape(-1)
    numbers = (numbers[:, None] * len(inside) + inside).reshape(-1)
    order = np.argsort(offsets, kind="stable")
    offsets, units = offsets[order], weights(key, "unit", numbers[order])
    ends = np.flatnonzero(np.diff(offsets) != unit_bytes) + 1
    length = int(np.gcd.reduce([len(offsets), *ends.tolist()])) or 1
    return offsets[::length], units.reshape(-1, length)


def weights(key: bytes, role: str, numbers: Int64s) -> Int64s:
    """Pseudo-random numbers of 64 bits, same shape: SplitMix64 of the numbers, from a seed that is BLAKE2b of the role under the key."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise BindError(f"digest key of {len(key)} bytes; both sides need one key of 1 to {MAX_KEY_BYTES} bytes")
    seed = hashlib.blake2b(role.encode(), digest_size=8, key=key, person=b"kvreshard-digest").digest()
    mixed = np.frombuffer(seed, dtype="<u8") + (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Int64s = (mixed ^ (mixed >> np.uint64(31))).view(np.int64)
    return found
