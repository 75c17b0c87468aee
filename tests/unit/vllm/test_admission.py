"""The order of admission after failed loads, loads that never fit, and engines that wait in a circle."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvreshard.vllm.admission import Admission, DeadlockDetector, WantedBlocks


def test_a_failed_request_is_put_behind_once() -> None:
    failed = Admission()
    failed.fail("f")
    assert [failed.puts_behind("f", 0), failed.puts_behind("f", 0), failed.puts_behind("other", 0)] == [
        True,
        False,
        False,
    ]


def test_loads_that_got_no_blocks_are_put_behind_in_the_next_step_only() -> None:
    failed = Admission()
    failed.fail("f")
    assert failed.puts_behind("f", 0)
    failed.step(is_pool_free=False)
    assert not failed.puts_behind("load", 100)  # it does not fit: nobody behind it is looked at
    failed.step(is_pool_free=False)
    assert [failed.puts_behind("load", 100), failed.puts_behind("another", 5), failed.puts_behind("f", 0)] == [
        True,
        True,
        False,
    ]
    failed.step(is_pool_free=False)
    assert not failed.puts_behind("load", 100)


def test_a_load_that_fits_is_never_put_behind() -> None:
    failed = Admission()
    failed.fail("f")
    failed.puts_behind("f", 0)
    for load in ("one", "two"):
        failed.step(is_pool_free=False)
        assert not failed.puts_behind(load, 100)
        failed.got_blocks(load)


def test_nobody_is_put_behind_when_no_failed_request_waits_for_blocks() -> None:
    for forget in (Admission.got_blocks, Admission.end):
        failed = Admission()
        failed.fail("f")
        failed.puts_behind("f", 0)
        failed.puts_behind("load", 100)
        forget(failed, "f")
        failed.step(is_pool_free=False)
        assert not failed.puts_behind("load", 100)
        assert not failed._failed
        assert not failed._behind


def test_one_that_ends_before_vllm_asks_for_it_is_forgotten() -> None:
    failed = Admission()
    failed.fail("f")
    failed.end("f")
    assert not failed.puts_behind("f", 0)


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([("a", True)] * 4, [None, None, "a", None]),
        ([("a", True), ("a", False), ("a", True), ("a", True)], [None] * 4),  # somebody held blocks meanwhile
        ([("a", True), ("b", True), ("b", True), ("b", True)], [None, None, None, "b"]),
        ([("a", True), (None, True), ("a", True), ("a", True)], [None] * 4),
    ],
)
def test_a_load_is_named_that_gets_no_blocks_although_all_are_free(
    steps: list[tuple[str | None, bool]], expected: list[str | None]
) -> None:
    now_s = 100.0
    admission, named = Admission(lambda: now_s), []
    for asked, is_pool_free in steps:
        if asked is not None:
            admission.puts_behind(asked, 10)
        named.append(admission.step(is_pool_free=is_pool_free))
        now_s += 0.5
    assert named == expected


def test_an_engine_that_looks_at_nobody_is_paused() -> None:
    admission = Admission()
    assert not admission.is_looking
    for num_external in (0, 10):
        admission.puts_behind("a", num_external)
        assert admission.is_looking
        admission.step(is_pool_free=False)
        assert not admission.is_looking


def test_one_gives_up_after_every_while_without_a_sign_of_life() -> None:
    now_s = 100.0
    deadlock = DeadlockDetector(30.0, lambda: now_s)
    said = []
    for second, is_still in enumerate([False, *[True] * 65, False, *[True] * 29, False, *[True] * 31]):
        now_s = 100.0 + second
        if deadlock.step(is_still):
            said.append(second)
    assert said == [31, 61, 127]


WANTED = WantedBlocks(2, 1)
NOTHING = WantedBlocks(0, 0)


def test_a_load_leaves_free_what_those_before_it_may_want() -> None:
    admission = Admission()
    assert admission.has_room(0, 10, WANTED)  # nobody is before it: vLLM says whether it fits
    admission.got_blocks("a", WANTED)
    assert not admission.has_room(11, 10, NOTHING)
    assert admission.has_room(12, 10, NOTHING)
    assert not admission.has_room(12, 10, WantedBlocks(1, 0))
    assert admission.puts_behind("b", 10, has_room=False)
    assert admission.puts_behind("c", 1)  # it would overtake b, again and again
    assert not admission.puts_behind("d", 0, has_room=False)  # nothing is loaded
    admission.step(is_pool_free=False)
    assert not admission.puts_behind("c", 1)


def test_vllm_decides_where_it_has_counted_all_that_is_wanted() -> None:
    admission = Admission()
    admission.got_blocks("a", WantedBlocks(2, 0))
    assert admission.has_room(0, 10, WantedBlocks(3, 0))
    assert not admission.has_room(14, 10, WantedBlocks(3, 1))
    assert admission.has_room(15, 10, WantedBlocks(3, 1))


@pytest.mark.parametrize("way", ["computed", "ended", "failed"])
def test_nothing_is_left_free_for_those_that_have_what_they_want(way: str) -> None:
    admission = Admission()
    admission.got_blocks("a", WANTED)
    if way == "computed":
        admission.compute(["a", "x"])
    elif way == "ended":
        admission.end("a")
    else:
        admission.fail("a")
    assert admission.has_room(0, 10, WANTED)


def test_an_engine_that_computes_the_same_tokens_again_stands_still() -> None:
    """Its request gets no more blocks, is preempted and begins anew: a load that waits elsewhere holds the blocks, and this goes on for ever."""
    admission, request = Admission(), SimpleNamespace(num_computed_tokens=0)
    requests: dict[str, Any] = {"r": request}
    assert not admission.is_still({"r": 64}, requests, ())
    request.num_computed_tokens = 64
    assert not admission.is_still({"r": 16}, requests, ())
    for _ in range(3):
        request.num_computed_tokens = 0
        assert admission.is_still({}, requests, ["r"])
        assert admission.is_still({"r": 64}, requests, ())
        request.num_computed_tokens = 64
        assert admission.is_still({"r": 16}, requests, ())
    request.num_computed_tokens = 80
    assert not admission.is_still({"r": 1}, requests, ())
    assert not admission.is_still({}, requests, ())  # paused
    assert not admission.is_still({}, {}, ())
    request.num_computed_tokens = 0
    assert not admission.is_still({"r": 64}, requests, ())  # another one with its id
