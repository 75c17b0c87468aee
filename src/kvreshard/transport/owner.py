"""The one thread that talks to a NIXL agent.

An agent is not safe to share, so one thread makes it, uses it and ends it. Other threads hand it work through a queue.
Each turn of its loop:

1. do what was handed in (register, add a peer, send a notification, a new transfer);
2. post one slice of one transfer, the peers in turn and the transfers with each, as long as the peer's window is open; a post blocks for
   some 20 ms at most, so everything else waits no longer;
3. ask for the slices in flight; collect the notifications that arrived;
4. rest: not at all while there is work, briefly while slices are in flight or the transport is attentive, else long.

Step 3 serves peers too: without a progress thread, a peer's read of our memory completes only when we poll.
A slice that failed may have copies that still move: NIXL shares them over several connections, and gives the slice up when one of them
fails. So its peer is disconnected, when the other slices with it have settled, and only then have its transfers settled: a failed transfer moves
no more bytes. Whoever wants the peer again removes it and adds it. A slice that never settles (a stopped peer) keeps its transfer
and its peer's window; only `stop` gives it up.

What is handed in, posted or settled costs no more where more transfers wait (`posting`). A call into the library that does not come back is
noticed by those who look (`watchdog`), since this thread cannot.

The agent is a narrow protocol (`watchdog.Agent`), so that this loop runs in tests without NIXL.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import TypeVar

from kvreshard.model.logs import Repeats, fields, get_logger
from kvreshard.transport.base import Transfer, TransportError, cancelled, closed_while_pending, failed, torn_peer
from kvreshard.transport.posting import Pace, Posting, SlicedTransfer, Windows
from kvreshard.transport.slices import SliceBudget
from kvreshard.transport.watchdog import SLOW_FACTOR, Agent, Watchdog, watched
from kvreshard.transport.work_queue import WorkQueue

logger = get_logger(__name__)

T = TypeVar("T")

# How long an agent may take to close while somebody waits.
TEAR_DOWN_S = 0.2


class Owner:
    """The thread. `make_agent` runs on it. `on_notification(agent name, payload)` is called on it. `watchdog`: of its calls into the library.

    Raises:
        TransportError: the agent could not be made.
    """

    def __init__(
        self,
        name: str,
        make_agent: Callable[[], Agent],
        on_notification: Callable[[str, bytes], None],
        pace: Pace,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.attentive = False
        self._on_notification = on_notification
        self._pace = pace
        self._clock = clock
        self._of_transfer: dict[Transfer, SlicedTransfer] = {}
        # Of each peer its transfers: those of which something is left or in flight, and failed ones that settle when it is disconnected.
        self._busy: dict[str, dict[SlicedTransfer, None]] = {}
        self._held: dict[str, list[SlicedTransfer]] = {}
        self._in_flight: dict[SlicedTransfer, None] = {}
        self._leaving: set[str] = set()
        self._torn: set[str] = set()
        self._budget = SliceBudget(pace.post_s)
        self._windows = Windows(pace.max_in_flight, pace.max_in_flight_bytes)
        self._posting = Posting(self._windows)
        self.watchdog = Watchdog(name, pace.call_s, clock)
        self._work = WorkQueue(name, self.watchdog)
        self._last_event_s = clock()
        self._repeats = Repeats(logger, clock)
        self._stopping_s: float | None = None
        born: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_agent, born), name=name, daemon=True)
        self._thread.start()
        if not wait([born], pace.call_s * SLOW_FACTOR).done:
            raise TransportError(
                f"{name}: no agent was made within {pace.call_s * SLOW_FACTOR:g} s; look for a hung device or driver"
            )
        born.result()

    def call(self, function: Callable[[Agent], T], undo: Callable[[], None] = lambda: None) -> T:
        """Run `function(agent)` on the owner's thread and return its result; its exceptions come back too.

        `undo`: for what succeeds when nobody waits for it any more. Raises TransportError where a call into the library does not come back.
        """
        if threading.current_thread() is self._thread:
            return function(self._agent)
        return self._work.call(lambda: function(self._agent), undo)

    def attend(self, attentive: bool) -> None:
        """Set the pace between events. To be told that peers will come is an event: it ends a rest, and the pace stays fast for
        `linger_s`, since a peer's read of our memory settles only when this side polls.
        """
        self.attentive = attentive
        if attentive:
            with contextlib.suppress(TransportError):  # stopped: nobody will come
                self._work.submit(self._note_event)

    def post(self, sliced: SlicedTransfer) -> None:
        """Start a transfer; does not wait."""
        self._work.submit(lambda: self._accept(sliced))

    def cancel(self, transfer: Transfer) -> None:
        """Post no more of a transfer; does not wait."""

        def stop() -> None:
            sliced = self._of_transfer.get(transfer)
            if sliced is not None and not sliced.cursor.exhausted:
                sliced.fail(cancelled(transfer))
                self._settle_quiet(sliced)

        self._work.submit(stop)

    def send(self, peer: str, payload: bytes) -> None:
        """Send a notification; does not wait. A failure is logged, since delivery is never certain."""
        self._work.submit(lambda: self._send(peer, payload))

    def add_peers(self, natives: Mapping[str, bytes]) -> None:
        """Load the metadata of some peers, all or none. Refused while slices of a former time of theirs are in flight."""

        def add(agent: Agent) -> None:
            for peer in self._leaving.intersection(natives):
                raise TransportError(f"peer {peer} was removed with transfers in flight; wait until they have settled")
            added: list[str] = []
            looked_s = self._clock()
            try:
                for peer, native in natives.items():
                    # Each takes about a millisecond, and others wait.
                    if self._clock() - looked_s > self._pace.post_s:
                        self._look()
                        looked_s = self._clock()
                    agent.add_peer(peer, native)
                    added.append(peer)
            except BaseException:
                for peer in added:
                    self._forget(peer)
                raise
            # Slices of their former time, which failed after they had been removed, say nothing of these.
            self._torn.difference_update(natives)

        def forget() -> None:
            for peer in natives:
                self._forget(peer)

        self.call(add, forget)

    def remove_peer(self, peer: str, error: TransportError) -> None:
        """Fail a peer's transfers; disconnect when their slices have settled. Does not wait."""

        def remove() -> None:
            if peer in self._torn and peer not in self._leaving:
                self._torn.discard(peer)  # disconnected already
                return
            self._torn.discard(peer)
            self._leave(peer, error)

        with contextlib.suppress(TransportError):  # stopped: the agent forgets its peers
            self._work.submit(remove)

    def stop(self) -> None:
        """Fail all transfers, give slices in flight `close_s` seconds, close the agent, end the thread."""

        def begin() -> None:
            if self._stopping_s is None:
                self._stopping_s = self._clock() + self._pace.close_s
            for sliced in list(self._of_transfer.values()):
                sliced.fail(closed_while_pending(self.name))
                self._settle_quiet(sliced)

        self._work.shut(begin)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(self._pace.close_s + TEAR_DOWN_S)
        if self.is_running:
            logger.warning(
                "%s: the agent did not close; its thread is left behind", self.name, extra=fields("agent_not_closed")
            )

    @property
    def is_running(self) -> bool:
        """Whether the thread, and with it the agent, is still there."""
        return self._thread.is_alive()

    # Below: on the owner's thread only.

    def _run(self, make_agent: Callable[[], Agent], born: Future[None]) -> None:
        try:
            self._agent = watched(make_agent(), self.watchdog)
        except BaseException as error:  # noqa: BLE001  it belongs to the caller, whatever it is
            self._work.shut()
            born.set_exception(error)
            return
        born.set_result(None)
        del born, make_agent
        try:
            while self._stopping_s is None or (self._of_transfer and self._clock() < self._stopping_s):
                self._repeats.flush()
                self._work.run(0.0 if self._look() else self._rest_s())
        finally:
            # Also after a fault of this loop itself: whoever waits must hear of it.
            self._work.shut()
            for sliced in self._of_transfer.values():
                sliced.fail(closed_while_pending(self.name))
            self._tear_down()

    def _look(self) -> bool:
        """Steps 2 and 3; whether anything happened."""
        happened = self._post_slice()
        happened |= self._check_slices()
        happened |= self._receive()
        if happened:
            self._note_event()
        return happened

    def _note_event(self) -> None:
        """Something happened after which more may: keep the pace fast. Not so regions and peers that come or go."""
        self._last_event_s = self._clock()

    def _rest_s(self) -> float:
        quiet_s = self._clock() - self._last_event_s
        pace = self._pace
        if self._windows.num_in_flight and quiet_s < pace.spin_s:
            return 0.0
        if self._windows.num_in_flight or quiet_s < pace.linger_s:
            return pace.fast_s
        return pace.attentive_s if self.attentive else pace.slow_s

    def _accept(self, sliced: SlicedTransfer) -> None:
        self._note_event()
        if self._stopping_s is not None:
            sliced.fail(closed_while_pending(self.name))
        if sliced.peer in self._torn:
            sliced.fail(torn_peer(sliced.peer))
        self._of_transfer[sliced.transfer] = sliced
        self._busy.setdefault(sliced.peer, {})[sliced] = None
        self._posting.add(sliced)
        self._settle_quiet(sliced)

    def _post_slice(self) -> bool:
        """Post the next slice of the transfer whose turn it is; whether there was one."""
        sliced = self._posting.next()
        if sliced is None:
            return False
        windows = self._windows
        try:
            slice_ = sliced.cursor.take(min(self._budget.budget_bytes, windows.share_bytes))
            started_s = self._clock()
            handle = self._agent.start(sliced.peer, sliced.transfer.direction, slice_)
        except Exception as error:  # noqa: BLE001  whatever it is, the others go on
            self._tear(sliced, error)
        else:
            self._budget.learn(slice_.cost_bytes, self._clock() - started_s)
            if handle is not None:
                sliced.handles.append((handle, slice_.cost_bytes))
                self._in_flight[sliced] = None
                windows.enter(sliced.peer, slice_.cost_bytes)
        self._settle_quiet(sliced)
        return True

    def _check_slices(self) -> bool:
        """Release the slices that settled; whether any did."""
        before = self._windows.num_in_flight
        for sliced in list(self._in_flight):
            left = [(handle, cost) for handle, cost in sliced.handles if not self._settled(sliced, handle, cost)]
            if len(left) == len(sliced.handles):
                continue
            sliced.handles = left
            if not left:
                del self._in_flight[sliced]
            self._posting.reopen(sliced.peer)
            self._settle_quiet(sliced)
        return self._windows.num_in_flight != before

    def _settled(self, sliced: SlicedTransfer, handle: object, cost_bytes: int) -> bool:
        try:
            if not self._agent.is_done(handle):
                return False
        except Exception as error:  # noqa: BLE001  nothing is known of the slice: it counts as failed
            self._tear(sliced, error)
        self._windows.leave(sliced.peer, cost_bytes)
        self._release(handle)
        return True

    def _release(self, handle: object) -> None:
        try:
            self._agent.release(handle)
        except Exception as error:  # noqa: BLE001  the agent's end frees what is left
            self._warn("a transfer handle could not be released", error)

    def _tear(self, sliced: SlicedTransfer, error: Exception) -> None:
        """A slice has failed: nothing more is posted to its peer, which will be disconnected."""
        sliced.is_torn = True
        sliced.fail(failed(sliced.transfer, sliced.peer, error))
        self._torn.add(sliced.peer)
        self._leave(sliced.peer, torn_peer(sliced.peer))

    def _leave(self, peer: str, error: TransportError) -> None:
        self._leaving.add(peer)
        for sliced in list(self._busy.get(peer, ())):
            sliced.fail(error)
            self._settle_quiet(sliced)
        self._let_go(peer)

    def _settle_quiet(self, sliced: SlicedTransfer) -> None:
        """Settle a transfer that has nothing left. One of which a slice failed waits until its peer is disconnected."""
        busy = self._busy.get(sliced.peer, {})
        if sliced not in busy or not sliced.is_quiet:
            return
        del busy[sliced]
        if not busy:
            del self._busy[sliced.peer]
        if sliced.is_torn and sliced.peer in self._leaving:
            self._held.setdefault(sliced.peer, []).append(sliced)
            self._let_go(sliced.peer)
            return
        self._let_go(sliced.peer)
        self._finish(sliced)

    def _let_go(self, peer: str) -> None:
        """Disconnect a leaving peer with which nothing is under way, and settle the transfers that waited for that."""
        if peer in self._leaving and peer not in self._busy:
            self._leaving.discard(peer)
            held, is_forgotten = self._held.pop(peer, ()), self._forget(peer)
            for sliced in held if is_forgotten else ():  # else bytes may still come: they wait for the agent's end
                self._finish(sliced)

    def _finish(self, sliced: SlicedTransfer) -> None:
        del self._of_transfer[sliced.transfer]
        if sliced.error is None and sliced.notify is not None:
            try:
                self._agent.send(sliced.peer, sliced.notify)
            except Exception as error:  # noqa: BLE001  a transfer that is not settled keeps its memory for ever
                sliced.error = failed(sliced.transfer, sliced.peer, error)
        sliced.settle()

    def _receive(self) -> bool:
        try:
            messages = self._agent.receive()
        except Exception as error:  # noqa: BLE001  they may be read next time
            self._warn("notifications could not be read", error)
            return False
        for peer, payload in messages:
            self._on_notification(peer, payload)
        return bool(messages)

    def _send(self, peer: str, payload: bytes) -> None:
        self._note_event()
        try:
            self._agent.send(peer, payload)
        except Exception as error:  # noqa: BLE001  delivery is never certain
            what, text = (self.name, peer, error), "%s: notification to %s was not sent: %s"
            self._repeats.log(logging.WARNING, peer, text, *what, extra=fields("notification_failed", peer=peer))

    def _forget(self, peer: str) -> bool:
        """Disconnect a peer; whether that worked."""
        try:
            self._agent.remove_peer(peer)
        except Exception as error:  # noqa: BLE001  the thread goes on
            self._warn(f"peer {peer} was not disconnected", error)
            return False
        return True

    def _warn(self, what: str, error: Exception) -> None:
        parts = self.name, what, error
        self._repeats.log(logging.WARNING, what, "%s: %s: %s", *parts, extra=fields("nixl_call_failed"))

    def _tear_down(self) -> None:
        """Close the agent first: only then is it sure that slices given up move no more bytes."""
        self._work.run(0.0)
        given_up = list(self._of_transfer.values())
        for sliced in given_up:
            for handle, _ in sliced.handles:
                self._release(handle)
        try:
            self._agent.close()
        except TransportError as error:
            logger.warning(
                "%s: the agent did not close cleanly: %s", self.name, error, extra=fields("agent_not_closed")
            )
        del self._agent
        self._of_transfer.clear()
        for sliced in given_up:
            sliced.settle()
