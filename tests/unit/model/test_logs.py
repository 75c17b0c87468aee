"""Is a log line one line, whatever it quotes?"""

from __future__ import annotations

import logging

import pytest

from kvreshard.model.logs import MAX_QUOTED, get_logger

NASTY = "cmpl-1\nERROR kvreshard: all is lost\x1b[31m\u202e\r\u2028\x85"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("quoted", [NASTY, ValueError(NASTY), [NASTY], {"a": NASTY}, NASTY.encode()], ids=str)
def test_what_is_quoted_is_in_one_line(quoted: object, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("kvreshard.tests.logs")
    logger.warning("request %s will be computed here: %d of %d, %.1f", quoted, 3, 4, 0.5)
    (line,) = lines(caplog)
    assert line.isprintable()
    assert line.startswith("request ")
    assert line.endswith(" will be computed here: 3 of 4, 0.5")


def test_what_is_long_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("kvreshard.tests.logs").warning("request %s%s", "x" * 10**6, None)
    (line,) = lines(caplog)
    assert line == f"request {'x' * MAX_QUOTED}... (1000000 characters)None"


def test_a_module_has_one_logger_and_its_exceptions_keep_their_lines(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("kvreshard.tests.logs")
    assert get_logger("kvreshard.tests.logs") is logger is logging.getLogger("kvreshard.tests.logs")
    assert len(logger.filters) == 1
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("request %s", "a\nb")
    assert lines(caplog) == ["request a\\nb"]
    assert "two\nlines" in caplog.text
