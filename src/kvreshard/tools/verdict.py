"""The comparison of two sides' digests: whether they have the same bytes, and which fields, ranks and tokens differ.

A `Digest` belongs to a `Part`: one field, between which ranks, which box of it, which tokens. Digests of disjoint parts add
up. `compare` matches parts of both sides and lists those that are not equal; the list is the message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.model.tables import Tokens

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
    """Which cells: a box of one field that one rank reads from another, and the tokens of it."""

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
        """Whether every part was there on both sides, with one digest."""
        return not self.differences

    def __str__(self) -> str:
        if self.equal:
            return f"{self.num_parts} parts of {self.num_bytes} bytes are equal on both sides"
        lines = [str(difference) for difference in self.differences[:MAX_LINES_IN_MESSAGE]]
        if len(self.differences) > MAX_LINES_IN_MESSAGE:
            lines.append(f"and {len(self.differences) - MAX_LINES_IN_MESSAGE} more")
        return f"{len(self.differences)} of {self.num_parts} parts differ:\n  " + "\n  ".join(lines)


def compare(src: Mapping[Part, Digest], dst: Mapping[Part, Digest]) -> Verdict:
    """The verdict over all parts that either side has."""
    parts = sorted({*src, *dst})
    found = tuple(Difference(part, src.get(part), dst.get(part)) for part in parts if src.get(part) != dst.get(part))
    return Verdict(len(parts), sum(digest.num_bytes for digest in src.values()), found)
