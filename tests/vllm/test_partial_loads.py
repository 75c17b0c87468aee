"""Loads of fewer tokens than were prefilled are counted with their cause, and no others."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.schedulers import KEY, TOKENS, Decode, blocks, full, groups, picture, prefill, state, window

pytestmark = pytest.mark.vllm

Noted = list[tuple[str, int]]


def noting(*specs: Any, **options: Any) -> tuple[Decode, Noted]:
    decode = Decode(*specs, **options)
    return decode, decode.not_loaded


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        (TOKENS, []),
        ([*TOKENS, 7], []),
        ([*TOKENS[:299], 7], [("prompt", 12)]),  # digests of every 16 tokens
        ([*TOKENS[:50], *[9] * 250], [("prompt", 252)]),
        ([9] * 300, [("prompt", 300)]),
        (TOKENS[:200], [("length", 108)]),
        ([*TOKENS[:50], *[9] * 20], [("prompt", 252)]),
    ],
)
def test_a_prompt_that_differs(mine: list[int], expected: Noted) -> None:
    decode, noted = noting(full(64))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), mine)
    for _ in range(2):  # vLLM asks each step
        decode.side.count_loadable(asked, 0)
    assert noted == expected


@pytest.mark.parametrize(
    ("theirs", "mine", "expected"),
    [
        ([picture("cat", 20, 64)], [picture("cow", 20, 64)], []),  # what the prefill has of its picture is loaded
        ([picture("cat", 20, 64)], [], []),
        ([], [picture("cow", 20, 64)], [("prompt", 280)]),
    ],
)
def test_a_picture_that_differs(theirs: list[Any], mine: list[Any], expected: Noted) -> None:
    decode, noted = noting(full(64))
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]], mm_features=theirs)
    decode.side.count_loadable(decode.arrive(params, TOKENS, mm_features=mine), 0)
    assert noted == expected


@pytest.mark.parametrize(
    ("num_computed", "num_external", "is_skipping", "expected"),
    [
        (0, 299, False, []),
        (256, 43, False, []),
        (320, 0, False, []),
        (256, 0, False, []),  # a hit that ends inside of the next block
        (0, 256, False, [("vllm", 44)]),
        (128, 0, False, [("vllm", 172)]),
        (0, 0, True, [("logprobs", 300)]),
    ],
)
def test_vllm_may_take_less_than_there_is(
    num_computed: int, num_external: int, is_skipping: bool, expected: Noted
) -> None:
    decode, noted = noting(full(64))
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    asked = decode.arrive(params, TOKENS, get_skip_reading_prefix_cache=lambda: is_skipping)
    decode.side.count_loadable(asked, num_computed)
    list(decode.side.allocate(asked, blocks([1, 2, 3, 4, 5], cached=num_computed // 64), num_external))
    assert noted == expected


def test_what_falls_back() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    itself, itself_noted = noting(full(64), engine="p", own_key=KEY)
    itself.arrive(params, TOKENS)
    role, role_noted = noting(full(64), may_load=False)
    role.arrive(params, TOKENS)
    spent, spent_noted = noting(full(64))
    spent.arrive(params, TOKENS)
    assert list(spent.side.abort("d-1"))
    spent.arrive(params, TOKENS)
    given_up, given_up_noted = noting(full(64))
    for give_up in (given_up.side.reset, given_up.side.give_up_longest, lambda: given_up.side.give_up("d-1", "pool")):
        given_up.side.known._released.clear()
        given_up.arrive(params, TOKENS)
        list(give_up())
    assert (itself_noted, role_noted, spent_noted) == ([("itself", 300)], [("role", 300)], [("spent", 300)])
    assert given_up_noted == [("reset", 300), ("deadlock", 300), ("pool", 300)]


def test_what_the_source_does_not_have_or_is_beyond() -> None:
    wide, wide_noted = noting(full(32), window(32))
    params = prefill(groups(full(32), window(32)), TOKENS, [list(range(1, 11)), [0] * 6 + [21, 22, 23, 24]])
    wide.side.count_loadable(wide.arrive(params, TOKENS[:250]), 0)
    some = (full(64), state(512, "none"))
    beyond, beyond_noted = noting(*some, backoff=1)
    params = prefill(groups(*some), TOKENS, [[1, 2, 3, 4, 5], [6]], backoff=1)
    beyond.side.count_loadable(beyond.arrive(params, TOKENS[:298]), 0)
    assert (wide_noted, beyond_noted) == ([("window", 300)], [("state", 299)])


def test_a_load_that_fails() -> None:
    decode, noted = noting(full(64))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), TOKENS)
    decode.side.count_loadable(asked, 0)
    decode.load(asked, blocks([1, 2, 3, 4, 5]), 299)
    assert decode.side.fail("d-1")
    assert noted == [("failure", 300)]


def test_each_is_counted_and_the_first_of_each_cause_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    decode, noted = noting(full(64))
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    with caplog.at_level(logging.INFO, logger="kvreshard"):
        for num_same in (50, 0, 40):
            asked = decode.arrive(params, [*TOKENS[:num_same], *[9] * (300 - num_same)])
            decode.side.count_loadable(asked, 0)
        decode.side._config = replace(decode.side._config, may_load=False)
        decode.arrive(params, TOKENS)
    assert noted == [("prompt", 252), ("prompt", 300), ("prompt", 268), ("role", 300)]
    lines = [record for record in caplog.records if "that were prefilled" in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING", "INFO", "INFO"]
    (computed,) = [record for record in caplog.records if "is computed here" in record.getMessage()]
    assert (computed.levelname, computed.cause) == ("WARNING", "role")  # type: ignore[attr-defined]
    assert lines[1].getMessage() == (
        "request d-1: 0 of the 300 tokens that were prefilled are loaded (prompt): the prompts agree on 0 of 300 tokens"
    )
    assert "48 of the 300 tokens" in lines[0].getMessage()
    assert "logged at INFO" in lines[0].getMessage()
