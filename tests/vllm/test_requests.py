"""The life of a request in the scheduler: its commands, and what must not be loaded."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm.schedulers import (
    FULL,
    TOKENS,
    Decode,
    blocks,
    full,
    groups,
    prefill,
    producer,
    request,
    ring,
    state,
    window,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs
from vllm.v1.request import RequestStatus

from kvreshard.session.commands import Acquire, Cancel, Publish, Release, Renew, Revoke, StopRenewing
from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.requests import needs_whole_prompts

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("spec", "ids", "num_tokens", "expected"),
    [
        (full(16), [3, 4, 5], 40, (0, (3, 4, 5))),
        (window(16), [0, 0, 7, 8], 60, (2, (7, 8))),
        (window(16), [0, 0], 60, (2, ())),
        (state(512, "none"), [9], 60, (0, (9,))),
        (state(512, "none", 2), [9, 10, 11], 60, (0, (9,))),
        (state(32, "align", 2), [0, 7, 10, 11], 60, (0, (7,))),
        (state(32, "align"), [5, 7], 64, (0, (7,))),
        (state(32, "align"), [5, 7, 8], 65, (0, (8,))),
        (state(32, "align"), [5, 0, 8], 64, (0, ())),
        (ring(8), [4], 60, (0, (4,))),
    ],
)
def test_what_a_block_list_means(spec: Any, ids: list[int], num_tokens: int, expected: tuple[Any, ...]) -> None:
    assert groups(spec)[0].pages(ids, num_tokens) == expected


def test_a_prefill_is_loaded_where_it_was_put() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    decode = Decode(full(128))
    asked = decode.arrive(params, TOKENS)
    assert [type(order) for order in decode.watched] == [Renew]
    assert decode.side.count_loadable(asked, 0) == 299
    order = decode.load(asked, blocks([7, 8, 9]), 299)
    assert order.transfer.src_tables["g0"].pages.tolist() == [1, 2, 3, 4, 5]
    assert order.transfer.dst_tables["g0"].pages.tolist() == [7, 8, 9]
    assert order.transfer.intervals == {"g0": [(0, 299)]}
    assert order.transfer.dst_new_pages["g0"].tolist() == [7, 8, 9]
    assert (order.remote.address, order.lease.request) == (Address("127.0.0.1", 5), "p-1")


def test_a_local_prefix_hit_is_not_loaded_again() -> None:
    decode = Decode(full(128))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), TOKENS)
    assert decode.side.count_loadable(asked, 128) == 171
    order = decode.load(asked, blocks([7, 8, 9], cached=1), 171)
    assert order.transfer.intervals == {"g0": [(128, 299)]}
    assert order.transfer.dst_new_pages["g0"].tolist() == [8, 9]


def test_a_prefill_may_finish_with_the_step_of_its_last_token() -> None:
    side, asked = producer(groups(full(64))), request("p-1", TOKENS, num_computed_tokens=0)
    assert not side.may_finish({"p-1": len(TOKENS)})  # nobody wants it
    list(side.schedule(asked))
    assert [side.may_finish({"p-1": count}) for count in (len(TOKENS) - 1, len(TOKENS))] == [False, True]
    assert not side.may_finish({"p-2": len(TOKENS)})
    asked.num_computed_tokens = len(TOKENS) - 1
    assert side.may_finish({"p-2": 5, "p-1": 1})
    side.finish(asked, [[1, 2, 3, 4, 5]])
    assert not side.may_finish({"p-1": 1})


def test_a_full_hit_releases_the_source() -> None:
    decode = Decode(full(128))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), TOKENS)
    assert decode.side.count_loadable(asked, 384) == 0
    assert [type(order) for order in decode.side.allocate(asked, blocks([7, 8, 9], cached=3), 0)] == [
        StopRenewing,
        Release,
    ]
    assert list(decode.side.abort("d-1")) == []


@pytest.mark.parametrize(
    ("mine", "expected"), [(TOKENS[:-1], 288), ([*TOKENS, 7], 300), ([9] * 300, 0), ([*TOKENS[:50], *[9] * 250], 48)]
)
def test_only_the_same_text_is_loaded(mine: list[int], expected: int) -> None:
    decode = Decode(full(128))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), mine)
    assert decode.side.count_loadable(asked, 0) == expected
    assert decode.fallbacks == ([] if expected else ["prompt"])


@pytest.mark.parametrize(
    ("mine", "expected"), [(TOKENS, 299), (TOKENS[:-1], 0), ([*TOKENS, 7], 0), ([*TOKENS[:50], *[9] * 250], 0)]
)
def test_where_tokens_look_ahead_only_the_same_prompt_is_loaded(mine: list[int], expected: int) -> None:
    decode = Decode(full(128), whole_prompts=True)
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), mine)
    assert decode.side.count_loadable(asked, 0) == expected
    assert decode.fallbacks == ([] if expected else ["prompt"])


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("expected", [False, True])
def test_which_models_look_ahead(expected: bool, is_wrapped: bool) -> None:
    """The attention of HRM-Text looks ahead whatever `prefix_lm` says in the model's configuration."""
    layer = FullAttentionSpec(block_size=16, non_causal=expected, **FULL)
    spec: Any = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"layer": layer}) if is_wrapped else layer
    assert needs_whole_prompts(KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)])) == expected


