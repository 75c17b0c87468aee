"""What a decode engine publishes of an answer, and which of it a prefill engine loads."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.schedulers import (
    KEY,
    TOKENS,
    Decode,
    blocks,
    full,
    groups,
    picture,
    request,
    state,
    window,
)
from vllm.v1.request import RequestStatus

from kvreshard.session.commands import Acquire, Load, Publish, Release, Renew, Revoke
from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.params import read_params
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.requests import EngineConfig

pytestmark = pytest.mark.vllm
SAID = 20
TTL_S = 480.0
ASKED = {"do_remote_prefill": False, "remote_block_ids": None}


def publish(
    some: Any,
    num_tokens: int = 300,
    name: str = "d-1",
    answer_lease_s: float | None = TTL_S,
    drafts: int = 0,
    **more: Any,
) -> tuple[dict[str, Any] | None, Any]:
    """(parameters, command) of an answer whose last token has no cache yet."""
    sizes = {"tp_size": 1, "dcp_size": 1, "pp_size": 1}
    side = Producer("d", KEY, EngineConfig(some, num_draft_tokens=drafts, sizes=sizes), 30.0, 4, answer_lease_s)
    side.address = Address("127.0.0.1", 5)
    fields = {"kv_transfer_params": dict(ASKED), "num_computed_tokens": num_tokens - 1, "num_output_tokens": SAID}
    asked = request(name, TOKENS[:num_tokens], **(fields | more))
    taken = list(side.schedule(asked))
    if not taken:
        return None, None
    assert [type(command) for command in taken] == [Acquire]
    params, command = side.finish(asked, [[*range(1, 6)] for _ in some])
    return None if params is None else json.loads(json.dumps(params)), command


def turn(some: tuple[Any, ...] = (full(64),), least: int | None = 0, **config: Any) -> Decode:
    engine = Decode(*some, **config)
    engine.side._min_answer_tokens = least
    return engine


def ask(engine: Decode, params: dict[str, Any], tokens: list[int], num_computed: int = 0, **more: Any) -> int | None:
    asked = engine.arrive({**params, "do_remote_decode": True, "do_remote_prefill": False}, tokens, **more)
    if any(isinstance(command, Renew) for command in engine.watched):
        engine.meet({"d-1": KEY})
    return engine.side.count_loadable(asked, num_computed)


def test_all_but_the_last_token_is_published_for_a_time_of_its_own() -> None:
    params, command = publish(groups(full(64)))
    assert params is not None
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert read_params(params).num_tokens == 299
    assert isinstance(command, Publish)
    assert command.ttl_s == TTL_S


@pytest.mark.parametrize(
    ("changed", "num_published"),
    [
        ({}, 299),
        ({"drafts": 4}, 295),
        ({"drafts": 299}, None),
        ({"status": RequestStatus.FINISHED_ABORTED}, None),
        ({"status": RequestStatus.FINISHED_ERROR}, None),
        ({"answer_lease_s": None}, None),
        ({"kv_transfer_params": {}}, None),
        ({"name": "1_d-1"}, None),  # one of several choices
        ({"num_computed_tokens": 300, "num_in_flight_tokens": 1}, 299),  # a step under way
    ],
)
def test_what_is_published_of_an_answer(changed: dict[str, Any], num_published: int | None) -> None:
    params, command = publish(groups(full(64)), **changed)
    assert (None if params is None else read_params(params).num_tokens) == num_published
    assert command is None or isinstance(command, Publish if num_published else Revoke)


def test_a_state_that_a_step_under_way_takes_further_is_not_published() -> None:
    assert publish(groups(full(64), state(64, "none")))[0] is not None
    params, command = publish(groups(full(64), state(64, "none")), num_computed_tokens=300, num_in_flight_tokens=1)
    assert params is None
    assert isinstance(command, Revoke)


@pytest.mark.parametrize(
    ("mine", "expected"),
    [
        ([*TOKENS, 7, 8], 299),
        (TOKENS[:300], 299),
        (TOKENS[:280], 272),  # the same question again: digests of every 16 tokens
        ([*TOKENS[:100], *TOKENS[150:], 7], 96),  # thinking traces are gone
        ([9, *TOKENS], 0),
    ],
)
def test_what_agrees_is_loaded(mine: list[int], expected: int) -> None:
    params, _ = publish(groups(full(64)))
    assert params is not None
    assert ask(turn(), params, mine) == expected
    assert ask(turn(), params, mine, num_computed=64) == max(0, expected - 64)


def test_a_state_is_loaded_only_at_the_end_of_the_answer() -> None:
    params, _ = publish(groups(full(64), state(64, "none")))
    assert params is not None
    for mine, expected in (([*TOKENS, 7, 8], 299), ([*TOKENS[:298], 7, 8, 9], 0)):
        engine = turn((full(64), state(64, "none")), backoff=1)
        assert ask(engine, params, mine) == expected
        assert engine.fallbacks == ([] if expected else ["state"])


def test_a_window_is_loaded_where_its_tokens_are_still_there() -> None:
    some = groups(window(64, 100))
    side = [[0, 0, 0, 4, 5]]
    sizes = {"tp_size": 1, "dcp_size": 1, "pp_size": 1}
    made = Producer("d", KEY, EngineConfig(some, sizes=sizes), 30.0, 4, TTL_S)
    made.address = Address("127.0.0.1", 5)
    asked = request("d-1", TOKENS, kv_transfer_params=dict(ASKED), num_computed_tokens=299, num_output_tokens=SAID)
    list(made.schedule(asked))
    params, _ = made.finish(asked, side)
    assert params is not None
    for mine, expected in (([*TOKENS, 7], 299), ([*TOKENS[:250], 9, 9, 9], 0)):
        engine = turn((window(64, 100),))
        assert ask(engine, params, mine) == expected
        assert engine.fallbacks == ([] if expected else ["window"])


def test_what_a_load_left_out_of_a_page_is_not_published() -> None:
    """Loaded from token 150 on, where a window of 100 began; with drafts fewer tokens are published than were loaded."""
    some = groups(full(64), window(64, 100))
    sizes = {"tp_size": 1, "dcp_size": 1, "pp_size": 1}
    made = Producer("d", KEY, EngineConfig(some, num_draft_tokens=4, sizes=sizes), 30.0, 4, TTL_S)
    made.address = Address("127.0.0.1", 5)
    for name, begins, expected in (("d-1", 150, 150), ("d-2", 0, 128), ("d-3", 100, 128)):
        asked = request(name, TOKENS[:252], kv_transfer_params=dict(ASKED), num_computed_tokens=251)
        made.note_first(name, some[1], 200)  # without a lease it is not kept
        list(made.schedule(asked))
        if begins:
            made.note_first(name, some[1], begins)
        params, _ = made.finish(asked, [[1, 2, 3, 4], [0, 0, 3, 4]])
        assert params is not None
        assert [group.first_held for group in read_params(params).groups] == [0, expected]
        assert ask(turn((full(64), window(64, 100))), params, [*TOKENS, 7]) == (0 if expected == 150 else 247)
        made.freed(name)


def test_what_a_load_left_out_is_there_once_it_is_computed_after_all() -> None:
    """A preempted request computes all of its tokens under another lease."""
    some = groups(full(64), window(64, 100))
    sizes = {"tp_size": 1, "dcp_size": 1, "pp_size": 1}
    made = Producer("d", KEY, EngineConfig(some, num_draft_tokens=4, sizes=sizes), 30.0, 4, TTL_S)
    made.address = Address("127.0.0.1", 5)
    asked = request("d-1", TOKENS[:252], kv_transfer_params=dict(ASKED), num_computed_tokens=251)
    list(made.schedule(asked))
    made.note_first("d-1", some[1], 150)
    list(made.preempt(["d-1"]))
    list(made.schedule(asked))
    params, _ = made.finish(asked, [[1, 2, 3, 4], [0, 0, 3, 4]])
    assert params is not None
    assert [group.first_held for group in read_params(params).groups] == [0, 128]


@pytest.mark.parametrize(
    ("theirs", "mine", "expected"),
    [
        ({"mm_features": [picture("cat", 20, 64)]}, {"mm_features": [picture("cat", 20, 64)]}, 299),
        ({"mm_features": [picture("cat", 20, 64)]}, {"mm_features": [picture("cow", 20, 64)]}, 20),
        ({"mm_features": [picture("cat", 20, 64)]}, {}, 20),
        ({}, {"mm_features": [picture("cow", 30, 64)]}, 30),
        ({}, {"mm_features": [picture("cow", 299, 1)]}, 299),  # of the new turn
        ({"cache_salt": "a"}, {"cache_salt": "a"}, 299),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, 0),
        ({"cache_salt": "a"}, {}, 0),
        ({}, {"cache_salt": "b"}, 0),
    ],
)
def test_nothing_of_other_pictures_or_another_salt_is_loaded(
    theirs: dict[str, Any], mine: dict[str, Any], expected: int
) -> None:
    """A prefill engine has all of its prompt: it never needs an item of the answer, and is never refused."""
    params, _ = publish(groups(full(64)), **theirs)
    assert params is not None
    engine = turn()
    assert ask(engine, params, [*TOKENS, 7], **mine) == expected
    assert not engine.side.missing_items.why_refused(SimpleNamespace(request_id="d-1"), 0, 0)  # type: ignore[arg-type]


def test_few_tokens_are_not_worth_a_load_and_the_answer_is_given_back() -> None:
    params, _ = publish(groups(full(64)))
    assert params is not None
    engine = turn(least=64)
    assert ask(engine, params, [*TOKENS, 7], num_computed=235) == 64
    engine = turn(least=64)
    asked = engine.arrive({**params, "do_remote_decode": True}, [*TOKENS, 7])
    engine.meet({"d-1": KEY})
    assert engine.side.count_loadable(asked, 256) == 0
    commands = list(engine.side.allocate(asked, blocks([1, 2, 3, 4, 5]), 0))
    assert any(isinstance(command, Release) for command in commands)
    assert not engine.fallbacks
    assert not engine.not_loaded


def test_forged_parameters_of_an_answer_are_not_read() -> None:
    """What is loaded is what was sealed: another request's blocks fail the load, as they do for prefills."""
    params, _ = publish(groups(full(64)))
    assert params is not None
    read = read_params(params)
    assert read.is_sealed(KEY)
    forged = {**params, "remote_num_tokens": 200}
    engine = turn()
    asked = engine.arrive({**forged, "do_remote_decode": True}, [*TOKENS, 7])
    engine.meet({"d-1": KEY})
    count = engine.side.count_loadable(asked, 0)
    (load,) = engine.side.allocate(asked, blocks([1, 2, 3, 4, 5]), count or 0)
    assert isinstance(load, Load)
    assert not read_params(forged).is_sealed(KEY)


def test_parameters_of_another_connector_are_computed_with_the_pictures_that_are_here() -> None:
    engine = turn(placeholders=frozenset({5}))
    asked = engine.arrive({"do_remote_decode": True, "remote_block_ids": [[1, 2]]}, TOKENS)
    assert engine.fallbacks == ["params"]
    assert engine.side.count_loadable(asked, 0) == 0
    assert not engine.side.missing_items.is_hopeless("d-1")
