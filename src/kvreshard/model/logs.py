"""Loggers whose lines are one line each, whatever they quote, have a name each, and are summed up where they repeat.

1. `get_logger`: request ids, engine names and answers of a peer come from others. A line break in them would write a log line of its own, and
   a terminal obeys control characters. The module's logger escapes and cuts the arguments of its records before any handler gets them.
   Tracebacks stay as they are.
2. `fields`: every line from INFO on has an `event`, its name in docs/reference/logs.md, and what it is about as attributes of the record, for
   handlers that write JSON.
3. `Repeats`: of lines that differ only in their request, a few are logged and the rest are counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvreshard.model.text import escaped

MAX_QUOTED = 4000
# Of lines of one key, so many are logged in each period; the others are counted.
FIRST_LINES = 10
PERIOD_S = 60.0
MAX_KEYS = 256


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


def fields(event: str, **values: object) -> dict[str, object]:
    """What a call of a logger gets as `extra`. `event`: the line's name; `values`: what it is about, for handlers that write JSON.

    >>> fields("load_failed", request_id="r1", cause="timeout")
    {'event': 'load_failed', 'request_id': 'r1', 'cause': 'timeout'}
    """
    return {"event": event, **{name: _shown(value) for name, value in values.items()}}


@dataclass(slots=True)
class _Line:
    """Lines of one key: since when they are counted, how many were not logged, and the last of these."""

    since_s: float
    num_logged: int = 0
    num_left_out: int = 0
    level: int = logging.INFO
    text: str = ""
    extra: Mapping[str, object] | None = None


class Repeats:
    """Sums up lines that repeat. Those that are left out are logged at DEBUG, so that one request can still be followed."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._lines: dict[object, _Line] = {}

    def log(self, level: int, key: object, text: str, *args: object, extra: Mapping[str, object]) -> None:
        """Log the line, or count it if a few with this key were logged within the last minute."""
        self.flush()
        if key not in self._lines and len(self._lines) >= MAX_KEYS:
            key = level, extra.get("event")  # too many peers: what happens to them is still told apart
        line = self._lines.setdefault(key, _Line(self._clock()))
        if line.num_logged < FIRST_LINES:
            line.num_logged += 1
            self._logger.log(level, text, *args, extra=extra)
            return
        line.num_left_out += 1
        line.level, line.extra = max(line.level, level), extra
        line.text = text % tuple(map(_shown, args))
        self._logger.debug(text, *args, extra=extra)

    def flush(self) -> None:
        """Log how many lines were left out, of each key whose minute is over."""
        now_s = self._clock()
        for key, line in list(self._lines.items()):
            if now_s - line.since_s < PERIOD_S:
                continue
            del self._lines[key]
            if line.num_left_out:
                self._logger.log(
                    line.level,
                    "%d more lines like this one in %.0f s: %s",
                    *(line.num_left_out, now_s - line.since_s, line.text),
                    extra={**(line.extra or {}), "count": line.num_left_out},
                )
