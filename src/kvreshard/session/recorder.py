"""How does a failed load leave a file behind, and how is it kept from filling the disk or slowing the others?

1. `record` takes what is known of the load. Both layouts are bytes already; the copy list is bound once more.
2. The file is written beside its place and moved there, whole or not at all, readable by its owner only.
3. Of all flight records in the directory the newest `max_files` stay.

It runs on the session's thread, never on the engine's, and at most once in `MIN_INTERVAL_S`: a storm of failures leaves its first
record, and a count of the rest in the next one's log line. Nothing raises: what cannot be written is a line in the log.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvreshard import __version__
from kvreshard.model import wire
from kvreshard.model.errors import KvReshardError
from kvreshard.model.logs import get_logger
from kvreshard.model.request_form import to_form
from kvreshard.plan.bind import bind
from kvreshard.plan.route import Route
from kvreshard.session.card import EngineCard
from kvreshard.session.events import Events
from kvreshard.session.flight import (
    Flight,
    FlightCopies,
    FlightEvent,
    FlightFailure,
    FlightSide,
    encode_flight,
    summarize,
)
from kvreshard.session.orders import Failure, Load

logger = get_logger(__name__)

SUFFIX = ".kvflight"
MIN_INTERVAL_S = 1.0
MAX_NAME = 40


@dataclass(frozen=True, slots=True)
class Crash:
    """A failed load, as its endpoint knows it. `src` and `route` are None when the source was not met or not routed."""

    load: Load
    rank: int
    failure: Failure
    dst: EngineCard
    src: EngineCard | None
    route: Route | None
    events: Events
    staging_bytes: int
    allow_mismatch: tuple[str, ...]


class Recorder:
    """Writes records to `directory`, which it makes. Used from one thread. `clock`: seconds; `now`: of the day, for names.

    Raises KvReshardError if the directory cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        max_files: int,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._directory, self._max_files, self._clock, self._now = directory, max_files, clock, now
        self._last_s: float | None = None
        self._num_written = self._num_skipped = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise KvReshardError(
                f"flight_recorder_dir '{directory}' cannot be made: {error.strerror}; give a directory that can be written"
            ) from None

    def record(self, crash: Crash) -> Path | None:
        """Write a record; its path, or None if it was left out or could not be written."""
        now_s = self._clock()
        if self._last_s is not None and now_s < self._last_s + MIN_INTERVAL_S:
            self._num_skipped += 1
            return None
        self._last_s = now_s
        try:
            path = self._write(crash)
        except Exception as error:  # noqa: BLE001  a record is a help, never a second failure
            logger.warning("request %s: no flight record was written: %s", crash.load.request, error)
            return None
        more = f" ({self._num_skipped} failures since the last record left none)" if self._num_skipped else ""
        self._num_skipped = 0
        logger.warning("request %s: flight record %s%s; see `kvreshard replay`", crash.load.request, path, more)
        return path

    def _write(self, crash: Crash) -> Path:
        written_at_s = self._now()
        message = encode_flight(make_flight(crash, written_at_s))
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(written_at_s))
        self._num_written += 1
        words = f"{stamp}-{os.getpid()}-{self._num_written:04d}-r{crash.rank}-{crash.failure.kind}-{crash.load.request}"
        path = self._directory / (re.sub(r"[^A-Za-z0-9_-]", "_", words)[: MAX_NAME * 3] + SUFFIX)
        handle, temporary = tempfile.mkstemp(prefix=".", suffix=".part", dir=self._directory)
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


def make_flight(crash: Crash, written_at_s: float) -> Flight:
    """The record of a failed load."""
    copies, copies_error = _copies(crash)
    load, failure = crash.load, crash.failure
    return Flight(
        kvreshard=__version__,
        written_at_s=written_at_s,
        rank=crash.rank,
        request=load.request,
        source_request=load.lease.request,
        source_address=str(load.remote.address),
        failure=FlightFailure(failure.kind, failure.text, failure.is_quarantined),
        dst=_side(crash.dst),
        src=None if crash.src is None else _side(crash.src),
        transfer=to_form(load.transfer),
        copies=copies,
        copies_error=copies_error,
        staging_bytes=crash.staging_bytes,
        allow_mismatch=list(crash.allow_mismatch),
        events=[FlightEvent(event.at_s, event.name, event.text) for event in crash.events.list()],
        num_events_forgotten=crash.events.num_forgotten,
    )


def _copies(crash: Crash) -> tuple[FlightCopies | None, str]:
    if crash.route is None:
        return None, "the engines were not routed"
    try:
        return summarize(bind(crash.route, crash.load.transfer)), ""
    except KvReshardError as error:
        return None, str(error)


def _side(card: EngineCard) -> FlightSide:
    """With the layout in the plain form, which any version's `replay` and other programs read; one that is wrong stays as it came."""
    try:
        layout = wire.encode(card.decode_layout())
    except KvReshardError:
        layout = card.layout
    return FlightSide(card.engine, card.incarnation, dict(card.facts), layout)
