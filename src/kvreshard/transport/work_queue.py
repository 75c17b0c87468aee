"""Queue of work for the owner thread, filled by threads that may wait for the result.

1. `submit` hands work in and does not wait. `call` waits for its result, but not for a call into the library that does not come back. What
   it has given up and was not begun is dropped, what was begun is undone when it ends.
2. The owner's thread does what was handed in, in order (`run`).
3. Once `shut`, nothing more is taken.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from kvreshard.transport.base import TransportError, closed_transport
from kvreshard.transport.watchdog import Watchdog

T = TypeVar("T")

# How often whoever waits looks whether the thread is stuck.
LOOK_S = 0.25


class WorkQueue:
    """Of one thread. `run` is that thread's, the rest anybody's. `name`: the transport's, for errors."""

    def __init__(self, name: str, watchdog: Watchdog) -> None:
        self._name, self._watchdog = name, watchdog
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._gate = threading.Lock()
        # What is being done, and nobody waits for any more.
        self._given_up: set[Future[Any]] = set()
        self._is_shut = False

    def submit(self, work: Callable[[], None]) -> None:
        """Do it some time. Raises TransportError once shut."""
        with self._gate:
            if self._is_shut:
                raise closed_transport(self._name)
            self._work.put(work)

    def call(self, function: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """The result of `function`, whose exceptions come back too. Raises TransportError where the thread is stuck, or once shut.

        `undo`: is done after a `function` that succeeds when nobody waits for it any more.
        """
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return  # whoever wanted it has given up
            try:
                result = function()
            except BaseException as error:  # noqa: BLE001  it belongs to the caller, whatever it is
                future.set_exception(error)
                return
            with self._gate:
                future.set_result(result)
                is_wanted = future not in self._given_up
                self._given_up.discard(future)
            if not is_wanted:
                undo()

        self.submit(work)
        while not wait([future], LOOK_S).done:
            stuck = self._watchdog.stuck()
            with self._gate:
                if stuck is not None and not future.done():
                    if not future.cancel():
                        self._given_up.add(future)
                    raise TransportError(stuck.text)
        return future.result()

    def shut(self, last: Callable[[], None] | None = None) -> None:
        """Take nothing more, beside `last`. A second call does nothing."""
        with self._gate:
            if not self._is_shut and last is not None:
                self._work.put(last)
            self._is_shut = True

    def run(self, rest_s: float) -> None:
        """Do what was handed in, waiting for the first piece of it for up to `rest_s`."""
        try:
            work = self._work.get(timeout=rest_s) if rest_s > 0.0 else self._work.get_nowait()
            while True:
                work()
                work = self._work.get_nowait()
        except queue.Empty:
            return
