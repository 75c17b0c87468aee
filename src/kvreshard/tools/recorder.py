"""Writes a flight record of each failed load, on a thread of its own, and keeps a bounded number of them.

1. `record` hands what is known of the load to a thread of the recorder's own, and returns.
2. There the file is written beside its place and moved there, whole or not at all, readable by its owner only. Layouts are bytes already, and
   no copy is listed: a record costs what its block tables cost.
3. Of all flight records in the directory the newest `max_files` stay. What a process that died has left half written goes after
   `PART_AGE_S`.

At most one record is on its way, and at most one is made in `MIN_INTERVAL_S`: a storm of failures leaves its first record, and a count of the
rest in the next one's log line. Nothing raises: what cannot be written is a line in the log.
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
from dataclasses import dataclass
from pathlib import Path

from kvreshard import __version__
from kvreshard.model.errors import KvReshardError
from kvreshard.model.logs import get_logger
from kvreshard.session.commands import Failure, Load
from kvreshard.session.engine_metadata import EngineMetadata
from kvreshard.session.workers import Workers
from kvreshard.tools.flight import (
    Flight,
    FlightEvent,
    FlightFailure,
    FlightRequest,
    FlightSide,
    encode_flight,
)

logger = get_logger(__name__)

SUFFIX = ".kvflight"
PART = ".part"
MIN_INTERVAL_S = 1.0
PART_AGE_S = 600.0
CLOSE_S = 0.1
MAX_EVENTS = 256
MAX_EVENT_TEXT = 400
MAX_NAME = 40


class Events:
    """The last events of one load, by the session's clock; older ones are counted and forgotten. Any thread may add."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._started_s = clock, clock()
        self._ring: deque[FlightEvent] = deque(maxlen=MAX_EVENTS)
        self._lock = threading.Lock()
        self.num_forgotten = 0

    def add(self, name: str, text: str = "") -> None:
        """Something has happened, now."""
        with self._lock:
            self.num_forgotten += len(self._ring) == MAX_EVENTS
            self._ring.append(FlightEvent(self._clock() - self._started_s, name, text[:MAX_EVENT_TEXT]))

    def list(self) -> list[FlightEvent]:
        """The events that are kept, oldest first."""
        with self._lock:
            return [*self._ring]


@dataclass(frozen=True, slots=True)
class FailedLoad:
    """A failed load, as its observer knows it. `src` is None when the source was not met; `is_routed`: there was a route from it."""

    load: Load
    rank: int
    failure: Failure
    dst: EngineMetadata
    src: EngineMetadata | None
    is_routed: bool
    events: Events
    staging_bytes: int
    allow_mismatch: tuple[str, ...]


def is_recorded(failure: Failure) -> bool:
    """Whether a failure leaves a record. An aborted request does not, unless its pages were lost. Nor does one without its source's seal:
    nothing was planned, and whoever may send requests could fill the directory.
    """
    return failure.is_quarantined or failure.kind not in ("cancelled", "seal")


class Recorder:
    """Writes records to `directory`, which it makes. Used from one thread. `clock`: seconds; `now`: of the day, for names.

    `submit`: does a piece of work some time; None: on a thread of the recorder's own. Raises KvReshardError if the directory cannot be made.
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

    def record(self, failed: FailedLoad) -> None:
        """Have a record written, unless one was a moment ago or still is."""
        now_s = self._clock()
        if not self._is_idle.is_set() or (self._last_s is not None and now_s < self._last_s + MIN_INTERVAL_S):
            self._num_skipped += 1
            return
        self._last_s = now_s
        num_skipped, self._num_skipped = self._num_skipped, 0
        self._is_idle.clear()
        if not self._submit(lambda: self._record(failed, num_skipped)):
            self._is_idle.set()

    def close(self) -> None:
        """Wait a moment for a record that is on its way."""
        self._is_idle.wait(CLOSE_S)
        self._workers.close()

    # Below: on the recorder's thread.

    def _record(self, failed: FailedLoad, num_skipped: int) -> None:
        more = f" ({num_skipped} failures since the last record left none)" if num_skipped else ""
        try:
            path = self._write(failed)
            logger.warning("request %s: flight record %s%s; see `kvreshard replay`", failed.load.request, path, more)
        except Exception as error:  # noqa: BLE001  a record is a help, never a second failure
            logger.warning("request %s: no flight record was written: %s%s", failed.load.request, error, more)
        finally:
            self._is_idle.set()

    def _write(self, failed: FailedLoad) -> Path:
        written_at_s = self._now()
        message = encode_flight(make_flight(failed, written_at_s))
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(written_at_s))
        self._num_written += 1
        words = (
            f"{stamp}-{os.getpid()}-{self._num_written:04d}-r{failed.rank}-{failed.failure.kind}-{failed.load.request}"
        )
        path = self._directory / (re.sub(r"[^A-Za-z0-9_-]", "_", words)[: MAX_NAME * 3] + SUFFIX)
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
        """Names begin with the time, so that the oldest come first; another rank may remove one at the same moment."""
        for path in sorted(self._directory.glob(f"*{SUFFIX}"))[: -self._max_files]:
            with contextlib.suppress(OSError):
                path.unlink()
        for path in self._directory.glob(f".*{PART}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < self._now() - PART_AGE_S:
                    path.unlink()


def make_flight(failed: FailedLoad, written_at_s: float) -> Flight:
    """The record of a failed load."""
    load, failure = failed.load, failed.failure
    return Flight(
        kvreshard=__version__,
        written_at_s=written_at_s,
        rank=failed.rank,
        request=load.request,
        source_request=load.lease.request,
        source_address=str(load.remote.address),
        failure=FlightFailure(failure.kind, failure.text, failure.is_quarantined),
        dst=_side(failed.dst),
        src=None if failed.src is None else _side(failed.src),
        transfer=FlightRequest.of(load.transfer),
        is_routed=failed.is_routed,
        staging_bytes=failed.staging_bytes,
        allow_mismatch=list(failed.allow_mismatch),
        events=failed.events.list(),
        num_events_forgotten=failed.events.num_forgotten,
    )


def _side(engine_metadata: EngineMetadata) -> FlightSide:
    return FlightSide(
        engine_metadata.engine, engine_metadata.instance_id, dict(engine_metadata.compatibility), engine_metadata.layout
    )
