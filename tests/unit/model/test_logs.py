"""Is a log line one line, whatever it quotes?"""

from __future__ import annotations

import logging

import pytest

from kvreshard.model.logs import FIRST_LINES, MAX_KEYS, MAX_QUOTED, PERIOD_S, Repeats, fields, get_logger

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


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def repeats(clock: Clock, caplog: pytest.LogCaptureFixture) -> Repeats:
    caplog.set_level(logging.INFO, "kvreshard.tests.logs")
    return Repeats(get_logger("kvreshard.tests.logs"), clock)


def log(repeats: Repeats, key: object, request: str) -> None:
    repeats.log(logging.WARNING, key, "request %s failed", request, extra=fields("load_failed", request_id=request))


def test_of_lines_that_repeat_some_are_logged_and_the_rest_counted(
    repeats: Repeats, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(FIRST_LINES + 7):
        log(repeats, "a", f"r{number}")
    log(repeats, "b", "other")
    assert lines(caplog) == [*(f"request r{number} failed" for number in range(FIRST_LINES)), "request other failed"]
    clock.now_s += PERIOD_S
    repeats.flush()
    assert lines(caplog)[FIRST_LINES + 1 :] == [
        f"7 more lines like this one in 60 s: request r{FIRST_LINES + 6} failed"
    ]
    last = caplog.records[-1]
    assert (last.levelno, last.event, last.count, last.request_id) == (
        logging.WARNING,
        "load_failed",
        7,
        f"r{FIRST_LINES + 6}",
    )  # type: ignore[attr-defined]
    repeats.flush()
    log(repeats, "a", "late")
    assert lines(caplog)[FIRST_LINES + 2 :] == ["request late failed"]


def test_what_is_left_out_is_at_debug(repeats: Repeats, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvreshard.tests.logs")
    for number in range(FIRST_LINES + 7):
        log(repeats, "a", f"r{number}")
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * FIRST_LINES + [logging.DEBUG] * 7


def test_many_keys_are_counted_together_and_errors_are_told_apart(
    repeats: Repeats, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2 * MAX_KEYS):
        log(repeats, number, f"r{number}")
    repeats.log(logging.ERROR, "peer", "cannot read from good", extra=fields("peer_refused"))
    assert len(repeats._lines) <= MAX_KEYS + 2
    assert lines(caplog)[-1] == "cannot read from good"
    assert len(lines(caplog)) == MAX_KEYS + FIRST_LINES + 1
    clock.now_s += PERIOD_S
    repeats.flush()
    last = f"{MAX_KEYS - FIRST_LINES} more lines like this one in 60 s: request r{2 * MAX_KEYS - 1} failed"
    assert lines(caplog)[-1] == last
    assert not repeats._lines


def test_a_summed_up_line_is_one_line(repeats: Repeats, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(FIRST_LINES + 1):
        log(repeats, "a", NASTY + "%s%d")
    clock.now_s += PERIOD_S
    repeats.flush()
    assert all(line.isprintable() for line in lines(caplog))
    assert len(lines(caplog)) == FIRST_LINES + 1
