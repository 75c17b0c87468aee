"""Who talks to a NIXL agent, and when?

One thread, from birth to death, because an agent is not safe to share. Everybody else hands it work through a queue.
Each turn of its loop:

1. do what was handed in (register, add a peer, send a notification, a new transfer);
2. post one slice of one transfer, the transfers in turn, as long as its peer's window is open; a post blocks for some 20 ms at most, so
   everything else waits no longer;
3. ask for the slices in flight; collect the notifications that arrived;
4. rest: not at all while there is work, briefly while slices are in flight or the transport is attentive, else long.

Step 3 serves peers too: without a progress thread, a peer's read of our memory completes only when we poll.
A slice that failed may have pieces that still move: NIXL shares them over several connections, and gives the slice up when one of them
fails. So its peer is disconnected, when the other slices with it have settled, and only then have its transfers settled: a failed transfer moves
no more bytes. Whoever wants the peer again removes it and adds it. A slice that never settles (a stopped peer) keeps its transfer and its peer's window; only `stop` gives it up.

The agent is a narrow protocol (`agent`), so that this loop runs in tests without NIXL.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from kvreshard.model.logs import get_logger
from kvreshard.transport.agent import Agent
from kvreshard.transport.base import Transfer, TransportError
from kvreshard.transport.pace import Pace
from kvreshard.transport.refusals import cancelled, closed_transport, closed_while_pending, torn_peer
from kvreshard.transport.sliced import SlicedTransfer
from kvreshard.transport.slices import SliceBudget
from kvreshard.transport.window import Windows

logger = get_logger(__name__)

T = TypeVar("T")


class Owner:
    """The thread. `make_agent` runs on it. `on_notification(agent name, payload)` is called on it.

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
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._under_way: deque[SlicedTransfer] = deque()
        self._leaving: set[str] = set()
        self._torn: set[str] = set()
        self._budget = SliceBudget(pace.post_s)
        self._windows = Windows(pace.max_in_flight, pace.max_in_flight_bytes)
        self._last_event_s = clock()
        self._stopping_s: float | None = None
        self._gate = threading.Lock()
        self._shut = False
        born: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_agent, born), name=name, daemon=True)
        self._thread.start()
        born.result()

    def call(self, function: Callable[[Agent], T]) -> T:
        """Run `function(agent)` on the owner's thread and return its result; its exceptions come back too."""
        if threading.current_thread() is self._thread:
            return function(self._agent)
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._agent))
            except BaseException as error:  # noqa: BLE001  it belongs to the caller, whatever it is
                future.set_exception(error)

        self.submit(run)
        return future.result()

    def submit(self, function: Callable[[], None]) -> None:
        """Run `function` on the owner's thread some time. Raises `TransportError` once stopped."""
        with self._gate:
            if self._shut:
                raise closed_transport(self.name)
            self._work.put(function)

    def attend(self, attentive: bool) -> None:
        """Set the pace between events. To be told that peers will come is an event: it ends a rest, and the pace stays fast for
        `linger_s`, since a peer's read of our memory settles only when this side polls.
        """
        self.attentive = attentive
        if attentive:
            with contextlib.suppress(TransportError):  # stopped: nobody will come
                self.submit(self._note_event)

    def post(self, sliced: SlicedTransfer) -> None:
        """Start a transfer; does not wait."""
        self.submit(lambda: self._accept(sliced))

    def cancel(self, transfer: Transfer) -> None:
        """Post no more of a transfer; does not wait."""

        def stop() -> None:
            for sliced in self._under_way:
                if sliced.transfer is transfer and not sliced.cursor.exhausted:
                    sliced.fail(cancelled(transfer))
            self._settle_quiet()

        self.submit(stop)

    def send(self, peer: str, payload: bytes) -> None:
        """Send a notification; does not wait. A failure is logged, since delivery is never certain."""
        self.submit(lambda: self._send(peer, payload))

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

        self.call(add)

    def remove_peer(self, peer: str, error: TransportError) -> None:
        """Fail a peer's transfers; disconnect when their slices have settled."""

        def remove(agent: Agent) -> None:
            if peer in self._torn and peer not in self._leaving:
                self._torn.discard(peer)  # disconnected already
                return
            self._torn.discard(peer)
            self._leave(peer, error)
            self._settle_quiet()

        self.call(remove)

    def stop(self) -> None:
        """Fail all transfers, give slices in flight `close_s` seconds, close the agent, end the thread."""

        def begin() -> None:
            if self._stopping_s is None:
                self._stopping_s = self._clock() + self._pace.close_s
            for sliced in self._under_way:
                sliced.fail(closed_while_pending(self.name))
            self._settle_quiet()

        with self._gate:
            if not self._shut:
                self._shut = True
                self._work.put(begin)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(2 * self._pace.close_s + 1.0)
        if self._thread.is_alive():
            logger.warning("%s: the agent did not close; its thread is left behind", self.name)

    # Below: on the owner's thread only.

    def _run(self, make_agent: Callable[[], Agent], born: Future[None]) -> None:
        try:
            self._agent = make_agent()
        except BaseException as error:  # noqa: BLE001  it belongs to the caller, whatever it is
            self._shut = True
            born.set_exception(error)
            return
        born.set_result(None)
        del born, make_agent
        try:
            while self._stopping_s is None or (self._under_way and self._clock() < self._stopping_s):
                self._do_work(0.0 if self._look() else self._rest_s())
        finally:
            # Also after a fault of this loop itself: whoever waits must hear of it.
            with self._gate:
                self._shut = True
            for sliced in self._under_way:
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

    def _do_work(self, rest_s: float) -> None:
        """Run what was handed in, waiting for the first piece of it for up to `rest_s`."""
        try:
            work = self._work.get(timeout=rest_s) if rest_s > 0.0 else self._work.get_nowait()
            while True:
                work()
                work = self._work.get_nowait()
        except queue.Empty:
            return

    def _accept(self, sliced: SlicedTransfer) -> None:
        self._note_event()
        if self._stopping_s is not None:
            sliced.fail(closed_while_pending(self.name))
        if sliced.peer in self._torn:
            sliced.fail(torn_peer(sliced.peer))
        self._under_way.append(sliced)
        self._settle_quiet()

    def _post_slice(self) -> bool:
        """Post the next slice of the transfer whose turn it is; whether there was one."""
        windows = self._windows
        sliced = next((one for one in self._under_way if not one.cursor.exhausted and windows.is_open(one.peer)), None)
        if sliced is None:
            return False
        self._under_way.remove(sliced)
        self._under_way.append(sliced)
        try:
            piece = sliced.cursor.take(min(self._budget.budget_bytes, windows.share_bytes))
            started_s = self._clock()
            handle = self._agent.start(sliced.peer, sliced.transfer.direction, piece)
        except Exception as error:  # noqa: BLE001  whatever it is, the others go on
            self._tear(sliced, error)
        else:
            self._budget.learn(piece.cost_bytes, self._clock() - started_s)
            if handle is not None:
                sliced.handles.append((handle, piece.cost_bytes))
                windows.enter(sliced.peer, piece.cost_bytes)
        self._settle_quiet()
        return True

    def _check_slices(self) -> bool:
        """Release the slices that settled; whether any did."""
        before = self._windows.num_in_flight
        if not before:
            return False
        for sliced in self._under_way:
            sliced.handles = [
                (handle, cost) for handle, cost in sliced.handles if not self._settled(sliced, handle, cost)
            ]
        if self._windows.num_in_flight == before:
            return False
        self._settle_quiet()
        return True

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
            logger.warning("%s: a transfer handle could not be released: %s", self.name, error)

    def _tear(self, sliced: SlicedTransfer, error: Exception) -> None:
        """A slice has failed: nothing more is posted to its peer, which will be disconnected."""
        sliced.is_torn = True
        sliced.fail(self._transfer_error(sliced, error))
        self._torn.add(sliced.peer)
        self._leave(sliced.peer, torn_peer(sliced.peer))

    def _leave(self, peer: str, error: TransportError) -> None:
        self._leaving.add(peer)
        for sliced in self._under_way:
            if sliced.peer == peer:
                sliced.fail(error)

    def _settle_quiet(self) -> None:
        """Settle the transfers that have nothing left, and let leaving peers go; torn ones after their peers."""
        quiet = [sliced for sliced in self._under_way if sliced.cursor.exhausted and not sliced.handles]
        for peer in self._leaving - {sliced.peer for sliced in self._under_way if sliced not in quiet}:
            self._leaving.discard(peer)
            self._forget(peer)
        finished = [sliced for sliced in quiet if not (sliced.is_torn and sliced.peer in self._leaving)]
        for sliced in finished:
            self._under_way.remove(sliced)
            if sliced.error is None and sliced.notify is not None:
                try:
                    self._agent.send(sliced.peer, sliced.notify)
                except Exception as error:  # noqa: BLE001  a transfer that is not settled keeps its memory for ever
                    sliced.error = self._transfer_error(sliced, error)
        for sliced in finished:
            _guarded(sliced.transfer.settle, sliced.error)

    def _transfer_error(self, sliced: SlicedTransfer, error: Exception) -> TransportError:
        transfer, reason = sliced.transfer, str(error)
        if not isinstance(error, TransportError):
            reason = f"{type(error).__name__} {reason}".strip()
        return TransportError(
            f"{transfer.direction.value} of {transfer.num_bytes} bytes with peer {transfer.peer!r} ({sliced.peer}) "
            f"failed: {reason}; if the peer is gone, remove it and add its successor"
        )

    def _receive(self) -> bool:
        try:
            messages = self._agent.receive()
        except Exception as error:  # noqa: BLE001  they may be read next time
            logger.warning("%s: notifications could not be read: %s", self.name, error)
            return False
        for peer, payload in messages:
            self._on_notification(peer, payload)
        return bool(messages)

    def _send(self, peer: str, payload: bytes) -> None:
        self._note_event()
        try:
            self._agent.send(peer, payload)
        except Exception as error:  # noqa: BLE001  delivery is never certain
            logger.warning("%s: notification to %s was not sent: %s", self.name, peer, error)

    def _forget(self, peer: str) -> None:
        try:
            self._agent.remove_peer(peer)
        except Exception as error:  # noqa: BLE001  its transfers must settle
            logger.warning("%s: peer %s was not disconnected: %s", self.name, peer, error)

    def _tear_down(self) -> None:
        """Close the agent first: only then is it sure that slices given up move no more bytes."""
        while True:
            try:
                self._work.get_nowait()()
            except queue.Empty:
                break
        given_up = list(self._under_way)
        for sliced in given_up:
            for handle, _ in sliced.handles:
                self._release(handle)
        try:
            self._agent.close()
        except TransportError as error:
            logger.warning("%s: the agent did not close cleanly: %s", self.name, error)
        del self._agent
        self._under_way.clear()
        for sliced in given_up:
            _guarded(sliced.transfer.settle, sliced.error)


def _guarded(settle: Callable[[TransportError | None], None], error: TransportError | None) -> None:
    """A caller's callback that raises must not end the owner."""
    try:
        settle(error)
    except Exception:
        logger.exception("a transfer's callback raised")
