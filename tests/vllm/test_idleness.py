"""A rank waits for its loads only while its engine computes nothing."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvreshard.session.commands import Cancel
from kvreshard.vllm.admission import Admission, DeadlockDetector, WantedBlocks
from kvreshard.vllm.following import Following
from kvreshard.vllm.idle import Idle
from kvreshard.vllm.scheduler import DelayedLoads, SchedulerSide
from kvreshard.vllm.step_metadata import ReshardMetadata
from kvreshard.vllm.waiting import WaitingRequests

pytestmark = pytest.mark.vllm


def scheduler(*, may_be_idle: bool = True) -> Any:
    """The parts of a scheduler side that a step without commands uses."""
    side: Any = SchedulerSide.__new__(SchedulerSide)
    side._metadata, side._computing, side._may_be_idle, side._has_draft = ReshardMetadata(), set(), may_be_idle, False
    side._admission, side._deadlock, side._manager = Admission(), DeadlockDetector(30.0), None
    side._stalled, side._lacks_blocks = DeadlockDetector(30.0), False
    side._alive = set()
    side._quarantine, side._unserved, side._delayed = SimpleNamespace(num_blocks=0), None, DelayedLoads(0)
    nothing: list[Any] = []
    early = SimpleNamespace(step=lambda scheduled, manager: nothing)
    last_pages = SimpleNamespace(hold=lambda: None)
    side._producer = SimpleNamespace(
        leases=(), last_pages=last_pages, early=early, preempt=lambda requests, scheduled: nothing
    )
    following = Following("d", None, 30.0)
    waiting = WaitingRequests((), following)
    side._consumer = SimpleNamespace(waiting=waiting, following=following, on_answers=lambda: nothing, num_waiting=0)
    side._idle, side._handshake = Idle(), SimpleNamespace(show_changes=lambda: None)
    return side


def is_idle(side: Any, scheduled: list[str], finished: list[str]) -> bool:
    metadata: ReshardMetadata = side.take_metadata(dict.fromkeys(scheduled, 1), finished)
    return metadata.patience_s > 0


def test_an_engine_is_idle_until_a_request_is_scheduled_and_again_once_it_has_finished() -> None:
    side = scheduler()
    assert is_idle(side, [], [])
    assert not is_idle(side, ["a", "b"], [])
    assert not is_idle(side, ["b"], ["a"])
    assert is_idle(side, [], ["b"])


def test_ranks_wait_for_a_load_in_the_step_that_orders_it() -> None:
    side = scheduler()
    side._metadata.commands.append(Cancel("r"))
    assert is_idle(side, [], [])
    side._metadata.commands.append(Cancel("r"))
    assert not is_idle(side, ["a"], [])


def test_a_step_without_tokens_is_not_idle_while_another_is_under_way() -> None:
    side = scheduler()
    is_idle(side, ["a"], [])
    assert not is_idle(side, [], [])


def test_an_id_that_comes_back_counts_anew() -> None:
    side = scheduler()
    is_idle(side, ["a"], [])
    assert not is_idle(side, ["a"], ["a"])


def test_engines_that_step_together_never_wait() -> None:
    assert not is_idle(scheduler(may_be_idle=False), [], [])


def test_a_load_that_is_put_off_for_want_of_room_lacks_blocks() -> None:
    """Those before it may be early loads whose prefills wait for what this one would give back."""
    side = scheduler()
    side._consumer.count_loadable = lambda request, num_computed: 10
    side._has_room = lambda request, num_loaded: False
    asked: Any = SimpleNamespace(request_id="r")
    assert side.count_loadable(asked, 0) is None
    assert side._lacks_blocks


def test_a_request_that_is_preempted_lacks_blocks() -> None:
    side = scheduler()
    side.take_metadata({"r": 1}, [])
    assert not side._lacks_blocks
    side.take_metadata({}, [], ["r"])
    assert side._lacks_blocks


def test_a_request_that_is_computed_has_what_it_wants() -> None:
    side = scheduler()
    side._admission.got_blocks("r", WantedBlocks(2, 2))
    assert not side._admission.has_room(10, 10, WantedBlocks(0, 0))
    side.take_metadata({"r": 1}, [])
    assert side._admission.has_room(10, 10, WantedBlocks(0, 0))
