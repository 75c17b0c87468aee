"""Requests of which fewer tokens are loaded than were prefilled: counted by cause, and told with both numbers.

1. `note` counts the request, and the tokens that are not loaded.
2. The first request of each cause is a warning in the log, all further ones are at INFO.

A request may have two causes: its prompt differs, and what is left of it fails to load. Not meant: tokens that the decode engine has in its own prefix cache, and those at the end of each prompt that it computes in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvreshard.model.logs import get_logger

logger = get_logger(__name__)


class PartialLoads:
    """Of one engine. `count`: hears a cause and how many tokens of a request are not loaded."""

    def __init__(self, count: Callable[[str, int], None]) -> None:
        self._count = count
        self._told: set[str] = set()

    def note(self, request_id: str, cause: str, num_loaded: int, num_prefilled: int, why: str = "") -> None:
        """Of `num_prefilled` tokens only `num_loaded` are loaded, or are here already. `cause`: a word for all such requests.

        `why`: what is to be said of this one. Nothing is noted where none is missing.
        """
        if num_loaded >= num_prefilled:
            return
        self._count(cause, num_prefilled - num_loaded)
        is_first = cause not in self._told
        self._told.add(cause)
        logger.log(
            logging.WARNING if is_first else logging.INFO,
            "request %s: %d of the %d tokens that were prefilled are loaded (%s)%s%s",
            *(request_id, num_loaded, num_prefilled, cause),
            f": {why}" if why else "",
            "; further requests of this cause are logged at INFO" if is_first else "",
        )
