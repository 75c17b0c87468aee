"""The report of a request in shadow mode: what this connector would have copied, compared with what NixlConnector posted.

`compare_load` binds the load on a compiled route. Several source ranks may hold the same bytes (replicas). When NixlConnector read from other
ranks than our election, the election is repeated among the ranks that it read.

Both ways are sets of copies. Each is cut where the other's copies begin and end; then both write a piece of destination memory from the same
source byte, both from different ones, or one of them alone does. Nothing is moved.

| verdict | |
|---|---|
| `same` | both bring every byte from the same place |
| `more` | as `same`, and NixlConnector also fills what the request does not need: the last token, the rest of the last page, what left a window |
| `missing` | NixlConnector leaves bytes unwritten that this connector would load, or has no page for them (`reason`) |
| `differs` | some bytes come from another place: wrong, unless NixlConnector rearranges them afterwards (`rearranges`) |
| `refused there` | NixlConnector did not load the request |
| `refused here` | this connector would not load it: `reason` |
| `unknown` | the comparison failed: `reason` |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.plan.bind import bind
from kvreshard.plan.compile import compile_route
from kvreshard.plan.copies import CopyList
from kvreshard.plan.route import Route
from kvreshard.session.commands import Load

Int64s = NDArray[np.int64]


class ShadowReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request on one rank. Sizes in bytes; copies are those of the planner, descriptors those of NixlConnector."""

    request: str
    peer: str
    rank: int
    verdict: str
    reason: str = ""
    num_tokens: int = 0
    their_tokens: int = 0
    num_bytes: int = 0
    num_copies: int = 0
    their_bytes: int = 0
    their_descriptors: int = 0
    same_bytes: int = 0
    elsewhere_bytes: int = 0
    missing_bytes: int = 0
    surplus_bytes: int = 0
    first_elsewhere: int | None = None
    rearranges: bool = False

    def sentence(self) -> str:
        """One line for the log."""
        extra = f" ({self.reason})" if self.reason else ""
        return (
            f"request {self.request} from engine {self.peer}, rank {self.rank}: {self.verdict}{extra}; here {self.num_bytes} "
            f"bytes in {self.num_copies} copies, NixlConnector {self.their_bytes} in {self.their_descriptors}; "
            f"{self.elsewhere_bytes} bytes from another place, {self.missing_bytes} missing, {self.surplus_bytes} surplus"
        )


def compare_load(
    load: Load, route: Route, src: EngineLayout, dst: EngineLayout, theirs: Sequence[CopyList], facts: dict[str, Any]
) -> ShadowReport:
    """The report of one load. `facts`: further fields of the report. `src` and `dst` are what `route` was compiled from."""
    known = {
        **facts,
        "their_bytes": sum(c.num_bytes for c in theirs),
        "their_descriptors": sum(c.num_copies for c in theirs),
    }
    try:
        route = _among(route, src, dst, {copies.src_rank for copies in theirs})
        mine = list(bind(route, load.transfer))
    except KvReshardError as error:
        return ShadowReport(verdict="refused here", reason=str(error), **known)
    known |= {"num_bytes": sum(c.num_bytes for c in mine), "num_copies": sum(c.num_copies for c in mine)}
    if not theirs:
        return ShadowReport(verdict="refused there" if mine else "same", **known)
    try:
        found = compare_moves(mine, theirs)
    except ValueError as error:
        return ShadowReport(verdict="unknown", reason=str(error), **known)
    verdict = "same"
    for name, count in (
        ("more", found.surplus_bytes),
        ("missing", found.missing_bytes),
        ("differs", found.elsewhere_bytes),
    ):
        verdict = name if count else verdict
    return ShadowReport(verdict=verdict, **asdict(found), **known)


def _among(route: Route, src: EngineLayout, dst: EngineLayout, ranks: set[int]) -> Route:
    """The route from those source ranks alone, or `route` where they do not hold everything."""
    if not ranks or ranks >= set(route.src_ranks):
        return route
    try:
        fewer = replace(src, ranks=tuple(rank for rank in src.ranks if rank.rank in ranks))
        return compile_route(fewer, dst, route.dst_rank)
    except KvReshardError:
        return route


@dataclass(frozen=True, slots=True)
class MovesCompared:
    """Bytes of destination memory, as in a `ShadowReport`: missing are written by the left way alone, surplus by the right way alone.

    `first_elsewhere`: the first address with two sources.
    """

    same_bytes: int
    elsewhere_bytes: int
    missing_bytes: int
    surplus_bytes: int
    first_elsewhere: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _SortedCopies:
    """Copies in the order of their destination; `shift`: source address minus destination address."""

    start: Int64s
    stop: Int64s
    rank: Int64s
    shift: Int64s

    def at(self, addresses: Int64s) -> tuple[NDArray[np.bool_], Int64s]:
        """Which addresses are written, and by which copy; shapes (n,)."""
        if not len(self.start):
            return np.zeros(len(addresses), np.bool_), np.zeros(len(addresses), np.int64)
        index = np.maximum(np.searchsorted(self.start, addresses, side="right") - 1, 0)
        return (self.start[index] <= addresses) & (addresses < self.stop[index]), index


def compare_moves(left: Iterable[CopyList], right: Iterable[CopyList]) -> MovesCompared:
    """Compare two ways to fill the memory of one rank. Raises ValueError if copies of one way write a byte twice."""
    a, b = _sorted(left), _sorted(right)
    edges = np.unique(np.concatenate([a.start, a.stop, b.start, b.stop]))
    low, size = edges[:-1], np.diff(edges)
    in_a, index_a = a.at(low)
    in_b, index_b = b.at(low)
    both = in_a & in_b
    same = both.copy()
    same[both] = (a.rank[index_a[both]] == b.rank[index_b[both]]) & (a.shift[index_a[both]] == b.shift[index_b[both]])
    elsewhere = both & ~same
    return MovesCompared(
        int(size[same].sum()),
        int(size[elsewhere].sum()),
        int(size[in_a & ~in_b].sum()),
        int(size[in_b & ~in_a].sum()),
        int(low[elsewhere][0]) if elsewhere.any() else None,
    )


def _sorted(copies: Iterable[CopyList]) -> _SortedCopies:
    lists = list(copies)
    if not lists:
        none = np.zeros(0, np.int64)
        return _SortedCopies(none, none, none, none)
    dst = np.concatenate([part.dst_address for part in lists])
    length = np.concatenate([part.length for part in lists])
    rank = np.concatenate([np.full(part.num_copies, part.src_rank, np.int64) for part in lists])
    shift = np.concatenate([part.src_address for part in lists]) - dst
    order = np.argsort(dst, kind="stable")
    dst, length, rank, shift = dst[order], length[order], rank[order], shift[order]
    if (dst[1:] < dst[:-1] + length[:-1]).any():
        at = int(np.argmax(dst[1:] < dst[:-1] + length[:-1]))
        raise ValueError(
            f"two copies write address {dst[at + 1]:#x}: {length[at]} bytes from {dst[at]:#x}, {length[at + 1]} from there"
        )
    return _SortedCopies(dst, dst + length, rank, shift)
