"""Is a failed load one line in the log, whatever number of ranks reports it?"""

from __future__ import annotations

import logging

import pytest

from kvreshard.model.logs import FIRST_LINES
from kvreshard.session.commands import FOR_OTHERS, Failure, RemoteEngine
from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.outcomes import OutcomeLog

REMOTE = RemoteEngine("prefill-0", "i", Address("10.0.0.1", 5600))
STALE, GONE, CANCELLED = (
    Failure("stale lease", "the word is 0"),
    Failure("transfer", "the peer has gone"),
    Failure("cancelled", "the request was aborted"),
)


def uncounted(counter: str, label: str, amount: int) -> None:
    raise AssertionError("what fails is counted by its ranks")


@pytest.fixture
def failures(caplog: pytest.LogCaptureFixture) -> OutcomeLog:
    caplog.set_level(logging.INFO, "kvreshard")
    return OutcomeLog(uncounted, ends_requests=False)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_ranks_that_fail_alike_in_different_steps_are_one_line(
    failures: OutcomeLog, caplog: pytest.LogCaptureFixture
) -> None:
    failures.add({"r": {1: STALE}})
    failures.add({"r": {0: STALE}, "other": {0: GONE}})
    assert not lines(caplog)
    failures.end("r", REMOTE)
    assert lines(caplog) == [
        "request r was not loaded from engine prefill-0 at 10.0.0.1:5600: the word is 0 (stale lease, ranks 0, 1); it is computed here"
    ]
    record = caplog.records[0]
    facts = record.event, record.request_id, record.cause, record.engine, record.address  # type: ignore[attr-defined]
    assert facts == ("load_failed", "r", "stale lease", "prefill-0", "10.0.0.1:5600")
    failures.end("r", REMOTE)  # a later load of the same request begins anew
    assert len(lines(caplog)) == 1


def test_each_cause_names_its_ranks(failures: OutcomeLog, caplog: pytest.LogCaptureFixture) -> None:
    failures.add({"r": {2: GONE, 0: STALE, 3: CANCELLED, 1: GONE}})
    failures.end("r", None)
    (line,) = lines(caplog)
    assert line == (
        "request r was not loaded from its source: the word is 0 (stale lease, rank 0); the peer has gone (transfer, ranks 1, 2); "
        "it is computed here"
    )


def test_a_cancelled_load_and_a_good_one_are_no_line(failures: OutcomeLog, caplog: pytest.LogCaptureFixture) -> None:
    failures.add({"r": {0: CANCELLED, 1: CANCELLED}})
    failures.end("r", REMOTE)
    failures.end("good", REMOTE)
    assert not lines(caplog)


@pytest.mark.parametrize(
    ("ends_requests", "is_aborted", "told"),
    [
        (False, False, "it is computed here"),
        (False, True, "it has ended"),
        # vLLM has ended it by then.
        (True, True, "it ends with an error"),
    ],
)
def test_what_becomes_of_the_request_is_said(
    ends_requests: bool, is_aborted: bool, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    failures = OutcomeLog(uncounted, ends_requests=ends_requests)
    failures.add({"r": {0: GONE}})
    failures.end("r", REMOTE, is_aborted=is_aborted)
    assert lines(caplog)[0].endswith(f"the peer has gone (transfer, rank 0); {told}")


def test_an_engine_that_fails_every_load_does_not_fill_the_log(
    failures: OutcomeLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1000):
        failures.add({f"r{number}": {0: STALE, 1: STALE}})
        failures.end(f"r{number}", REMOTE)
        failures.cannot_read(REMOTE, Failure("handshake", f"no answer within {number} s"))
    assert len(lines(caplog)) == 2 * FIRST_LINES
    assert lines(caplog)[1] == "cannot read from engine prefill-0 at 10.0.0.1:5600 (handshake): no answer within 0 s"


def test_a_load_that_gave_its_blocks_to_others_has_a_line_and_an_aborted_one_none(
    failures: OutcomeLog, caplog: pytest.LogCaptureFixture
) -> None:
    failures.add({"r": {0: CANCELLED}, "other": {0: Failure("cancelled", FOR_OTHERS)}})
    failures.end("r", REMOTE, is_aborted=True)
    failures.end("other", REMOTE)
    (line,) = lines(caplog)
    assert "request other was not loaded from" in line
    assert FOR_OTHERS in line
