"""Requests that share a source, release it, fail to load, or wait in a circle of engines."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("vllm")

from tests.vllm.schedulers import KEY, TOKENS, Decode, blocks, full, groups, prefill, request
from tests.work import count_bytecodes

from kvreshard.session.commands import Release, Renew, StopRenewing
from kvreshard.vllm.sources import SourceHosts

pytestmark = pytest.mark.vllm


def test_what_was_prefilled_here_is_given_back_and_goes_on_here() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    decode = Decode(full(64), engine="p", own_key=KEY)
    asked = decode.arrive(params, TOKENS)
    assert [type(order) for order in decode.watched] == [Release]
    assert (decode.side.count_loadable(asked, 256), decode.fallbacks) == (0, ["itself"])
    assert list(decode.side.allocate(asked, blocks([1, 2, 3, 4, 5]), 0)) == list(decode.side.abort("d-1")) == []
    another_life = Decode(full(64), engine="p", own_key=bytes(32))
    another_life.arrive(params, TOKENS)
    assert [type(order) for order in another_life.watched] == [Renew]


def test_an_engine_that_only_prefills_loads_nothing() -> None:
    """Blocks of an aborted request are free at once there, and a step that is under way may still write them."""
    decode = Decode(full(64), may_load=False)
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), TOKENS)
    assert [type(order) for order in decode.watched] == [Release]
    assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == (0, ["role"])


def test_a_reset_lets_go_of_what_waits_and_waits_for_what_is_loaded() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    waits, loads = Decode(full(64)), Decode(full(64))
    asked = {decode: decode.arrive(params, TOKENS) for decode in (waits, loads)}
    loads.side.count_loadable(asked[loads], 0)
    loads.load(asked[loads], blocks([1, 2, 3, 4, 5]), 299)
    assert [type(order) for order in waits.side.reset()] == [StopRenewing, Release]
    assert (waits.fallbacks, waits.side.waiting.num_loading) == (["reset"], 0)
    assert waits.side.count_loadable(asked[waits], 0) == 0
    assert list(waits.side.allocate(asked[waits], blocks([1, 2, 3, 4, 5]), 0)) == []
    assert (list(loads.side.reset()), loads.fallbacks, loads.side.waiting.num_loading) == ([], [], 1)


def test_a_failed_load_is_wanted_unless_its_request_has_ended() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    loads, aborted = Decode(full(64)), Decode(full(64))
    for decode in (loads, aborted):
        asked = decode.arrive(params, TOKENS)
        decode.side.count_loadable(asked, 0)
        decode.load(asked, blocks([1, 2, 3, 4, 5]), 299)
    list(aborted.side.abort("d-1"))
    assert [loads.side.fail("d-1"), aborted.side.fail("d-1")] == [True, False]
    assert [type(order) for order in loads.side.ended("d-1")] == [Release]
    assert not loads.side.fail("d-1")


def test_of_engines_in_a_circle_the_longest_waiting_gives_up() -> None:
    first, second = (prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]) for _ in range(2))
    decode = Decode(full(64))
    assert not decode.side.num_waiting
    asked = decode.arrive(first, TOKENS)
    assert decode.side.num_waiting
    assert [type(order) for order in decode.side.give_up_longest()] == [StopRenewing, Release]
    assert (decode.side.num_waiting, decode.side.count_loadable(asked, 0)) == (0, 0)
    assert decode.fallbacks == ["deadlock"]
    asked = decode.arrive(second, TOKENS)
    decode.side.count_loadable(asked, 0)
    decode.load(asked, blocks([1, 2, 3, 4, 5]), 299)
    assert (decode.side.num_waiting, decode.side.waiting.num_loading) == (0, 1)


def test_choices_of_one_prompt_share_its_source_and_the_last_one_gives_it_back() -> None:
    """One that comes afterwards, or a retry, is computed here: the pages are another's by then."""
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    decode = Decode(full(64))
    asked = [request(name, TOKENS, kv_transfer_params=params) for name in ("d-1", "d-2", "d-3", "d-4")]
    for one in asked[:3]:
        assert [type(order) for order in decode.side.arrive(one, params)] == [Renew]
        assert decode.side.count_loadable(one, 0) == 299
    for one in asked[:2]:
        assert decode.load(one, blocks([1, 2, 3, 4, 5]), 299).gives_back is False
    assert list(decode.side.ended("d-1")) == []
    assert [type(order) for order in decode.side.abort("d-3")] == [StopRenewing]
    assert [type(order) for order in decode.side.ended("d-2")] == [Release]
    assert list(decode.side.arrive(asked[3], params)) == []
    assert (decode.side.count_loadable(asked[3], 256), decode.fallbacks) == (0, ["spent"])


def costs(count: int) -> list[int]:
    """Bytecodes of what happens to one request, and of a look at all, while `count` others wait for loads, each of its own source."""
    decode, params = Decode(full(64)), [prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]) for _ in range(count + 3)]
    asked = [request(f"d{number}", TOKENS, kv_transfer_params=one) for number, one in enumerate(params)]
    for number in range(count + 2):
        list(decode.side.arrive(asked[number], params[number]))
    decode.side.count_loadable(asked[0], 0)
    decode.load(asked[0], blocks([1, 2, 3, 4, 5]), 299)
    acts: list[Callable[[], object]] = [
        lambda: list(decode.side.arrive(asked[-1], params[-1])),
        lambda: (decode.side.num_waiting, decode.side.waiting.num_loading),
        lambda: list(decode.side.abort("d1")),
        lambda: list(decode.side.ended("d0")),
        lambda: (decode.side.num_waiting, decode.side.waiting.num_loading),
    ]
    return [count_bytecodes(act) for act in acts]


def test_what_happens_to_one_request_costs_the_same_whatever_others_wait() -> None:
    few, many = costs(10), costs(1000)
    assert all(there <= 1.2 * here + 20 for here, there in zip(few, many, strict=True)), (few, many)


def test_a_request_that_was_turned_away_gives_back_what_nobody_else_has() -> None:
    """vLLM's server names it once more after an error: it may never have got here, or have failed and given back already."""
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    never, waits, failed = Decode(full(64)), Decode(full(64)), Decode(full(64))
    assert [type(order) for order in never.side.clean_up(params)] == [Release]
    assert list(never.side.clean_up(params)) == []
    waits.arrive(params, TOKENS)
    assert list(waits.side.clean_up(params)) == []
    asked = failed.arrive(params, TOKENS)
    failed.side.count_loadable(asked, 0)
    failed.load(asked, blocks([1, 2, 3, 4, 5]), 299)
    assert [type(order) for order in failed.side.ended("d-1")] == [Release]
    assert list(failed.side.clean_up(params)) == []
    assert list(failed.side.clean_up({**params, "remote_port": 0})) == []
    assert never.fallbacks + waits.fallbacks + failed.fallbacks == []


def test_a_request_that_was_turned_away_contacts_no_host_that_is_not_allowed() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    for hosts, expected in ((["10.0.0.0/8"], []), (["127.0.0.1"], [Release])):
        side = Decode(full(64), hosts=SourceHosts(tuple(hosts))).side
        assert [type(order) for order in side.clean_up(params)] == expected
