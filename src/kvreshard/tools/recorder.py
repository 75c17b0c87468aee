"""Writer of flight records: one file per failed load, on a thread of its own, in a directory of bounded size.

1. The file is written under a temporary name and then renamed: whole or not at all, readable by its owner only.
2. The newest `max_files` records of the directory stay. Files that a dead process left half written are removed after `PART_AGE_S`.
3. One record is written at a time, and at most one per `MIN_INTERVAL_S`. Of a burst of failures the first is recorded; the next record's
   log line counts the others.

Recording raises nothing: a record that cannot be written is a warning in the log.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from kvreshard.model.errors import KvReshardError
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import Failure
from kvreshard.session.workers import Workers
from kvreshard.tools.flight import Flight, FlightEvent, encode_flight

logger = get_logger(__name__)

SUFFIX = ".kvflight"
PART = ".part"
MIN_INTERVAL_S = 1.0
PART_AGE_S = 600.0
CLOSE_S = 0.1
MAX_EVENTS = 256
MAX_EVENT_TEXT = 400
MAX_NAME = 120


class Events:
    """The last `MAX_EVENTS` events of one load, and a count of those before. Any thread may add."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._started_s = clock, clock()
        self._ring: deque[FlightEvent] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()
        self.num_forgotten = 0

    def add(self, name: str, text: str = "") -> None:
        """Note an event, at the clock's present time."""
        with self._lock:
            self.num_forgotten += len(self._ring) == MAX_EVENTS
            self._ring.append(FlightEvent(self._clock() - self._started_s, name, text[:MAX_EVENT_TEXT]))

    def list(self) -> list[FlightEvent]:
        """The last events, oldest first."""
        with self._lock:
            return [*self._ring]


def is_recorded(failure: Failure) -> bool:
    """Whether a failure leaves a record.

    An aborted request leaves none, unless its pages are quarantined. A load without its source's seal leaves none: nothing was planned, and
    anyone who may send requests could fill the directory.
    """
    return failure.is_quarantined or failure.kind not in ("cancelled", "seal")


class Recorder:
    """Writes records to `directory`. Used from one thread.

    Args:
        directory: made if it does not exist.
        max_files: records that stay.
        clock: seconds, for the interval between records.
        now: seconds since 1970, for names.
        submit: runs a function later and returns whether it will; the recorder's own thread if None.

    Raises:
        KvReshardError: the directory cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        max_files: int,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        submit: Callable[[Callable[[], None]], bool] | None = None,
    ) -> None:
        self._directory, self._max_files, self._clock, self._now = directory, max_files, clock, now
        self._workers = Workers("kvreshard-recorder", 1)
        self._submit = submit or self._workers.submit
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._last_s: float | None = None
        self._num_written = self._num_skipped = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise KvReshardError(
                f"flight_recorder_dir '{directory}' cannot be made: {error.strerror}; give a directory that can be written"
            ) from None

    def record(self, request: str, make: Callable[[float], Flight]) -> None:
        """Have the record of `request` written, unless one was written a moment ago or is being written.

        `make`: called on the recorder's thread, with the time in seconds since 1970.
        """
        now_s = self._clock()
        if not self._is_idle.is_set() or (self._last_s is not None and now_s < self._last_s + MIN_INTERVAL_S):
            self._num_skipped += 1
            return
        self._last_s = now_s
        num_skipped, self._num_skipped = self._num_skipped, 0
        self._is_idle.clear()
        if not self._submit(lambda: self._record(request, make, num_skipped)):
            self._is_idle.set()

    def close(self) -> None:
        """Wait up to `CLOSE_S` for a record that is being written."""
        self._is_idle.wait(CLOSE_S)
        self._workers.close()

    # Below: on the recorder's thread.

    def _record(self, request: str, make: Callable[[float], Flight], num_skipped: int) -> None:
        more = f" ({num_skipped} failures since the last record left none)" if num_skipped else ""
        try:
            path = self._write(make(self._now()))
            logger.warning(
                "request %s: flight record %s%s; see `kvreshard replay`",
                *(request, path, more),
                extra=fields("flight_record", request_id=request, path=path),
            )
        except Exception as error:  # noqa: BLE001  a failed record must not fail anything else
            logger.warning(
                "request %s: no flight record was written: %s%s",
                *(request, error, more),
                extra=fields("flight_record_failed", request_id=request),
            )
        finally:
            self._is_idle.set()

    def _write(self, flight: Flight) -> Path:
        message = encode_flight(flight)
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(flight.written_at_s))
        self._num_written += 1
        words = f"{stamp}-{os.getpid()}-{self._num_written:04d}-r{flight.rank}-{flight.failure.kind}-{flight.request}"
        path = self._directory / (re.sub(r"[^A-Za-z0-9_-]", "_", words)[:MAX_NAME] + SUFFIX)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=PART, dir=self._directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(message)
            Path(temporary).replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
            raise
        self._prune()
        return path

    def _prune(self) -> None:
        """Remove the oldest, whose names come first. Another rank may remove the same file at the same time."""
        for path in sorted(self._directory.glob(f"*{SUFFIX}"))[: -self._max_files]:
            with contextlib.suppress(OSError):
                path.unlink()
        for path in self._directory.glob(f".*{PART}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < self._now() - PART_AGE_S:
                    path.unlink()
