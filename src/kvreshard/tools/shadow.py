"""Shadow mode on one rank: compares what this package would have copied with what NixlConnector posted, on a thread of its own.

The engine's thread submits loads that have ended. The thread takes one load at a time: it meets the source, compiles a route and compares.
Loads that arrive faster than that are dropped, since a sample is enough.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.model.logs import fields, get_logger
from kvreshard.plan.compile import compile_route
from kvreshard.plan.route import Route
from kvreshard.session.commands import Load, RemoteEngine
from kvreshard.session.engine_metadata import EngineMetadata, check_compatibility
from kvreshard.session.handshake_client import fetch_engine_metadata, send_outcome
from kvreshard.session.handshake_messages import HandshakeError
from kvreshard.session.keys import Keys
from kvreshard.session.peer import describe_route
from kvreshard.tools.shadow_record import PostedTransfer
from kvreshard.tools.shadow_report import ShadowReport, compare_load

logger = get_logger(__name__)

MAX_WAITING = 256
CLOSE_S = 0.3
# A source that does not answer is asked again after this.
RETRY_S = 30.0
# Sources that are remembered. Each start of an engine is another one.
MAX_KNOWN = 256

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ShadowLoad:
    """A load that NixlConnector carries out. `num_tokens`, `their_tokens`: how many this connector and NixlConnector would load.

    `why_not`: why this connector would not load it, else empty. `lost`: what the last token needs and has no page for, else empty.
    """

    load: Load | None
    request: str
    num_tokens: int
    their_tokens: int
    why_not: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """A load that NixlConnector has ended. `agents`: name of each of the source's agents -> its (pipeline, tensor) rank.

    `rearranges`: NixlConnector permutes what has arrived.
    """

    load: ShadowLoad
    posted: Sequence[PostedTransfer]
    agents: Mapping[str, tuple[int, int]]
    is_failed: bool
    rearranges: bool


class ShadowJudge:
    """Compares the loads of rank `rank` of `engine`. `report_file`: gets one JSON line per request; None: reports go to the log only."""

    def __init__(
        self,
        engine: str,
        *,
        handshake_timeout_s: float,
        keys: Keys | None = None,
        allow_mismatch: tuple[str, ...] = (),
        report_file: str | None = None,
    ) -> None:
        self._engine, self._handshake_timeout_s, self._keys = engine, handshake_timeout_s, keys
        self._allow_mismatch, self._is_unwritten = allow_mismatch, False
        self._report_file = Path(os.path.expanduser(report_file)) if report_file else None
        self.rank = 0
        self._engine_metadata: EngineMetadata | None = None
        self._dst: EngineLayout | None = None
        self._met: dict[RemoteEngine, tuple[EngineLayout, Route] | str] = {}
        self._unanswered: dict[RemoteEngine, tuple[float, HandshakeError]] = {}
        self._counts: dict[tuple[str, str], int] = {}
        self._waiting: queue.Queue[EndedLoad | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="kvreshard-shadow", daemon=True)
        self._thread.start()

    def introduce(self, engine_metadata: EngineMetadata) -> None:
        """Set this engine's metadata; until then loads cannot be compared. Raises what a bad layout raises."""
        self._engine_metadata, self._dst = engine_metadata, engine_metadata.decode_layout()

    def submit(self, ended: EndedLoad) -> None:
        """Queue a load for comparison, unless `MAX_WAITING` wait."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(ended)

    def close(self) -> None:
        """End the thread. It may be waiting for an engine that does not answer, so this returns after `CLOSE_S`."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (ended := self._waiting.get()) is not None:
            try:
                self._note(self._judge(ended))
            except Exception:  # the other comparisons go on
                logger.exception(
                    "shadow: request %s could not be compared",
                    ended.load.request,
                    extra=fields("internal_error", request_id=ended.load.request),
                )

    def _judge(self, ended: EndedLoad) -> ShadowReport:
        """The report; `missing` where the load cannot hold all that the request needs, whatever was copied."""
        found = self._compare(ended)
        if ended.load.lost and not ended.is_failed and found.verdict in ("same", "more", "refused here"):
            return msgspec.structs.replace(found, verdict="missing", reason=ended.load.lost)
        return found

    def _compare(self, ended: EndedLoad) -> ShadowReport:
        load, dst = ended.load, self._dst
        facts: dict[str, Any] = {
            "request": load.request,
            "peer": load.load.remote.engine if load.load is not None else "",
            "rank": self.rank,
            "num_tokens": load.num_tokens,
            "their_tokens": load.their_tokens,
            "rearranges": ended.rearranges,
        }
        if load.load is None and not load.why_not:  # only the last token was left to load
            return ShadowReport(verdict="more" if ended.posted and not ended.is_failed else "refused there", **facts)
        if load.load is None or dst is None:
            return ShadowReport(verdict="refused here", reason=load.why_not, **facts)
        try:
            met = self._meet(load.load.remote, dst)
        except HandshakeError as error:
            return ShadowReport(verdict="unknown", reason=str(error), **facts)
        if isinstance(met, str):
            return ShadowReport(verdict="refused here", reason=met, **facts)
        src, route = met
        ranks = _rank_numbers(src)
        try:
            theirs = [
                posted.copies(ranks[ended.agents[posted.remote.agent]], self.rank)
                for posted in ([] if ended.is_failed else ended.posted)
            ]
        except (ValueError, KeyError) as error:
            return ShadowReport(verdict="unknown", reason=f"{type(error).__name__}: {error}", **facts)
        return compare_load(load.load, route, src, dst, theirs, facts)

    def _meet(self, remote: RemoteEngine, dst: EngineLayout) -> tuple[EngineLayout, Route] | str:
        """The source's layout and the route from it, or why there is none; found once per instance of the engine. Raises HandshakeError where the
        source does not answer; it is asked again after `RETRY_S`.
        """
        asked_s, error = self._unanswered.get(remote, (-math.inf, None))
        if error is not None and time.monotonic() < asked_s + RETRY_S:
            raise error
        if remote not in self._met:
            try:
                met = self._fetch(remote, dst)
                _remember(self._met, remote, met)
                sentence = describe_route(met[1])
                logger.info("shadow: %s: %s", remote, sentence, extra=fields("shadow_met", **remote.log_fields))
            except HandshakeError as error:
                _remember(self._unanswered, remote, (time.monotonic(), error))
                raise
            except KvReshardError as error:
                _remember(self._met, remote, str(error))
                logger.warning("shadow: %s: %s", remote, error, extra=fields("shadow_refused", **remote.log_fields))
        return self._met[remote]

    def _fetch(self, remote: RemoteEngine, dst: EngineLayout) -> tuple[EngineLayout, Route]:
        timeout_s, keys = self._handshake_timeout_s, self._keys
        engine_metadata = fetch_engine_metadata(remote.address, self._engine, self.rank, timeout_s, keys)
        if self._engine_metadata is not None:
            check_compatibility(self._engine_metadata, engine_metadata, self._allow_mismatch)
        src = engine_metadata.decode_layout()
        route = compile_route(src, dst, self.rank)
        outcome = f"shadow: {describe_route(route)}"
        with contextlib.suppress(HandshakeError):  # a courtesy
            send_outcome(remote.address, self._engine, self.rank, outcome, True, timeout_s, keys)
        return src, route

    def _note(self, report: ShadowReport) -> None:
        """Write a report to the file, if there is one. Per verdict and peer, log the first report, then the 10th, 100th, ..."""
        self._write(report)
        key = report.verdict, report.peer
        count = self._counts.get(key, 0) + 1
        _remember(self._counts, key, count)
        if str(count).strip("0") == "1":
            is_fine = report.verdict in ("same", "more")
            times = f", {count} requests like it by now" if count > 1 else ""
            logger.log(
                logging.INFO if is_fine else logging.WARNING,
                "shadow: %s%s",
                *(report.sentence(), times),
                extra=fields("shadow_verdict", verdict=report.verdict, engine=report.peer, count=count),
            )

    def _write(self, report: ShadowReport) -> None:
        """A file that cannot be written is told once: each verdict is in the log all the same."""
        if self._report_file is None:
            return
        try:
            with self._report_file.open("ab") as file:
                file.write(msgspec.json.encode(report) + b"\n")
        except OSError as error:
            if not self._is_unwritten:
                logger.warning(
                    "shadow: reports are missing in shadow_report_file %s, which cannot be written: %s",
                    *(self._report_file, error.strerror),
                    extra=fields("shadow_report_failed", path=self._report_file),
                )
            self._is_unwritten = True


def _remember(known: dict[Key, Value], key: Key, value: Value) -> None:
    """Keep a value; of too many the one that has been there longest goes."""
    if key not in known and len(known) >= MAX_KNOWN:
        del known[next(iter(known))]
    known[key] = value


def _rank_numbers(src: EngineLayout) -> dict[tuple[int, int], int]:
    """(pipeline, tensor) rank, as NixlConnector counts them -> number in the layout."""
    places = {rank.rank: dict(rank.place) for rank in src.ranks}
    num_tp = 1 + max(place["tp"] for place in places.values())
    return {(place["pp"], place.get("pcp", 0) * num_tp + place["tp"]): rank for rank, place in places.items()}
