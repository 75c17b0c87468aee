"""Does the engine's thread wait for a load exactly when that is worth it?"""

import threading
from collections.abc import Callable

import pytest

from kvreshard.session.commands import Failure, Results
from kvreshard.session.pull import TransferStats
from kvreshard.session.results import ResultQueue

MOVED = TransferStats(1, 1, 1)
FOR_EVER_S, DEADLINE_S = 1000.0, 10.0


class Taker:
    """Takes on a thread of its own, with more patience than the test has."""

    def __init__(self, outbox: ResultQueue) -> None:
        self._found: list[Results] = []
        self._thread = threading.Thread(target=lambda: self._found.append(outbox.take(FOR_EVER_S)), daemon=True)
        self._thread.start()

    def result(self) -> Results:
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "it waits for nothing"
        return self._found[0]


def test_nothing_is_waited_for_without_a_load() -> None:
    outbox = ResultQueue()
    outbox.free({"r": "reported"})
    outbox.settle("q")
    found = Taker(outbox).result()
    assert (found.freed, found.settled) == ({"r": "reported"}, {"q"})
    assert Taker(outbox).result() == Results()


@pytest.mark.parametrize(
    "end",
    [
        lambda outbox: outbox.end("d", MOVED, "equal"),
        lambda outbox: outbox.end("d", Failure("transfer", "gone")),
    ],
    ids=["received", "failed"],
)
def test_the_end_of_a_load_ends_the_wait(end: Callable[[ResultQueue], None]) -> None:
    outbox = ResultQueue()
    outbox.expect("d")
    outbox.expect("other")
    taker = Taker(outbox)
    end(outbox)
    found = taker.result()
    assert found.received.keys() | found.failed.keys() == {"d"}
    assert found.checks.keys() == found.received.keys()


def test_a_load_that_has_ended_before_is_not_waited_for() -> None:
    outbox = ResultQueue()
    outbox.expect("d")
    outbox.end("d", MOVED)
    outbox.expect("other")
    assert set(Taker(outbox).result().received) == {"d"}


def test_all_loads_have_ended_so_nothing_is_waited_for() -> None:
    outbox = ResultQueue()
    outbox.expect("d")
    outbox.end("d", MOVED)
    outbox.take(0.0)
    assert Taker(outbox).result() == Results()


def test_patience_ends() -> None:
    outbox = ResultQueue()
    outbox.expect("d")
    outbox.free({"r": "expired"})
    assert outbox.take(0.01).freed == {"r": "expired"}
