"""What would this package have done with a request that NixlConnector carried out, and where do the two differ?

`compare_load` binds the load on a compiled route and compares copies with copies. The same bytes may lie on several source
ranks (replicas): when NixlConnector read from others than our election, the election is made again among those that it read.

| verdict | |
|---|---|
| `same` | both bring every byte from the same place |
| `more` | so do both, and NixlConnector also fills what the request does not need: the last token, a last page's rest, a window's past |
| `missing` | NixlConnector leaves bytes unwritten that this connector would load, or has no page for them (`reason`) |
| `differs` | some bytes come from another place: wrong, unless NixlConnector rearranges them afterwards (`rearranges`) |
| `refused there` | NixlConnector did not load the request |
| `refused here` | this connector would not load it: `reason` |
| `unknown` | it cannot be said: `reason` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.plan.bind import bind
from kvreshard.plan.compile import compile_route
from kvreshard.plan.copies import CopyList
from kvreshard.plan.route import Route
from kvreshard.session.commands import Load
from kvreshard.tools.moves import compare_moves


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
        """For the log."""
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
    told = {
        **facts,
        "their_bytes": sum(c.num_bytes for c in theirs),
        "their_descriptors": sum(c.num_copies for c in theirs),
    }
    try:
        route = _among(route, src, dst, {copies.src_rank for copies in theirs})
        mine = list(bind(route, load.transfer))
    except KvReshardError as error:
        return ShadowReport(verdict="refused here", reason=str(error), **told)
    told |= {"num_bytes": sum(c.num_bytes for c in mine), "num_copies": sum(c.num_copies for c in mine)}
    if not theirs:
        return ShadowReport(verdict="refused there" if mine else "same", **told)
    try:
        found = compare_moves(mine, theirs)
    except ValueError as error:
        return ShadowReport(verdict="unknown", reason=str(error), **told)
    verdict = "same"
    for name, count in (
        ("more", found.only_right_bytes),
        ("missing", found.only_left_bytes),
        ("differs", found.elsewhere_bytes),
    ):
        verdict = name if count else verdict
    return ShadowReport(
        verdict=verdict,
        same_bytes=found.same_bytes,
        elsewhere_bytes=found.elsewhere_bytes,
        missing_bytes=found.only_left_bytes,
        surplus_bytes=found.only_right_bytes,
        first_elsewhere=found.first_elsewhere,
        **told,
    )


def _among(route: Route, src: EngineLayout, dst: EngineLayout, ranks: set[int]) -> Route:
    """The route from those source ranks alone, or the one we have when they do not hold everything."""
    if not ranks or ranks >= set(route.src_ranks):
        return route
    try:
        fewer = replace(src, ranks=tuple(rank for rank in src.ranks if rank.rank in ranks))
        return compile_route(fewer, dst, route.dst_rank)
    except KvReshardError:
        return route
