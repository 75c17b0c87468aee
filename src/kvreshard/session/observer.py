"""The interface through which something may watch the loads of a rank. Here every method does nothing.

The session calls it at the points of a load's life; `kvreshard.tools` implements digests and flight records with it. All calls come on the
session's thread, but for `LoadObserver.on_event`, which may come on any. Only `on_landing` may raise.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from kvreshard.model import EngineLayout
from kvreshard.model.errors import KvReshardError
from kvreshard.session.commands import CheckResult, Failure, Load
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.lease import LeaseBook
from kvreshard.session.peer import Peer
from kvreshard.session.pull import TransferStats
from kvreshard.transport.base import MemoryRegion, Transfer


class RejectedLoad(KvReshardError):
    """What has landed must not be served: the load fails with kind `digest`."""


@dataclass(frozen=True, slots=True)
class Landing:
    """What an observer may use while a load waits for it. `load`: with all pages and the lease under which they were read.

    `posted`: to be called with every transfer that the observer posts, which then settles before the load ends. `wake`: resume soon.
    """

    peer: Peer
    dst: EngineLayout
    load: Load
    posted: Callable[[Transfer], None]
    wake: Callable[[], None]


class LoadObserver:
    """Watches one load."""

    @property
    def check(self) -> CheckResult | None:
        """How the comparison with the source ended; None if there was none."""
        return None

    def on_event(self, event: str, text: str = "") -> None:
        """Something has happened.

        Events: met, bound, zeroed, not staged, posted, transfer failed, settled, read, cancelled, failed, quarantined, refused, begun again.
        """

    def on_landing(self, landing: Landing) -> Generator[Transfer | None, None, None]:
        """All bytes have arrived and the lease held on every rank that was read. The load ends when this does.

        Yields a transfer that must settle first, or None to be resumed in the next turn. Raises RejectedLoad or TransportError to fail
        the load. Closed early if the load is stopped, once everything that was posted has settled.
        """
        yield from ()

    def on_end(self, outcome: TransferStats | Failure) -> None:
        """The load has ended, well or badly."""

    def on_failure(
        self, load: Load, failure: Failure, dst: EngineMetadata, src: EngineMetadata | None, *, is_routed: bool
    ) -> None:
        """The load has failed. `load`: with all that is known of it by now. `src` is None if the source was never met; `is_routed`: there was a
        route from it.
        """


class Observer:
    """Watches one rank. `regions`: memory of its own that the transport must register."""

    @property
    def regions(self) -> tuple[MemoryRegion, ...]:
        return ()

    def observe(self, load: Load) -> LoadObserver:
        """A load is ordered; what is returned watches it."""
        return LoadObserver()

    def on_notification(self, payload: bytes, leases: LeaseBook) -> None:
        """A notification that is not of the session's kinds. `leases`: of this rank's own prefills."""

    def work(self, leases: LeaseBook, layout: EngineLayout) -> bool:
        """Work for some milliseconds at most, once per turn; whether there is more."""
        return False

    def close(self) -> None:
        """The session ends."""
