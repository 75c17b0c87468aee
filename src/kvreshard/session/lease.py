"""The leases of one source rank: when a request's pages may be freed, and the lease word by which a reader knows that they were not.

A one-sided read cannot be revoked, so the generation of a page belongs to the lease:

1. `write`, `acquire`: while the request computes, its word stands in a slot of the rank's registered `LeaseTable`.
2. `publish`: the request has finished. Its pages are kept until every reporter has reported, or the lease expires. Heartbeats renew it.
3. The word is cleared before the pages are freed. A reader reads the word after its last data read; if it differs, the pages may have been
   reused.

Reports are sets: a report names its consumer, its reporter and all reporters of this source rank. Duplicates, late reports and reports with
another word change nothing. Each consumer engine (a router's retry) has a set of its own. A report may arrive before `publish`: a reader can
be faster than this rank's next step.

`LeaseTable` has the words, `LeaseBook` the bookkeeping, and `LocalLeases` gives that what readers send over the transport.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from kvreshard.model.errors import KvReshardError
from kvreshard.model.logs import fields, get_logger
from kvreshard.model.tables import PageTable
from kvreshard.model.wire import MAX_RANKS
from kvreshard.session.notes import VERSION, Heartbeat, Report, read_note
from kvreshard.transport.base import MemoryRegion, Transport, TransportError

logger = get_logger(__name__)

WORD_BYTES = 8
FREE = 0
Cause = Literal["reported", "expired", "revoked"]
# A consumer that never reports must not fill memory with sets of its own.
MAX_CONSUMERS_PER_LEASE = 64
# Readers renew a lease this often in its lifetime: five renewals may be late or lost.
RENEWALS_PER_LEASE = 6
# Longer than any rest of the session's thread: this process, or all of its machine, was stopped.
STOPPED_S = 0.6
# How long it takes until the notifications that were sent meanwhile have arrived. Another thread fetches them.
CATCH_UP_S = 5.0


class Lease(NamedTuple):
    """The lease of one request at its source: the source's own request id, and the slot and value of its word."""

    request: str
    slot: int
    word: int


class LeaseTable:
    """`num_slots` lease words, and behind them as many progress words (`progress`), in page-aligned memory that peers may read.

    64 bits each. Slot numbers are given by the engine.
    """

    def __init__(self, num_slots: int) -> None:
        self._memory = mmap.mmap(-1, 2 * num_slots * WORD_BYTES)
        words = np.frombuffer(self._memory, dtype=np.uint64)
        self.leases, self.progress = words[:num_slots], words[num_slots:]

    @property
    def region(self) -> MemoryRegion:
        """Of both."""
        return MemoryRegion(int(self.leases.ctypes.data), self.leases.nbytes + self.progress.nbytes)

    @property
    def progress_address(self) -> int:
        """Of the first progress word."""
        return int(self.progress.ctypes.data)

    def __len__(self) -> int:
        return len(self.leases)

    def __setitem__(self, slot: int, word: int) -> None:
        """Set a lease word. Another one than before has no progress."""
        if self.leases[slot] != word:
            self.progress[slot] = FREE
            self.leases[slot] = word

    def __getitem__(self, slot: int) -> int:
        return int(self.leases[slot])


@dataclass(slots=True)
class _Held:
    slot: int
    word: int
    ttl_s: float = 0.0
    reported: dict[str, set[int]] = field(default_factory=dict)
    is_complete: bool = False
    tables: Mapping[str, PageTable] = field(default_factory=dict)


