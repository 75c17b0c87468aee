"""Daemon threads for work that nobody waits for when an engine ends.

The interpreter waits for the threads of a `ThreadPoolExecutor` when it ends. Here `close` drops what has not begun, and what has begun may end
with the process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from kvreshard.model.logs import fields, get_logger

logger = get_logger(__name__)


class Workers:
    """At most `max_threads` threads, started when there is work. Safe for use from any thread."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name, self._max_threads = name, max_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_open = 0
        self._is_closed = False

    def submit(self, work: Callable[[], None]) -> bool:
        """Queue work; False once closed, and where not one thread can be started."""
        with self._lock:
            if self._is_closed:
                return False
            if self._num_open >= self._num_threads and self._num_threads < self._max_threads:
                # Where no more threads may be started, those that run do the work.
                with contextlib.suppress(RuntimeError):
                    threading.Thread(target=self._run, name=self._name, daemon=True).start()
                    self._num_threads += 1
            if not self._num_threads:
                return False
            self._num_open += 1
            self._work.put(work)
        return True

    def close(self) -> None:
        """Begin nothing more; does not wait."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._num_threads):
                self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if not self._is_closed:
                    work()
            except Exception:  # the thread must live
                logger.exception("%s", self._name, extra=fields("internal_error"))
            with self._lock:
                self._num_open -= 1
