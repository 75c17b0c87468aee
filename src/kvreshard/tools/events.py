"""The last events of one load, kept in memory for its flight record. Older ones are counted and forgotten."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

MAX_EVENTS = 256
MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Event:
    """`at_s`: seconds since the load was ordered."""

    at_s: float
    name: str
    text: str


class Events:
    """The events of one load, by the session's clock. Any thread may add."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_s = clock()
        self._ring: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()
        self.num_forgotten = 0

    def add(self, name: str, text: str = "") -> None:
        """Something has happened, now."""
        with self._lock:
            self.num_forgotten += len(self._ring) == MAX_EVENTS
            self._ring.append(Event(self._clock() - self._started_s, name, text[:MAX_TEXT]))

    def list(self) -> tuple[Event, ...]:
        """The events that are kept, oldest first."""
        with self._lock:
            return tuple(self._ring)
