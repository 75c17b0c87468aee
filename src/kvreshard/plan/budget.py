"""Budgets of predicted work: one to plan a pair of engines, one to plan a request between them.

A peer's layout arrives over the network, and a handshake that spins is an engine that stands still. So the election, and then each
route, predicts its work before it is done, in steps of some 10 ns, and is refused where the sum is above `MAX_STEPS`. Real pairs take a
hundredth of it. Steps are counted, not seconds: a pair is planned, or refused, on every machine alike.

A layout that is proved may still make each page of a request overlap in a way of its own, or in a million pieces. So a request has a budget
too: of the pieces in which its pages overlap, and of the copies that are listed one by one.
"""

from __future__ import annotations

from kvreshard.model.errors import BindError, LayoutMismatch
from kvreshard.model.layout import EngineLayout

# 256 ranks that share the sequence with 251 take a fifth of it. All of it takes two to three seconds.
MAX_STEPS = 1 << 28

# All overlaps of pages of one request together, which take some seconds at most. Requests between real engines have some thousands.
MAX_ENTRIES = 1 << 22
# Finding where two pages overlap takes some 0.2 ms, as much as this many pieces. At 128k tokens, pages of 1,056 tokens on 8 x 8 ranks that
# take turns of one token overlap pages of 1,072 in 8,832 ways, with a million pieces.
OVERLAP_ENTRIES = 1 << 8
# A nest of loops takes some 50 us to find, as much as this many pieces. A way counts for the first few of its own.
NEST_ENTRIES = 1 << 6
# A page of an overlap takes some 10 us beside its pieces, as much as this many of them.
PAGE_ENTRIES = 1 << 4
# Finding out whether one rank of many that share the sequence has anything of a page takes 35 us.
LOOK_ENTRIES = 40
# They take 0.4 GB. 128k tokens of 80 layers, from any memory order into any other, are 1.3 million at most.
MAX_LISTED = 1 << 24
_REMEDY = "choose memory orders that agree, and page sizes and interleaves that divide one another"


class Budget:
    """Steps that are left to plan one pair."""

    def __init__(self, src: EngineLayout, dst: EngineLayout) -> None:
        self._engines, self._left = (src, dst), MAX_STEPS

    def spend(self, field: str, steps: int, why: str) -> None:
        """Raises LayoutMismatch where the steps are more than what is left; `why`: what takes them."""
        self._left -= steps
        if self._left < 0:
            src, dst = (f"'{layout.engine}' ({len(layout.ranks)} ranks)" for layout in self._engines)
            raise LayoutMismatch(
                f"field '{field}': engines {src} and {dst} have {why}, and planning them takes more than {MAX_STEPS} steps; "
                "use fewer ranks, or parallel sizes, interleaves and page sizes that divide one another"
            )


def nest_entries(num_nests: int) -> int:
    """As how many pieces the nests of loops count in which one transfer's pages overlap."""
    return max(0, NEST_ENTRIES * num_nests - OVERLAP_ENTRIES)


class RequestBudget:
    """What is left to plan one request, or one part of it."""

    __slots__ = ("_entries", "_listed", "_overlaps")

    def __init__(self) -> None:
        self._overlaps = self._entries = self._listed = 0

    def look(self, num_transfers: int) -> None:
        """Count transfers of which it is found out whether they have anything of a page range."""
        self.spend(0, LOOK_ENTRIES * num_transfers)

    def spend(self, num_overlaps: int, num_entries: int) -> None:
        """Raises BindError where pages overlap in too many ways, or in too many pieces. A way is counted before it is looked at."""
        self._overlaps += num_overlaps
        self._entries += num_entries
        if self._entries + OVERLAP_ENTRIES * self._overlaps > MAX_ENTRIES:
            raise BindError(
                f"the pages of this request overlap in {self._overlaps} different ways or more, with {self._entries} pieces so far; at most "
                f"{MAX_ENTRIES} pieces are planned, and a way counts as {OVERLAP_ENTRIES}; {_REMEDY}"
            )

    def spend_listed(self, num_copies: int) -> None:
        """Raises BindError where too many copies would be listed one by one."""
        self._listed += num_copies
        if self._listed > MAX_LISTED:
            raise BindError(
                f"this request is {self._listed} copies or more, and at most {MAX_LISTED} are listed; {_REMEDY}"
            )