class LeaseBook:
    """The leases of one source rank. Not thread-safe; times are seconds of the caller's clock."""

    def __init__(self, table: LeaseTable) -> None:
        self._table = table
        self._leases: dict[str, _Held] = {}
        # When each published lease expires; none does before `_earliest_s`.
        self._deadlines_s: dict[str, float] = {}
        self._earliest_s = math.inf
        self._finished: dict[str, Cause] = {}

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def num_published(self) -> int:
        """Leases whose pages are kept for readers."""
        return len(self._deadlines_s)

    def acquire(self, lease: Lease) -> None:
        """Note the lease of a request, whose word is written already (`write`), and clear the word of its former lease.

        The word is not written here: by now it may have been taken back, and its slot may have another. Raises KvReshardError for a slot or
        word out of range.
        """
        request, slot, word = lease
        if not 0 <= slot < len(self._table) or not FREE < word < 2**64:
            raise KvReshardError(
                f"request '{request}': lease slot {slot} of {len(self._table)} with word {word:#x}; a slot must be in the "
                "table and a word positive"
            )
        self._deadlines_s.pop(request, None)
        former = self._leases.get(request)
        is_other = former is not None and (former.slot, former.word) != (slot, word)
        if former is not None and is_other and self._table[former.slot] == former.word:
            self._table[former.slot] = FREE
        self._leases[request] = _Held(slot, word)

    def write(self, slot: int, word: int) -> None:
        """Write a word before its lease is acquired, on any thread: a reader may be faster than the owner of this book."""
        if 0 <= slot < len(self._table) and FREE < word < 2**64:
            self._table[slot] = word

    def holds(self, request: str, word: int) -> bool:
        """Whether the request has a lease with this word, so that its pages are still its own."""
        lease = self._leases.get(request)
        return lease is not None and lease.word == word

    def tables(self, request: str) -> Mapping[str, PageTable] | None:
        """The block tables that were published under the request's lease, by group; None before `publish`."""
        lease = self._leases.get(request)
        return None if lease is None or request not in self._deadlines_s else lease.tables

    def publish(self, request: str, ttl_s: float, now_s: float, tables: Mapping[str, PageTable] | None = None) -> None:
        """Keep the pages in `tables` for `ttl_s` seconds after now or the last heartbeat. Those of a request without a lease may be freed."""
        lease = self._leases.get(request)
        if lease is None:
            self._finished[request] = "revoked"
            return
        lease.ttl_s, lease.tables = ttl_s, tables or {}
        self._deadlines_s[request] = now_s + ttl_s
        self._earliest_s = min(self._earliest_s, now_s + ttl_s)
        if lease.is_complete:
            self._end(request, "reported")

    def revoke(self, request: str) -> None:
        """End a lease. Its readers fail. One that was never published (the request was aborted) is not reported as finished."""
        if request in self._leases:
            self._end(request, "revoked")

    def revoke_all(self) -> None:
        """End all leases."""
        for request in list(self._leases):
            self._end(request, "revoked")

    def report(self, report: Report) -> None:
        """Apply a report. The lease ends when all reporters of one consumer have reported."""
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
            if report.request in self._deadlines_s:
                self._end(report.request, "reported")

    def renew(self, heartbeat: Heartbeat, now_s: float) -> None:
        """Renew the leases of a heartbeat whose words are right."""
        for request, word in heartbeat.leases:
            lease = self._leases.get(request)
            if lease is not None and lease.word == word and request in self._deadlines_s:
                self._deadlines_s[request] = max(self._deadlines_s[request], now_s + lease.ttl_s)

    def expire(self, now_s: float) -> None:
        """End the published leases whose time is over."""
        if now_s < self._earliest_s:
            return
        for request in [name for name, deadline_s in self._deadlines_s.items() if deadline_s <= now_s]:
            self._end(request, "expired")
        self._earliest_s = min(self._deadlines_s.values(), default=math.inf)

    def take_finished(self) -> Mapping[str, Cause]:
        """Requests whose pages may be freed, since the last call. Their words are cleared."""
        finished, self._finished = self._finished, {}
        return finished

    def _end(self, request: str, cause: Cause) -> None:
        lease = self._leases.pop(request)
        if self._table[lease.slot] == lease.word:
            self._table[lease.slot] = FREE
        if self._deadlines_s.pop(request, None) is not None:
            self._finished[request] = cause


class LocalLeases:
    """The leases of this rank's own prefills, and the notifications of their readers. Used from the session's thread only.

    `table`: the lease words of the rank. `on_other`: called with each notification that is neither a report nor a heartbeat.
    """

    def __init__(
        self,
        rank: int,
        transport: Transport,
        on_other: Callable[[bytes, LeaseBook], None],
        table: LeaseTable,
        clock: Callable[[], float],
    ) -> None:
        self._rank, self._transport, self._on_other = rank, transport, on_other
        self.book = LeaseBook(table)
        self._turned_s = clock()
        self._expires_from_s: float | None = None
        self._is_closed = False

    def receive(self, now_s: float) -> None:
        """Apply reports and heartbeats."""
        try:
            messages = self._transport.notifications()
        except TransportError as error:  # closed: its transfers have failed, and their loads must end
            if not self._is_closed:
                logger.error(
                    "rank %d receives no notifications any more: %s",
                    *(self._rank, error),
                    extra=fields("notifications_ended", rank=self._rank),
                )
            self._is_closed, messages = True, ()
        for message in messages:
            note = read_note(message.payload)
            if isinstance(note, Report):
                self.book.report(note)
            elif isinstance(note, Heartbeat):
                self.book.renew(note, now_s)
            else:
                self._on_other(message.payload, self.book)

    def expire(self, now_s: float) -> None:
        """End the leases whose time is over. After a stop of the process, only once the renewals that were sent meanwhile have arrived.

        Gaps of less than `CATCH_UP_S` between calls do not add up: where each turn comes late, leases still end.
        """
        gap_s, self._turned_s = now_s - self._turned_s, now_s
        if gap_s > CATCH_UP_S or (gap_s > STOPPED_S and self._expires_from_s is None):
            self._expires_from_s = now_s + CATCH_UP_S
        if self._expires_from_s is None or now_s >= self._expires_from_s:
            self._expires_from_s = None
            self.book.expire(now_s)

    def release(self, consumer: str, lease: Lease) -> None:
        """End a lease of this very engine, `consumer` (name and instance id), which was to read from itself."""
        self.book.report(Report(VERSION, consumer, lease.request, lease.word, self._rank, (self._rank,)))
