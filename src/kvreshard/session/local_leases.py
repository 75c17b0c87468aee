"""The leases of this rank's own prefills, and the notifications of their readers. Used from the session's thread only."""

from __future__ import annotations

from collections.abc import Callable

from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import Release
from kvreshard.session.lease import LeaseBook, LeaseTable
from kvreshard.session.notes import VERSION, Heartbeat, Report, read_note
from kvreshard.session.observer import Observer
from kvreshard.transport.base import Transport, TransportError

logger = get_logger(__name__)

# Longer than any rest of the session's thread: this process, or all of its machine, was stopped.
STOPPED_S = 0.6
# How long it takes until the notifications that were sent meanwhile have arrived. Another thread fetches them.
CATCH_UP_S = 5.0


class LocalLeases:
    """`table`: the lease words of the rank."""

    def __init__(
        self, rank: int, transport: Transport, observer: Observer, table: LeaseTable, clock: Callable[[], float]
    ) -> None:
        self._rank, self._transport, self._observer = rank, transport, observer
        self.book = LeaseBook(table)
        self._turned_s = clock()
        self._expires_from_s: float | None = None
        self._is_closed = False

    def receive(self, now_s: float) -> None:
        """Apply reports and heartbeats; other notifications are the observer's."""
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
                self._observer.heard(message.payload, self.book)

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

    def release(self, me: tuple[str, str], release: Release) -> bool:
        """End a lease of this very engine, `me` (name and instance id), which was to read from itself; False if it is another's."""
        lease = release.lease
        if release.remote.name != me:
            return False
        self.book.report(Report(VERSION, "/".join(me), lease.request, lease.word, self._rank, (self._rank,)))
        return True
