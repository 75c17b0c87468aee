"""The leases of this rank's own prefills: who reads them, and who renews them.

1. `hear`: notifications of readers. Reports end leases, heartbeats renew them, the rest is for whoever watches (`observer`).
2. `expire`: leases whose time has run out end. A rank that stood still (a stopped process, a suspended machine) first hears what had been sent
   meanwhile, since its readers may have renewed them.
3. `release`: a lease that this very engine was to read from ends like one that was read.

Used from the session's thread only.
"""

from __future__ import annotations

from collections.abc import Callable

from kvreshard.model.logs import get_logger
from kvreshard.session.commands import Release
from kvreshard.session.lease import LeaseBook, LeaseTable
from kvreshard.session.notes import VERSION, Heartbeat, Report, read_note
from kvreshard.session.observer import Observer
from kvreshard.transport.base import Transport, TransportError

logger = get_logger(__name__)

# Longer than any rest of the session's thread: this rank, or all of its machine, stood still.
STOOD_STILL_S = 0.6
# How long it takes until all notifications have arrived that were sent meanwhile. Another thread fetches them.
HEARING_S = 5.0


class LocalLeases:
    """Of one rank. `table`: its lease words."""

    def __init__(
        self, rank: int, transport: Transport, observer: Observer, table: LeaseTable, clock: Callable[[], float]
    ) -> None:
        self._rank, self._transport, self._observer = rank, transport, observer
        self.book = LeaseBook(table)
        self._turned_s = clock()
        self._hears_until_s: float | None = None
        self._is_deaf = False

    def hear(self, now_s: float) -> None:
        """What readers have sent."""
        try:
            messages = self._transport.notifications()
        except TransportError as error:  # closed: its transfers have failed, and their loads must end
            if not self._is_deaf:
                logger.error("rank %d hears nothing any more: %s", self._rank, error)
            self._is_deaf, messages = True, ()
        for message in messages:
            note = read_note(message.payload)
            if isinstance(note, Report):
                self.book.report(note)
            elif isinstance(note, Heartbeat):
                self.book.renew(note, now_s)
            else:
                self._observer.heard(message.payload, self.book)

    def expire(self, now_s: float) -> None:
        """End the leases whose time has run out. Short gaps between calls do not add up: where each turn comes late, leases still end."""
        gap_s, self._turned_s = now_s - self._turned_s, now_s
        if gap_s > HEARING_S or (gap_s > STOOD_STILL_S and self._hears_until_s is None):
            self._hears_until_s = now_s + HEARING_S
        if self._hears_until_s is None or now_s >= self._hears_until_s:
            self._hears_until_s = None
            self.book.expire(now_s)

    def release(self, me: tuple[str, str], release: Release) -> bool:
        """End one, if it is of this engine: every rank of an engine that was to read from itself is told so. `me`: its name and instance id."""
        lease = release.lease
        if (release.remote.engine, release.remote.instance_id) != me:
            return False
        self.book.report(Report(VERSION, "/".join(me), lease.request, lease.word, self._rank, (self._rank,)))
        return True
