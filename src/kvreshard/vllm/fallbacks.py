"""Causes for which a request is computed here although another engine has a part of it: they are counted, and the log has lines of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvreshard.model.logs import Repeats, fields, get_logger
from kvreshard.model.text import plain
from kvreshard.session.commands import RemoteEngine

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


class FallbackLog:
    """What requests that are computed here, in part or whole, leave in the counters and the log of one engine."""

    def __init__(self, count: Count) -> None:
        self._count = count
        self._logged_causes: set[str] = set()
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

    def flush(self) -> None:
        """Log what was summed up, if its minute is over."""
        self._repeats.flush()