def test_a_window_is_loaded_from_its_first_page_and_its_torn_page_is_named() -> None:
    """300 tokens, window 100: the source keeps pages of 32 from token 192 on, this engine pages of 128 from token 128 on."""
    params = prefill(groups(full(32), window(32)), TOKENS, [list(range(1, 11)), [0] * 6 + [21, 22, 23, 24]])
    decode = Decode(full(128), window(128))
    asked = decode.arrive(params, TOKENS)
    assert decode.side.count_loadable(asked, 0) == 299
    held = blocks([1, 2, 3], [0, 5, 6])
    order = decode.load(asked, held, 299)
    assert order.transfer.intervals == {"g0": [(0, 299)], "g1": [(192, 299)]}
    assert order.transfer.dst_tables["g1"].first_page == 1
    assert [(group.name, token) for group, token in decode.side.first_loaded("d-1", held)] == [("g1", 192)]


@pytest.mark.parametrize(
    ("page", "has_siblings", "is_isolated"), [(128, True, True), (128, False, False), (64, True, False)]
)
def test_an_incomplete_block_is_nobody_elses_where_other_connectors_store_blocks(
    page: int, has_siblings: bool, is_isolated: bool
) -> None:
    """They store each block of a request by its hash. The source's window begins inside of a page of 128 tokens."""
    decode = Decode(full(page), window(page))
    decode.side.loadable.has_siblings = has_siblings
    params = prefill(groups(full(64), window(64)), TOKENS, [[1, 2, 3, 4, 5], [0, 0, 0, 6, 7]])
    asked = decode.arrive(params, TOKENS)
    assert decode.side.count_loadable(asked, 0) == 299
    assert (asked.cache_salt is not None) == is_isolated


def test_two_windows_are_clipped_each_by_its_own() -> None:
    """The narrow window's first page says nothing about the wide one's."""
    wide = window(32, 250)
    params = prefill(
        groups(window(32), wide), TOKENS, [[0] * 6 + [21, 22, 23, 24], [0, 31, 32, 33, 34, 35, 36, 37, 38, 39]]
    )
    decode = Decode(window(32), wide)
    asked = decode.arrive(params, TOKENS)
    assert decode.side.count_loadable(asked, 0) == 299
    order = decode.load(asked, blocks([0] * 6 + [1, 2, 3, 4], [0, 11, 12, 13, 14, 15, 16, 17, 18, 19]), 299)
    assert order.transfer.intervals == {"g0": [(192, 299)], "g1": [(32, 299)]}


def test_a_prefill_that_ran_too_far_for_a_window_is_not_used() -> None:
    params = prefill(groups(full(32), window(32)), TOKENS, [list(range(1, 11)), [0] * 6 + [21, 22, 23, 24]])
    decode = Decode(full(32), window(32))
    asked = decode.arrive(params, TOKENS[:250])
    assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == (0, ["window"])


def test_an_engine_that_keeps_all_does_not_load_from_one_that_keeps_a_window() -> None:
    params = prefill(groups(full(32), window(32)), TOKENS, [list(range(1, 11)), [0] * 6 + [21, 22, 23, 24]])
    decode = Decode(full(32))
    assert (decode.side.count_loadable(decode.arrive(params, TOKENS), 0), decode.fallbacks) == (0, ["window"])


