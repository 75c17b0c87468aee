"""Does a request's life in the scheduler become the right orders, and is nothing loaded that must not be?

The prefill side's answer goes through JSON to the decode side, with vLLM's own block classes and specifications and requests
that have only what is looked at.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import RequestStatus

from kvreshard.session.handshake import Address
from kvreshard.session.orders import Cancel, Grant, Load, Offer, Release, Revoke, Unwatch, Watch
from kvreshard.vllm.consumer import Consumer
from kvreshard.vllm.groups import CacheGroup, read_groups
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.requests import needs_whole_prompts

FULL = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
WINDOW = 100


def full(block: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **FULL)


def window(block: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=WINDOW, **FULL)


def state(block: int, mode: str, speculative: int = 0) -> MambaSpec:
    return MambaSpec(
        block_size=block,
        shapes=((4, 3),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        num_speculative_blocks=speculative,
    )


def ring(capacity: int) -> CircularBufferSpec:
    return CircularBufferSpec(block_size=capacity, num_kv_heads=1, head_size=6, head_size_v=0, dtype=torch.float32)


def groups(*specs: Any) -> tuple[CacheGroup, ...]:
    config = KVCacheConfig(100, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])
    return read_groups(config, 1)


def request(name: str, tokens: list[int], **more: Any) -> Any:
    fields = {
        "request_id": name,
        "prompt_token_ids": list(tokens),
        "_all_token_ids": list(tokens),
        "all_token_ids": list(tokens),
        "num_prompt_tokens": len(tokens),
        "num_computed_tokens": len(tokens),
        "num_in_flight_tokens": 0,
        "mm_features": [],
        "lora_request": None,
        "prompt_embeds": None,
        "max_tokens": 1,
        "num_output_tokens": 1,
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
        "kv_transfer_params": {"do_remote_decode": True},
        "get_skip_reading_prefix_cache": lambda: False,
        **more,
    }
    return SimpleNamespace(**fields)


def producer(some: tuple[CacheGroup, ...], backoff: int = 0, slots: int = 4) -> Producer:
    made = Producer("p", "life", some, {"tp_size": 1, "dcp_size": 1, "pp_size": 1}, backoff, 30.0, slots)
    made.address = Address("127.0.0.1", 5)
    return made


def prefill(
    some: tuple[CacheGroup, ...], tokens: list[int], block_ids: list[list[int]], backoff: int = 0
) -> dict[str, Any]:
    """What the router gets for a prompt."""
    side, asked = producer(some, backoff), request("p-1", tokens)
    side.arrive(asked)
    asked.num_computed_tokens = asked.num_prompt_tokens
    assert [type(order) for order in side.schedule(asked)] == [Grant]
    params, order = side.finish(asked, block_ids)
    assert isinstance(order, Offer)
    travelled: dict[str, Any] = json.loads(json.dumps(params))
    return travelled


def blocks(*ids: list[int], cached: int = 0) -> KVCacheBlocks:
    """One list per group; id 0 is the null block; the first `cached` blocks of each list are prefix hits."""
    made = []
    for group in ids:
        of_group = [KVCacheBlock(number) for number in group]
        for place, block in enumerate(of_group):
            block.is_null = block.block_id == 0
            if place < cached and not block.is_null:
                block._block_hash = b"hit"
        made.append(of_group)
    return KVCacheBlocks(tuple(made))


class Decode:
    """A decode side with what it has said."""

    def __init__(self, *specs: Any, backoff: int = 0, me: tuple[str, str] = ("d", "its life"), **options: Any) -> None:
        self.fallbacks: list[str] = []
        self.side = Consumer(me, groups(*specs), backoff, self.fallbacks.append, **options)

    def arrive(self, params: dict[str, Any], tokens: list[int]) -> Any:
        asked = request("d-1", tokens, kv_transfer_params=params)
        self.watched = list(self.side.arrive(asked, params))
        return asked

    def load(self, asked: Any, held: KVCacheBlocks, num_external: int) -> Load:
        (order,) = self.side.allocate(asked, held, num_external)
        assert isinstance(order, Load)
        return order


pytestmark = pytest.mark.vllm
TOKENS = list(range(300))


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
    assert [type(order) for order in decode.watched] == [Watch]
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


def test_a_full_hit_releases_the_source() -> None:
    decode = Decode(full(128))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), TOKENS)
    assert decode.side.count_loadable(asked, 384) == 0
    assert [type(order) for order in decode.side.allocate(asked, blocks([7, 8, 9], cached=3), 0)] == [Unwatch, Release]
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


@pytest.mark.parametrize(
    ("fields", "expected"), [({}, False), ({"prefix_lm": True}, True), ({"prefix_lm": False}, False)]
)
def test_which_models_look_ahead(fields: dict[str, Any], expected: bool) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**fields)))
    assert needs_whole_prompts(config) == expected


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
    assert [(group.name, number) for group, number in decode.side.incomplete_blocks("d-1", held)] == [("g1", 2)]


def test_two_windows_are_clipped_each_by_its_own() -> None:
    """The narrow window's first page says nothing about the wide one's."""
    wide = SlidingWindowSpec(block_size=32, sliding_window=250, **FULL)
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


@pytest.mark.parametrize(("theirs", "mine", "first"), [(4, 4, 296), (8, 16, 292), (16, 8, 291), (512, 512, 0)])
def test_of_a_ring_as_much_is_loaded_as_both_hold(theirs: int, mine: int, first: int) -> None:
    params = prefill(groups(full(64), ring(theirs)), TOKENS, [[1, 2, 3, 4, 5], [6]])
    decode = Decode(full(128), ring(mine))
    asked = decode.arrive(params, TOKENS)
    assert decode.side.count_loadable(asked, 0) == 299
    order = decode.load(asked, blocks([1, 2, 3], [9]), 299)
    assert order.transfer.intervals == {"g0": [(0, 299)], "g1": [(first, 299)]}
    assert order.transfer.src_tables["g1"].pages.tolist() == [6]
    assert order.transfer.dst_new_pages["g1"].tolist() == [9]


@pytest.mark.parametrize(
    ("theirs", "count", "interval"),
    [
        (4, 299, (296, 299)), (4, 297, (296, 297)), (4, 296, None), (4, 295, "lost"), (4, 288, None),
        (8, 299, (295, 299)), (8, 296, (292, 296)), (8, 293, (292, 293)), (8, 292, None), (8, 291, "lost"),
        (64, 291, (287, 291)),
    ],
)  # fmt: skip
def test_what_a_ring_no_longer_has_is_only_missed_inside_an_entry(
    theirs: int, count: int, interval: tuple[int, int] | str | None
) -> None:
    """Entries of 4 tokens, which a ring of 4 is for. The source has 300 tokens, this engine computes more than the last one itself."""
    some = (full(32), ring(theirs))
    decode = Decode(full(32), ring(4), backoff=300 - count)
    asked = decode.arrive(prefill(groups(*some), TOKENS, [list(range(1, 11)), [11]]), TOKENS)
    assert decode.side.count_loadable(asked, 0) == (count if interval != "lost" else 0)
    assert decode.fallbacks == (["window"] if interval == "lost" else [])
    if interval != "lost":
        order = decode.load(asked, blocks(list(range(1, 11)), [12]), count)
        assert order.transfer.intervals["g1"] == ([] if interval is None else [interval])


def test_a_source_without_a_ring_is_not_loaded_where_one_is_needed() -> None:
    decode = Decode(full(64), ring(8))
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]]), TOKENS)
    assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == (0, ["window"])


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


def test_parameters_of_another_connector_are_a_fallback() -> None:
    decode = Decode(full(64))
    asked = decode.arrive({"do_remote_prefill": True, "remote_engine_id": "x"}, TOKENS)
    assert (decode.watched, decode.side.count_loadable(asked, 0), decode.fallbacks) == ([], 0, ["params"])
    assert list(decode.side.allocate(asked, blocks([1]), 0)) == []


def test_an_abort_before_blocks_releases_and_after_cancels() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    early, late = Decode(full(64)), Decode(full(64))
    early.arrive(params, TOKENS)
    assert [type(order) for order in early.side.abort("d-1")] == [Unwatch, Release]
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


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_end_well_offers_nothing(status: RequestStatus) -> None:
    side, asked = producer(groups(full(64))), request("p-1", TOKENS, status=status)
    list(side.schedule(asked))
    params, order = side.finish(asked, [[1, 2, 3, 4, 5]])
    assert (params, type(order)) == (None, Revoke)
    assert side.finish(asked, [[1]]) == (None, None)


def test_without_a_slot_nothing_is_offered_and_a_preempted_request_keeps_its_own() -> None:
    side = producer(groups(full(64)), slots=1)
    first, second = request("p-1", TOKENS), request("p-2", TOKENS)
    assert [type(order) for order in side.schedule(first)] == [Grant]
    assert list(side.schedule(first)) == []
    assert list(side.schedule(second)) == []
    assert side.finish(second, [[1]]) == (None, None)
    side.freed("p-1")
    assert [type(order) for order in side.schedule(second)] == [Grant]


def finished(side: Producer, asked: Any) -> Any:
    """What the router gets for a prompt that has been computed."""
    side.arrive(asked)
    list(side.schedule(asked))
    return side.finish(asked, [[1, 2, 3, 4, 5, 6]] * len(side._groups))


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
    assert (params["remote_num_tokens"], type(order)) == (expected, Offer)
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
    assert isinstance(order, Offer if is_offered else Revoke)


@pytest.mark.parametrize(("num_in_flight", "is_offered"), [(0, True), (1, False)])
def test_a_state_that_is_still_going_on_is_not_offered(num_in_flight: int, is_offered: bool) -> None:
    asked = request("p-1", TOKENS, num_computed_tokens=300, num_in_flight_tokens=num_in_flight)
    params, order = finished(producer(groups(full(64), state(512, "none"))), asked)
    assert (params is not None, type(order)) == (is_offered, Offer if is_offered else Revoke)
