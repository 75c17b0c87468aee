"""One thread that puts questions to listeners, many at once, and is held up by none of them.

1. `ask` hands a question in and returns a future. Cancelling the future ends the question.
2. At most `MAX_AT_ONCE` questions are being asked, one per address: a further one for the same address waits for its turn.
3. Where more wait, the newest is asked next, and the one that has been asked longest gives way to it after `TURN_S`. It is asked anew, in turns of
   `AGAIN_S`, and fails if its time is over by then. So hosts that never answer cost a newcomer one turn, however many they are.
4. `close` ends every question that is under way and waits for none.

A question fails with HandshakeError (`ask_and_wait`). Each that is being asked holds some four file descriptors.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import zmq

from kvreshard.model.logs import get_logger
from kvreshard.session.exchange import ask
from kvreshard.session.handshake_messages import Address
from kvreshard.session.keys import Keys
from kvreshard.session.poll import Exchange, Ready, Wait, poll_ms

logger = get_logger(__name__)

MAX_AT_ONCE = 128
TURN_S, AGAIN_S = 0.25, 2.0
CLOSE_S = 0.1
NOTHING = Wait((), 0.0)

MakeExchange = Callable[[zmq.Context[Any]], Exchange[bytes]]


@dataclass(slots=True, eq=False)
class _Question:
    """`make`: a fresh exchange. `began_s`: when the present one began."""

    address: Address
    make: MakeExchange
    answer: Future[bytes] = field(default_factory=Future)
    exchange: Exchange[bytes] | None = None
    wait: Wait = NOTHING
    began_s: float = 0.0


class HandshakeClient:
    """Questions of one rank. `ask` and `close` may be called from any thread; the rest is the client's own thread."""

    def __init__(self, max_at_once: int = MAX_AT_ONCE) -> None:
        self._max_at_once = max_at_once
        self._handed_in: queue.SimpleQueue[_Question] = queue.SimpleQueue()
        # Of each address the questions that wait, oldest first.
        self._waiting: dict[Address, deque[_Question]] = {}
        # Addresses of those that are not being asked. The last is the next.
        self._next: OrderedDict[Address, None] = OrderedDict()
        # In the order in which they were begun.
        self._asking: dict[Address, _Question] = {}
        self._lock = threading.Lock()
        # What wakes the thread: it reads from the first, and closes both when it ends.
        self._wakers: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def num_asking(self) -> int:
        """Questions that are being asked now."""
        return len(self._asking)

    def ask(
        self, address: Address, handshake_message: bytes, timeout_s: float, max_bytes: int, keys: Keys | None = None
    ) -> Future[bytes]:
        """The listener's answer to `handshake_message`, of at most `max_bytes` bytes. The future raises HandshakeError, after `timeout_s` at latest."""
        deadline_s = time.monotonic() + timeout_s
        question = _Question(
            address, lambda context: ask(context, address, handshake_message, timeout_s, max_bytes, keys, deadline_s)
        )
        with self._lock:
            if self._is_closed:
                question.answer.cancel()
                return question.answer
            self._handed_in.put(question)
            if self._thread is None:
                self._start()
        question.answer.add_done_callback(lambda _: self._wake())
        self._wake()
        return question.answer

    def close(self) -> None:
        """Cancel all questions. Waits for none of them. A second call does nothing."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if self._thread is not None and not was_closed:
            self._wake()
            self._thread.join(CLOSE_S)

    def _start(self) -> None:
        self._wakers = mine, theirs = socket.socketpair()
        mine.setblocking(False)
        theirs.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(mine,), name="kvreshard-handshake", daemon=True)
        self._thread.start()

    def _wake(self) -> None:
        if self._wakers is not None:
            with contextlib.suppress(OSError):  # full: it is awake; closed: nobody listens
                self._wakers[1].send(b"\0")

    # Below: on the client's thread only.

    def _run(self, woken: socket.socket) -> None:
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, 4 * self._max_at_once + 16)
        while not self._is_closed:
            try:
                self._take_in()
                self._begin(context)
                self._advance(self._poll(woken))
            except Exception as error:  # the thread must live, and whoever waits must hear of it
                logger.exception("handshakes")
                for question in list(self._asking.values()):
                    self._stop(question, error)
        self._take_in()
        for question in [*self._asking.values(), *itertools.chain(*self._waiting.values())]:
            _end(question, None)
        for waker in self._wakers or ():
            waker.close()
        context.destroy(linger=0)

    def _take_in(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                question = self._handed_in.get_nowait()
                self._waiting.setdefault(question.address, deque()).append(question)
                if question.address not in self._asking:
                    self._next[question.address] = None
                    self._next.move_to_end(question.address)

    def _begin(self, context: zmq.Context[Any]) -> None:
        """Ask what waits, the newest first, as far as there is room or one that has had its turn gives way."""
        while (question := self._newest()) is not None:
            now_s = time.monotonic()
            if len(self._asking) >= self._max_at_once:
                if now_s < self._turn_ends_s(question):
                    return
                self._give_way(self._oldest())
            del self._next[question.address]
            self._waiting[question.address].popleft()
            self._asking[question.address] = question
            question.began_s = now_s
            question.exchange = question.make(context)
            self._resume(question, None)

    def _newest(self) -> _Question | None:
        """The question that is asked next; those that were cancelled are dropped."""
        while self._next:
            address = next(reversed(self._next))
            waiting = self._waiting[address]
            while waiting and waiting[0].answer.done():
                waiting.popleft()
            if waiting:
                return waiting[0]
            del self._next[address], self._waiting[address]
        return None

    def _oldest(self) -> _Question:
        """The question that has been asked longest, of those without a connection if there is one."""
        asking = self._asking.values()
        return next((one for one in asking if not one.wait.is_connected), None) or next(iter(asking))

    def _turn_ends_s(self, newest: _Question) -> float:
        """When the oldest gives way to the newest; to one that was asked before, later."""
        return self._oldest().began_s + (TURN_S if newest.began_s == 0.0 else AGAIN_S)

    def _give_way(self, question: _Question) -> None:
        """End an exchange; its question is asked anew when no newer one waits."""
        if question.exchange is not None:
            question.exchange.close()
            question.exchange = None
        self._waiting.setdefault(question.address, deque()).appendleft(question)
        self._leave(question.address)
        self._next.move_to_end(question.address, last=False)

    def _leave(self, address: Address) -> None:
        """An address is not asked any more; its next question may be."""
        del self._asking[address]
        if self._waiting.get(address):
            self._next[address] = None
        else:
            self._waiting.pop(address, None)

    def _poll(self, woken: socket.socket) -> Ready:
        """Wait until a socket is ready, a question's time has come, a turn is over that another waits for, or something is handed in."""
        poller = zmq.Poller()
        poller.register(woken.fileno(), zmq.POLLIN)
        times = [question.wait.until_s for question in self._asking.values()]
        for question in self._asking.values():
            for one, events in question.wait.sockets:
                poller.register(one, events)
        newest = self._newest()
        if newest is not None and self._asking:
            times.append(self._turn_ends_s(newest))
        ready = {one for one, _ in poller.poll(poll_ms(min(times) - time.monotonic()) if times else None)}
        if woken.fileno() in ready:
            with contextlib.suppress(OSError):
                while woken.recv(4096):
                    pass
        return ready

    def _advance(self, ready: Ready) -> None:
        """Go on with the exchanges of which something is ready. End the questions that were cancelled or whose time is over."""
        now_s = time.monotonic()
        for question in list(self._asking.values()):
            mine = [one for one, _ in question.wait.sockets if one in ready]
            if question.answer.done():
                self._stop(question, None)
            elif mine or now_s >= question.wait.until_s:
                self._resume(question, mine)

    def _resume(self, question: _Question, ready: Ready | None) -> None:
        if question.exchange is None:
            return
        try:
            question.wait = next(question.exchange) if ready is None else question.exchange.send(ready)
        except StopIteration as done:
            self._stop(question, done.value)
        except Exception as error:  # noqa: BLE001  it belongs to whoever asked; the others go on
            self._stop(question, error)

    def _stop(self, question: _Question, outcome: bytes | Exception | None) -> None:
        self._leave(question.address)
        _end(question, outcome)


def _end(question: _Question, outcome: bytes | Exception | None) -> None:
    """Close its sockets and tell whoever asked; None: nobody does any more."""
    if question.exchange is not None:
        question.exchange.close()
    with contextlib.suppress(InvalidStateError):
        if outcome is None:
            question.answer.cancel()
        elif isinstance(outcome, Exception):
            question.answer.set_exception(outcome)
        else:
            question.answer.set_result(outcome)
