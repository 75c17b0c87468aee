"""What becomes of the requests of one engine that another engine has a part of, in its log and its counters.

1. A request that is computed here, in part or whole, is counted by its cause, and the log has a line of it (`computed`, `partial`).
2. `add`: ranks report why their part of a load failed, in whatever step. `end`: every rank has ended the request. Its causes become one line,
   with the ranks of each. A request that was aborted gets none.
3. `cannot_read`: a handshake failed, so that requests wait for nothing.

Lines that differ only in their request are summed up (`Repeats`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvreshard.model.logs import Repeats, fields, get_logger
from kvreshard.model.text import plain
from kvreshard.session.commands import FOR_OTHERS, Failure, RemoteEngine

logger = get_logger(__name__)

# Cause of a fallback -> why the request is computed here.
REASONS: Mapping[str, str] = {
    "itself": "this engine has prefilled it; what its prefix cache has of it is used",
    "host": "it names {remote.address.host_port} as its source, which is not among source_hosts; no rank contacts it",
    "role": (
        "a router sent the prefill of {remote} to an engine whose kv_role is kv_producer, which does not load; send it to a "
        "kv_consumer, or make this engine kv_both"
    ),
    "answer": (
        "a router sent the answer of {remote} with it, and this engine does not load answers; set bidirectional_kv_xfer to true "
        "here too"
    ),
    "unmet": "the answer that it goes on from cannot be read: {text}",
    "ended": "{remote} holds the answer that it goes on from no longer: its time was over, or blocks were short there",
    "params": "{text}",
    "shadow": "in shadow mode nothing is read before a prefill has ended",
    "unheard": "the prefill engine at {remote.address.host_port} does not say where its prefill stands: {text}",
    "prefill": "its prefill at {remote.address.host_port} has ended without pages: {text}",
    "spent": "this engine has released its prefill before, after it was loaded, failed to load or was not needed",
    "reset": "the cache was reset after the request had arrived",
    "deadlock": (
        "nothing is computed or loaded while blocks are held for other engines, which may wait for one another in a circle; its source, "
        "{remote}, gets its blocks back. Give these engines more blocks or less to prefill"
    ),
    "pool": (
        "the whole pool is free, and vLLM does not find the blocks to load it, which are more than to compute it where an engine has "
        "drafts; give this engine more blocks"
    ),
}
# These are usual where choices share a prefill or a router picks one engine twice.
EXPECTED = ("itself", "spent", "ended")

Count = Callable[[str, str, int], None]
"""Adds an amount to a counter of `metrics`, under a label."""


class OutcomeLog:
    """One per engine, in the scheduler's process. `ends_requests`: whether a request whose load failed ends with an error."""

    def __init__(self, count: Count, *, ends_requests: bool = False) -> None:
        self._count, self._ends_requests = count, ends_requests
        self._logged_causes: set[str] = set()
        self._failed: dict[str, dict[int, Failure]] = {}
        self._repeats = Repeats(logger)

    def computed(self, request_id: str, cause: str, why: str, remote: RemoteEngine | None = None) -> None:
        """A request is computed here. `remote`: its source, where that is known. Without a `why` it is counted, and another line says so."""
        self._count("fallbacks", cause, 1)
        if not why:
            return
        self._repeats.log(
            logging.INFO if cause in EXPECTED else logging.WARNING,
            ("computed_here", cause, remote),
            "request %s is computed here: %s",
            *(request_id, why),
            extra=fields("computed_here", request_id=request_id, cause=cause, **(remote.log_fields if remote else {})),
        )

    def ignored(self, request_id: str, params: Any) -> None:
        """A request whose parameters are no map is computed here. It has come from a client, with all of its items."""
        self.computed(request_id, "params", f"its kv_transfer_params are {plain(params, 80)}, and must be a map")

    def partial(
        self, request_id: str, cause: str, num_tokens: tuple[int, int], why: str = "", *, is_logged: bool = True
    ) -> None:
        """Of a request so many tokens are loaded, or here already, and so many were prefilled. The first request of each cause is a warning.

        A request may have two causes: its prompt differs, and what is left fails to load. Not counted: tokens in this engine's prefix cache, and
        those at the end of each prompt that it computes in any case. Not `is_logged`: another line says so.
        """
        num_loaded, num_prefilled = max(0, num_tokens[0]), num_tokens[1]
        if num_loaded >= num_prefilled:
            return
        self._count("partial_loads", cause, 1)
        self._count("tokens_not_loaded", cause, num_prefilled - num_loaded)
        if not is_logged:
            return
        is_first = cause not in self._logged_causes
        self._logged_causes.add(cause)
        self._repeats.log(
            logging.WARNING if is_first else logging.INFO,
            ("partial_load", cause, is_first),
            "request %s: %d of the %d tokens that were prefilled are loaded (%s)%s%s",
            *(request_id, num_loaded, num_prefilled, cause, f": {why}" if why else ""),
            "; further requests of this cause are logged at INFO" if is_first else "",
            extra=fields("partial_load", request_id=request_id, cause=cause),
        )

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
        causes = [(kind, text) for kind, text in ranks if kind != "cancelled" or text == FOR_OTHERS]
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