@pytest.mark.parametrize(("mine", "expected"), [(300, 299), (301, 299), (299, 0), (298, 0), (1000, 299)])
def test_a_state_is_loaded_at_its_position_or_not_at_all(mine: int, expected: int) -> None:
    """The prefill side drops the last token; the decode side must have at least one more than the state has seen."""
    some = (full(64), state(512, "none"))
    params = prefill(groups(*some), TOKENS, [[1, 2, 3, 4, 5], [6]], backoff=1)
    decode = Decode(*some, backoff=1)
    asked = decode.arrive(params, list(range(mine)))
    assert decode.side.count_loadable(asked, 0) == expected
    if not expected:
        assert decode.fallbacks == ["state"]
        return
    order = decode.load(asked, blocks([1, 2, 3, 4, 5], [9]), expected)
    assert order.transfer.intervals == {"g0": [(0, 299)], "g1": [(0, 299)]}
    assert order.transfer.src_tables["g1"].pages.tolist() == [6]


def test_a_state_of_another_text_is_not_loaded() -> None:
    some = (full(64), state(512, "none"))
    decode = Decode(*some, backoff=1)
    asked = decode.arrive(prefill(groups(*some), TOKENS, [[1, 2, 3, 4, 5], [6]], backoff=1), [9, *TOKENS[1:], 9])
    assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == (0, ["state"])


def test_one_token_and_a_state_is_computed_here() -> None:
    some = (full(64), state(512, "none"))
    decode = Decode(*some, backoff=1)
    asked = decode.arrive(prefill(groups(*some), [5], [[1], [6]], backoff=1), [5])
    assert decode.side.count_loadable(asked, 0) == 0


def test_a_prompt_with_embeddings_keeps_as_many_tokens_as_embeddings() -> None:
    """vLLM's workers end when a request has not; the decode side computes such a prompt."""
    some, given = (
        (full(64), state(512, "none")),
        {"prompt_embeds": torch.ones(300, 4), "prompt_is_token_ids": [False] * 300},
    )
    params = prefill(groups(*some), TOKENS, [[1, 2, 3, 4, 5], [6]], backoff=1, **given)
    assert params["remote_num_tokens"] == 300
    decode = Decode(*some, backoff=1)
    asked = decode.arrive(params, TOKENS, **given)
    assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == (0, ["state"])


def test_parameters_of_another_connector_are_a_fallback() -> None:
    decode = Decode(full(64))
    asked = decode.arrive({"do_remote_prefill": True, "remote_engine_id": "x"}, TOKENS)
    assert (decode.watched, decode.side.count_loadable(asked, 0), decode.fallbacks) == ([], 0, ["params"])
    assert list(decode.side.allocate(asked, blocks([1]), 0)) == []


def test_an_abort_before_blocks_releases_and_after_cancels() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    early, late = Decode(full(64)), Decode(full(64))
    early.arrive(params, TOKENS)
    assert [type(order) for order in early.side.abort("d-1")] == [StopRenewing, Release]
    asked = late.arrive(params, TOKENS)
    late.side.count_loadable(asked, 0)
    late.load(asked, blocks([1, 2, 3, 4, 5]), 299)
    assert [type(order) for order in late.side.abort("d-1")] == [Cancel]
    assert [type(order) for order in late.side.ended("d-1")] == [Release]
    assert list(late.side.abort("d-1")) == []


def test_the_prefill_side_drops_its_last_tokens_once() -> None:
    side, asked = producer(groups(full(64)), backoff=2), request("p-1", TOKENS)
    for _ in range(2):
        side.arrive(asked)
    assert (len(asked.prompt_token_ids), len(asked._all_token_ids), asked.num_prompt_tokens) == (298, 298, 298)
    short = request("p-2", [1, 2])
    side.arrive(short)
    assert short.num_prompt_tokens == 2
    session = request("p-3", TOKENS, resumable=True)  # the next part of its prompt is put behind these tokens
    side.arrive(session)
    assert len(session._all_token_ids) == session.num_prompt_tokens == 300


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_end_well_offers_nothing(status: RequestStatus) -> None:
    side, asked = producer(groups(full(64))), request("p-1", TOKENS, status=status)
    list(side.schedule(asked))
    params, order = side.finish(asked, [[1, 2, 3, 4, 5]])
    assert (params, type(order)) == (None, Revoke)
    assert side.finish(asked, [[1]]) == (None, None)


