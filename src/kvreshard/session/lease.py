"""The leases of one source rank: when a request's pages may be freed, and the word by which a reader knows that they were not.

A one-sided read cannot be revoked, so a generation belongs to the lease:

1. `acquire`: while the request still computes, its word is written into a slot of the rank's registered `LeaseTable`.
2. `publish`: the request has finished; its pages are kept until every reporter has reported, or the lease runs out. Heartbeats
   renew it.
3. Before the pages are said to be free, the word is cleared. A reader reads the word after its last data read; another word
   than it was told means that the pages may have been reused.

What is said of one lease costs no more where there are others: the times at which leases end stand in a heap, and a lease that was renewed
is put back when its former time has come.

Reports are sets: a report names its consumer, its reporter and all reporters that this rank will hear from. Duplicates, late
reports and reports that do not know the word change nothing; each consumer engine (a router's retry) has its own set. A
report may come before `publish`, since the reader may be faster than this rank's next step.
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
from kvreshard.model.parts import MAX_RANKS
from kvreshard.model.tables import PageTable
from kvreshard.session.notes import Heartbeat, Report
from kvreshard.transport.base import MemoryRegion

WORD_BYTES = 8
FREE = 0
Cause = Literal["reported", "expired", "revoked"]
# A consumer that never reports must not fill memory with sets of its own.
MAX_CONSUMERS_PER_LEASE = 64
# Ended leases whose time stays in the heap, beside as many as are published: leases may last a day.
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
class _Lease:
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
        self._leases: dict[str, _Lease] = {}
        self._num_published = 0
        # (deadline when it was put in, number, request, lease). One entry for each lease that is published, and some that are over.
        self._deadlines: list[tuple[float, int, str, _Lease]] = []
        self._numbers = itertools.count()
        self._finished: dict[str, Cause] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_published(self) -> int:
        """Leases whose pages are kept for readers."""
        return self._num_published

    def acquire(self, request: str, slot: int, word: int) -> None:
        """Write a request's word; one of its former life is cleared. Raises KvReshardError for a slot outside the table or a word that
        means free.
        """
        if not 0 <= slot < len(self._table) or not FREE < word < 2**64:
            raise KvReshardError(
                f"request '{request}': lease slot {slot} of {len(self._table)} with word {word:#x}; a slot must be in the "
                "table and a word positive"
            )
        former = self._leases.get(request)
        if former is not None:
            self._num_published -= former.deadline_s is not None
            if self._table[former.slot] == former.word:
                self._table[former.slot] = FREE
        self._leases[request] = _Lease(slot, word)
        self._table[slot] = word

    def write_early(self, slot: int, word: int) -> None:
        """Write a word before its lease is acquired, on whatever thread: a reader may be faster than this book's owner."""
        if 0 <= slot < len(self._table) and FREE < word < 2**64:
            self._table[slot] = word

    def holds(self, request: str, word: int) -> bool:
        """Whether the request has a lease with this word, so that its pages are still its own."""
        lease = self._leases.get(request)
        return lease is not None and lease.word == word

    def tables(self, request: str) -> Mapping[str, PageTable] | None:
        """The block tables that were published under the request's lease, by group; None before `publish`."""
        lease = self._leases.get(request)
        return None if lease is None or lease.deadline_s is None else lease.tables

    def publish(self, request: str, ttl_s: float, now_s: float, tables: Mapping[str, PageTable] | None = None) -> bool:
        """Keep the pages for `ttl_s` seconds after now or the last heartbeat. `tables`: which pages. False: the request has no lease."""
        lease = self._leases.get(request)
        if lease is None:
            return False
        if lease.deadline_s is None:
            self._num_published += 1
        lease.ttl_s, lease.deadline_s, lease.tables = ttl_s, now_s + ttl_s, tables or {}
        heapq.heappush(self._deadlines, (lease.deadline_s, next(self._numbers), request, lease))
        if lease.is_complete:
            self._end(request, "reported")
        return True

    def revoke(self, request: str) -> None:
        """End a lease: of one that was never published (the request was aborted) nothing is reported; of another its readers fail."""
        lease = self._leases.get(request)
        if lease is not None and lease.deadline_s is not None:
            self._end(request, "revoked")
        elif lease is not None:
            del self._leases[request]
            self._table[lease.slot] = FREE

    def report(self, report: Report) -> None:
        """Take a report; the lease ends when all of its consumer's reporters have reported."""
        lease = self._leases.get(report.request)
        if lease is None or lease.word != report.word or report.reporter not in report.reporters:
            return
        if report.consumer not in lease.reported and len(lease.reported) >= MAX_CONSUMERS_PER_LEASE:
            return
        reported = lease.reported.setdefault(report.consumer, set())
        if len(reported) >= MAX_RANKS:
            return
        reported.add(report.reporter)
        if reported.issuperset(report.reporters):
            lease.is_complete = True
            if lease.deadline_s is not None:
                self._end(report.request, "reported")

    def renew(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Renew the leases of a heartbeat whose words are right."""
        for request, word in heartbeat.leases:
            lease = self._leases.get(request)
            if lease is not None and lease.word == word and lease.deadline_s is not None:
                lease.deadline_s = max(lease.deadline_s, now_s + lease.ttl_s)

    def expire(self, now_s: float) -> None:
        """End the leases whose time has run out."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, number, request, lease = heapq.heappop(self._deadlines)
            if self._leases.get(request) is not lease or lease.deadline_s is None:
                continue
            if lease.deadline_s > now_s:  # renewed, or published again
                heapq.heappush(self._deadlines, (lease.deadline_s, number, request, lease))
            else:
                self._end(request, "expired")

    def take_finished(self) -> Mapping[str, Cause]:
        """Requests whose pages may be freed, since the last call. Their words are cleared already."""
        finished, self._finished = self._finished, {}
        return finished

    def _end(self, request: str, cause: Cause) -> None:
        lease = self._leases.pop(request)
        self._num_published -= 1
        self._table[lease.slot] = FREE
        self._finished[request] = cause
        if len(self._deadlines) > 2 * self._num_published + MAX_ENDED:
            self._deadlines = [entry for entry in self._deadlines if self._leases.get(entry[2]) is entry[3]]
            heapq.heapify(self._deadlines)
