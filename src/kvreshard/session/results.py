"""The queue of results from the session's thread to the engine's.

An engine that has nothing to compute may wait a little while loads are under way: asking again costs it a whole step, and the threads that carry
out the loads need the processor that the step takes.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from kvreshard.model.errors import KvReshardError
from kvreshard.session.commands import CheckResult, Failure, Results
from kvreshard.session.lease import Cause
from kvreshard.session.pull import TransferStats
from kvreshard.transport.base import StuckCall


class ResultQueue:
    """Results that the engine has not taken yet. Safe for use from any thread."""

    def __init__(self) -> None:
        self._results = Results()
        self._loading: set[str] = set()
        # Loads that were given up by the engine's thread, and have not ended.
        self._lost: Counter[str] = Counter()
        self._ended = threading.Condition()
        self._num_peers = 0
        self._stuck: set[str] = set()

    def expect(self, request: str) -> None:
        """A load has been submitted. Raises KvReshardError while another of the same request is under way: results are told apart by request."""
        with self._ended:
            if request in self._loading:
                raise KvReshardError(
                    f"request {request} is being loaded already; wait for its result before it is loaded again"
                )
            self._loading.add(request)

    def end(self, request: str, outcome: TransferStats | Failure, check: CheckResult | None = None) -> None:
        """A load has ended; `check`: how its comparison ended, if there was one."""
        with self._ended:
            if self._lost[request]:
                self._lost -= Counter([request])
                if not (isinstance(outcome, Failure) and outcome.is_quarantined):
                    self._results.settled.add(request)
                return
            if isinstance(outcome, Failure):
                self._results.failed[request] = outcome
            else:
                self._results.received[request] = outcome
            if check is not None:
                self._results.checks[request] = check
            self._loading.discard(request)
            self._ended.notify_all()

    def give_up(self, failure: Failure) -> None:
        """Fail every load under way, whatever becomes of it: the session's thread does not return from its turn."""
        with self._ended:
            for request in self._loading:
                self._results.failed[request] = failure
            self._lost.update(self._loading)
            self._loading.clear()
            self._ended.notify_all()

    def settle(self, request: str) -> None:
        """The reads of a load whose pages were quarantined have settled."""
        with self._ended:
            self._results.settled.add(request)

    def note_stuck(self, thread: str, stuck: StuckCall | None) -> None:
        """What the watchdog of a thread sees: a call that does not return, or none."""
        with self._ended:
            if stuck is not None and thread not in self._stuck:
                self._stuck.add(thread)
                self._results.stuck.append(stuck.call)
                self._results.stuck_change += 1
            elif stuck is None and thread in self._stuck:
                self._stuck.remove(thread)
                self._results.stuck_change -= 1

    def note_peers(self, num_peers: int) -> None:
        """So many engines are met now."""
        with self._ended:
            self._results.peers_change += num_peers - self._num_peers
            self._num_peers = num_peers

    def note_advance(self) -> None:
        """A prefill that is followed has gone on."""
        with self._ended:
            self._results.has_advanced = True

    def free(self, ended: Mapping[str, Cause]) -> None:
        """Leases have ended here."""
        with self._ended:
            self._results.freed.update(ended)

    def meet(self, keys: Mapping[str, bytes], unmet: Mapping[str, Failure]) -> None:
        """Sources have been met, or could not be."""
        with self._ended:
            self._results.keys.update(keys)
            self._results.unmet.update(unmet)

    def note_handshake(self, seconds: float, is_met: bool) -> None:
        """A handshake has ended, after so many seconds; whether the engine was met."""
        with self._ended:
            self._results.handshakes.append((seconds, is_met))

    def take(self, patience_s: float) -> Results:
        """Everything since the last call. Waits for up to `patience_s` if no load has ended and one is under way."""
        with self._ended:
            if self._loading and not (self._results.received or self._results.failed):
                self._ended.wait_for(lambda: bool(self._results.received or self._results.failed), patience_s)
            results, self._results = self._results, Results()
        return results
