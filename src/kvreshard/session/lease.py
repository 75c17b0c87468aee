"""How does a source rank know when a request's pages may be freed, and how can a reader tell that they were not?

A one-sided read cannot be revoked, so a generation belongs to the lease:

1. `grant`: while the request still computes, its word is written into a slot of the rank's registered `LeaseTable`.
2. `offer`: the request has finished; its pages are kept until every reporter has reported, or the lease runs out. Heartbeats
   renew it.
3. Before the pages are said to be free, the word is cleared. A reader reads the word after its last data read; another word
   than it was told means that the pages may have been reused.

What is said of one lease costs no more where there are others: the times at which leases end stand in a heap, and a lease that was renewed
is put back when its former time has come.

Reports are sets: a report names its consumer, its reporter and all reporters that this rank will hear from. Duplicates, late
reports and reports that do not know the word change nothing; each consumer engine (a router's retry) has its own set. A
report may come before the offer, since the reader may be faster than this rank's next step.
"""

from __future__ import annotations

import heapq
import itertools
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from kvreshard.model.errors import KvReshardError
from kvreshard.model.tables import PageTable
from kvreshard.model.wire import MAX_RANKS
from kvreshard.session.notes import Heartbeat, Report
from kvreshard.transport.base import MemoryRegion

WORD_BYTES = 8
FREE = 0
Cause = Literal["reported", "expired", "revoked"]
# A consumer that never reports must not fill memory with sets of its own.
MAX_CONSUMERS_PER_GRANT = 64
# Ended leases whose time stays in the heap, beside as many as are offered: leases may last a day.
MAX_ENDED = 1024


class LeaseTable:
    """`num_slots` 64-bit words in page-aligned memory that peers may read. Slot numbers are given by the engine."""

    def __init__(self, num_slots: int) -> None:
        self._memory = mmap.mmap(-1, num_slots * WORD_BYTES)
        self._words = np.frombuffer(self._memory, dtype=np.uint64)

    @property
    def region(self) -> MemoryRegion:
        return MemoryRegion(int(self._words.ctypes.data), self._words.nbytes)

    def __len__(self) -> int:
        return len(self._words)

    def __setitem__(self, slot: int, word: int) -> None:
        self._words[slot] = word

    def __getitem__(self, slot: int) -> int:
        return int(self._words[slot])


@dataclass(slots=True)
class _Grant:
    slot: int
    word: int
    deadline_s: float | None = None
    ttl_s: float = 0.0
    reported: dict[str, set[int]] = field(default_factory=dict)
    is_complete: bool = False
    tables: Mapping[str, PageTable] = field(default_factory=dict)


class LeaseBook:
    """The leases of one source rank. Not thread-safe; times are seconds of the caller's clock."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._grants: dict[str, _Grant] = {}
        self._num_offered = 0
        # (deadline when it was put in, number, request, grant). One entry for each lease that is offered, and some that are over.
        self._deadlines: list[tuple[float, int, str, _Grant]] = []
        self._numbers = itertools.count()
        self._finished: dict[str, Cause] = {}

    def __len__(self) -> int:
        return len(self._grants)

    @property
    def num_offered(self) -> int:
        """Leases whose pages are kept for readers."""
        return self._num_offered

    def grant(self, request: str, slot: int, word: int) -> None:
        """Write a request's word; one of its former life is cleared. Raises KvReshardError for a slot outside the table or a word that
        means free.
        """
        if not 0 <= slot < len(self._table) or not FREE < word < 2**64:
            raise KvReshardError(
                f"request '{request}': lease slot {slot} of {len(self._table)} with word {word:#x}; a slot must be in the "
                "table and a word positive"
            )
        former = self._grants.get(request)
        if former is not None:
            self._num_offered -= former.deadline_s is not None
            if self._table[former.slot] == former.word:
                self._table[former.slot] = FREE
        self._grants[request] = _Grant(slot, word)
        self._table[slot] = word

    def foretell(self, slot: int, word: int) -> None:
        """Write a word before its grant is made, on whatever thread: a reader may be faster than this book's owner."""
        if 0 <= slot < len(self._table) and FREE < word < 2**64:
            self._table[slot] = word

    def holds(self, request: str, word: int) -> bool:
        """Whether the request has a grant with this word, so that its pages are still its own."""
        grant = self._grants.get(request)
        return grant is not None and grant.word == word

    def tables(self, request: str) -> Mapping[str, PageTable] | None:
        """The block tables that were offered under the request's lease, by group; None before the offer."""
        grant = self._grants.get(request)
        return None if grant is None or grant.deadline_s is None else grant.tables

    def offer(self, request: str, ttl_s: float, now_s: float, tables: Mapping[str, PageTable] | None = None) -> bool:
        """Keep the pages for `ttl_s` seconds after now or the last heartbeat. `tables`: which pages. False: the request has no grant."""
        grant = self._grants.get(request)
        if grant is None:
            return False
        if grant.deadline_s is None:
            self._num_offered += 1
        grant.ttl_s, grant.deadline_s, grant.tables = ttl_s, now_s + ttl_s, tables or {}
        heapq.heappush(self._deadlines, (grant.deadline_s, next(self._numbers), request, grant))
        if grant.is_complete:
            self._end(request, "reported")
        return True

    def revoke(self, request: str) -> None:
        """End a lease: of one that was never offered (the request was aborted) nothing is reported; of another its readers fail."""
        grant = self._grants.get(request)
        if grant is not None and grant.deadline_s is not None:
            self._end(request, "revoked")
        elif grant is not None:
            del self._grants[request]
            self._table[grant.slot] = FREE

    def report(self, report: Report) -> None:
        """Take a report; the lease ends when all of its consumer's reporters have reported."""
        grant = self._grants.get(report.request)
        if grant is None or grant.word != report.word or report.reporter not in report.reporters:
            return
        if report.consumer not in grant.reported and len(grant.reported) >= MAX_CONSUMERS_PER_GRANT:
            return
        reported = grant.reported.setdefault(report.consumer, set())
        if len(reported) >= MAX_RANKS:
            return
        reported.add(report.reporter)
        if reported.issuperset(report.reporters):
            grant.is_complete = True
            if grant.deadline_s is not None:
                self._end(report.request, "reported")

    def renew(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Renew the leases of a heartbeat whose words are right."""
        for request, word in heartbeat.leases:
            grant = self._grants.get(request)
            if grant is not None and grant.word == word and grant.deadline_s is not None:
                grant.deadline_s = max(grant.deadline_s, now_s + grant.ttl_s)

    def expire(self, now_s: float) -> None:
        """End the leases whose time has run out."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number, request, grant = heapq.heappop(self._deadlines)
            if self._grants.get(request) is not grant or grant.deadline_s is None:
                continue
            if grant.deadline_s > now_s:  # renewed, or offered again
                heapq.heappush(self._deadlines, (grant.deadline_s, number, request, grant))
            else:
                self._end(request, "expired")

    def take_finished(self) -> Mapping[str, Cause]:
        """Requests whose pages may be freed, since the last call. Their words are cleared already."""
        finished, self._finished = self._finished, {}
        return finished

    def _end(self, request: str, cause: Cause) -> None:
        grant = self._grants.pop(request)
        self._num_offered -= 1
        self._table[grant.slot] = FREE
        self._finished[request] = cause
        if len(self._deadlines) > 2 * self._num_offered + MAX_ENDED:
            self._deadlines = [entry for entry in self._deadlines if self._grants.get(entry[2]) is entry[3]]
            heapq.heapify(self._deadlines)
