"""The log lines of failed loads and leases: one per request, whatever number of ranks reports it, and one per engine that cannot be read from.

1. `add`: ranks report why their part of a request failed, in whatever step.
2. `end`: every rank has ended the request. Its causes become one line, with the ranks of each. A request that was cancelled gets none.
3. `cannot_read`: a handshake failed, so that requests wait for nothing.

Lines that differ only in their request are summed up (`Repeats`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvreshard.model.logs import Repeats, fields, get_logger
from kvreshard.session.commands import Failure, RemoteEngine

logger = get_logger(__name__)


class FailureLog:
    """One per engine, in the scheduler's process. `ends_requests`: whether a request whose load failed ends with an error."""

    def __init__(self, *, ends_requests: bool) -> None:
        self._ends_requests = ends_requests
        self._failed: dict[str, dict[int, Failure]] = {}
        self._repeats = Repeats(logger)

    def add(self, failed: Mapping[str, Mapping[int, Failure]]) -> None:
        """Why loads failed, by request and rank."""
        self._failed = merge_failures(self._failed, failed)

    def end(self, request_id: str, remote: RemoteEngine | None, *, is_aborted: bool = False) -> None:
        """All ranks have ended the load from `remote`, which is None where the request is not known any more.

        `is_aborted`: the request has ended before. vLLM also ends one whose load failed, where that is the policy.
        """
        ranks: dict[tuple[str, str], list[int]] = {}
        for rank, failure in sorted(self._failed.pop(request_id, {}).items()):
            ranks.setdefault((failure.kind, failure.text), []).append(rank)
        causes = [(kind, text) for kind, text in ranks if kind != "cancelled"]
        if not causes:
            return
        kind = causes[0][0]
        consequence = "it has ended" if is_aborted else "it is computed here"
        self._repeats.log(
            logging.WARNING,
            (kind, remote),
            "request %s was not loaded from %s: %s; %s",
            *(
                request_id,
                remote or "its source",
                "; ".join(_cause(*cause, ranks[cause]) for cause in causes),
                "it ends with an error" if self._ends_requests else consequence,
            ),
            extra=fields(
                "load_failed", request_id=request_id, cause=kind, **({} if remote is None else remote.log_fields)
            ),
        )

    def cannot_read(self, remote: RemoteEngine, failure: Failure) -> None:
        """A handshake with an engine has failed."""
        self._repeats.log(
            logging.ERROR,
            ("unmet", failure.kind, remote),
            "cannot read from %s (%s): %s",
            *(remote, failure.kind, failure.text),
            extra=fields("peer_refused", cause=failure.kind, **remote.log_fields),
        )

    def expired(self, request_id: str) -> None:
        """A lease ran out before its request was read."""
        self._repeats.log(
            logging.WARNING,
            "expired",
            "the lease of request %s ran out before it was read: its blocks are free, and the decode engine computes it if it still comes",
            request_id,
            extra=fields("lease_expired", request_id=request_id),
        )

    def flush(self) -> None:
        """Log what was summed up, if its minute is over."""
        self._repeats.flush()


def merge_failures(
    one: Mapping[str, Mapping[int, Failure]], other: Mapping[str, Mapping[int, Failure]]
) -> dict[str, dict[int, Failure]]:
    """Why loads failed, by request and rank, of both."""
    return {request: {**one.get(request, {}), **other.get(request, {})} for request in {**one, **other}}


def _cause(kind: str, text: str, ranks: list[int]) -> str:
    """One cause and who has it.

    >>> _cause("stale lease", "the word is 0", [0, 1])
    'the word is 0 (stale lease, ranks 0, 1)'
    """
    return f"{text} ({kind}, rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"
