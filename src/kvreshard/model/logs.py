"""Loggers whose lines are one line each, whatever they quote.

Request ids, engine names and answers of a peer come from others. A line break in them would write a log line of its own, and a terminal
obeys control characters. `get_logger` returns a module's logger, which escapes and cuts the arguments of its records before any
handler gets them. Tracebacks stay as they are.
"""

from __future__ import annotations

import logging

from kvreshard.model.text import escaped

MAX_QUOTED = 4000


class _OneLine(logging.Filter):
    """Escapes the arguments of a record. Numbers stay numbers."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(map(_shown, record.args))
        return True


def _shown(value: object) -> object:
    return value if isinstance(value, int | float) or value is None else escaped(value, MAX_QUOTED)


def get_logger(name: str) -> logging.Logger:
    """The logger of a module."""
    logger = logging.getLogger(name)
    if not any(isinstance(one, _OneLine) for one in logger.filters):
        logger.addFilter(_OneLine())
    return logger