def test_a_reset_takes_back_what_is_offered_and_nothing_else() -> None:
    side = producer(groups(full(64)))
    held, freed, running = (request(f"p-{number}", TOKENS) for number in range(3))
    taken, *_ = (found for asked in (held, freed, running) for found in side.schedule(asked))
    for asked in (held, freed):
        side.finish(asked, [[1, 2, 3, 4, 5]])
    side.freed("p-1")
    assert list(side.reset()) == [Revoke(taken.lease)]
    assert list(side.reset()) == []
    assert len(side.leases)  # its slot is free when every rank has ended the lease
    side.freed("p-0")
    assert isinstance(side.finish(running, [[1, 2, 3, 4, 5]])[1], Publish)


def test_without_a_slot_nothing_is_offered_and_a_preempted_request_keeps_its_own() -> None:
    side = producer(groups(full(64)), slots=1)
    first, second = request("p-1", TOKENS), request("p-2", TOKENS)
    assert [type(order) for order in side.schedule(first)] == [Acquire]
    assert list(side.schedule(first)) == []
    assert list(side.schedule(second)) == []
    assert side.finish(second, [[1]]) == (None, None)
    side.freed("p-1")
    assert [type(order) for order in side.schedule(second)] == [Acquire]


def finished(side: Producer, asked: Any) -> Any:
    """What the router gets for a prompt that has been computed."""
    side.arrive(asked)
    list(side.schedule(asked))
    return side.finish(asked, [[1, 2, 3, 4, 5, 6]] * len(side._config.groups))


@pytest.mark.parametrize(
    ("num_computed", "num_in_flight", "num_said", "expected"), [(300, 0, 1, 300), (304, 1, 4, 303), (307, 2, 4, 304)]
)
def test_only_what_has_been_written_and_said_is_offered(
    num_computed: int, num_in_flight: int, num_said: int, expected: int
) -> None:
    """A step begun before the end was known is still being written; drafts behind the end were never said."""
    text = [*TOKENS, *range(900, 900 + num_said)]
    asked = request(
        "p-1", text, num_prompt_tokens=300, num_computed_tokens=num_computed, num_in_flight_tokens=num_in_flight
    )
    params, order = finished(producer(groups(full(64))), asked)
    assert (params["remote_num_tokens"], type(order)) == (expected, Publish)
    decode = Decode(full(64))
    assert decode.side.count_loadable(decode.arrive(params, [*text, 7]), 0) == expected


@pytest.mark.parametrize(
    ("num_drafts", "num_said", "is_offered"), [(0, 3, True), (2, 1, True), (2, 2, False), (2, 3, False)]
)
@pytest.mark.parametrize("mode", ["none", "align"])
def test_a_state_among_its_drafts_is_not_offered(mode: str, num_drafts: int, num_said: int, is_offered: bool) -> None:
    """A verified step leaves it in the block of the last draft that was right (vLLM 0.32, `GDNAttentionMetadata`)."""
    num_tokens = 299 + num_said
    asked = request(
        "p-1",
        list(range(num_tokens)),
        num_prompt_tokens=300,
        num_computed_tokens=num_tokens,
        num_output_tokens=num_said,
    )
    side = producer(groups(full(64), state(64, mode, num_drafts)))
    list(side.schedule(asked))
    params, order = side.finish(asked, [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7, 8]])
    assert (params is not None) == is_offered
    assert isinstance(order, Publish if is_offered else Revoke)


@pytest.mark.parametrize(("num_in_flight", "is_offered"), [(0, True), (1, False)])
@pytest.mark.parametrize("in_place", [state(512, "none"), ring(8)])
def test_what_is_written_in_place_and_still_going_on_is_not_offered(
    in_place: Any, num_in_flight: int, is_offered: bool
) -> None:
    asked = request("p-1", TOKENS, num_computed_tokens=300, num_in_flight_tokens=num_in_flight)
    params, order = finished(producer(groups(full(64), in_place)), asked)
    assert (params is not None, type(order)) == (is_offered, Publish if is_offered else Revoke)
