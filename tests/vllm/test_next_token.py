"""All that the next token attends to is there, with vLLM's own block managers on both sides.

A prompt is prefilled by one manager, in chunks, and loaded into the pages of another as vLLM's scheduler drives it: local hits, a
load beyond them, and once it is over the rest is computed, the last token at least (vLLM 0.32.0,
`Scheduler._update_waiting_for_remote_kv`). The oracle is what attention means: a token looks at those of its window, of its
chunk, or at all before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm.schedulers import Decode, groups, producer, state
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from kvreshard.model.changed import replace
from kvreshard.session.commands import Load
from kvreshard.vllm.groups import blocks_to_compute, blocks_to_load

pytestmark = pytest.mark.vllm
PAGE, LONGEST = 8, 50
SHAPE: dict[str, Any] = {"block_size": PAGE, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
FULL = FullAttentionSpec(**SHAPE)
WINDOWS = [SlidingWindowSpec(sliding_window=tokens, **SHAPE) for tokens in (1, 2, 8, 9, 20, 24)]
CHUNKS = [ChunkedLocalAttentionSpec(attention_chunk_size=tokens, **SHAPE) for tokens in (8, 16, 20)]


def manager(specs: Sequence[Any]) -> KVCacheManager:
    init_none_hash(sha256)
    page = specs[0].block_size
    whole = max(spec.block_size for spec in specs)
    config = KVCacheConfig(200, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])
    # As vLLM starts such engines: prefixes are cached where states are kept at the ends of blocks.
    caches = all(spec.mamba_cache_mode == "align" for spec in specs if isinstance(spec, MambaSpec))
    return KVCacheManager(config, 4 * LONGEST, whole, page, enable_caching=caches)


def request(specs: Sequence[Any], name: str, tokens: list[int]) -> Request:
    hasher = get_request_block_hasher(specs[0].block_size, sha256)
    return Request(name, tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)


def compute(
    engine: KVCacheManager, asked: Request, step_tokens: int, after_step: Callable[[], None] = lambda: None
) -> None:
    """A prompt as the scheduler has it computed, `step_tokens` at a time."""
    while asked.num_computed_tokens < asked.num_tokens:
        count = min(step_tokens, asked.num_tokens - asked.num_computed_tokens)
        assert engine.allocate_slots(asked, count) is not None
        after_step()
        asked.num_computed_tokens += count


def backoff(specs: Sequence[Any]) -> int:
    return int(any(isinstance(spec, MambaSpec) for spec in specs))


def offered(specs: Sequence[Any], tokens: list[int], step_tokens: int) -> dict[str, Any]:
    """What the router gets for a prompt; its blocks are handed out as `Scheduler._connector_finished` does."""
    engine, asked, side = manager(specs), request(specs, "p", list(tokens)), producer(groups(*specs), backoff(specs))
    asked.kv_transfer_params = {"do_remote_decode": True}
    free_before = engine.block_pool.get_num_free_blocks()
    side.last_pages.manager = engine
    side.arrive(asked)
    list(side.schedule(asked))
    compute(engine, asked, step_tokens, side.last_pages.hold)
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    engine.remove_skipped_blocks("p", asked.num_computed_tokens, asked.num_prompt_tokens)
    params, _ = side.finish(asked, engine.get_block_ids_for_computed_tokens("p", asked.num_computed_tokens))
    assert params is not None
    engine.free(asked)
    side.freed("p")
    assert engine.block_pool.get_num_free_blocks() == free_before
    return params


def looked_at(spec: Any, token: int) -> set[int]:
    """The tokens that one token attends to, beside itself; a state has seen all, and keeps none."""
    first = token if isinstance(spec, MambaSpec) else 0
    if isinstance(spec, SlidingWindowSpec):
        first = max(0, token - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        first = token // spec.attention_chunk_size * spec.attention_chunk_size
    return set(range(first, token))


def check_loaded(specs: Sequence[Any], params: dict[str, Any], tokens: list[int], num_cached: int) -> int:
    """Load a prompt, and look at its next token; returns how many tokens were there before it, loaded or cached."""
    engine, decode = manager(specs), Decode(*specs, backoff=backoff(specs))
    asked = request(specs, "d-1", list(tokens))
    if num_cached:
        before = request(specs, "before", tokens[:num_cached])
        compute(engine, before, PAGE if backoff(specs) else num_cached)
        engine.free(before)
        engine.new_step_starts()
    list(decode.side.arrive(asked, params))
    found, cached, *_ = engine.get_computed_blocks_for_connector(asked)
    external = decode.side.count_loadable(asked, cached)
    there = [set(range(cached)) for _ in specs]
    if external:
        free = [engine.block_pool.get_num_free_blocks()]
        assert engine.allocate_slots(
            asked, 0, cached, found, num_external_computed_tokens=external, delay_cache_blocks=True
        )
        free.append(engine.block_pool.get_num_free_blocks())
        (order,) = decode.side.allocate(asked, engine.get_blocks("d-1"), external)
        assert isinstance(order, Load)
        for filled, intervals in zip(there, order.transfer.intervals.values(), strict=True):
            filled.update(*(range(*interval) for interval in intervals))
        asked.num_computed_tokens = cached + external
        asked.num_computed_tokens -= asked.num_computed_tokens == len(tokens)
        check_states(engine, specs, order, cached + external)
        for name, pages in order.transfer.dst_new_pages.items():
            assert set(pages.tolist()) <= set(order.transfer.dst_tables[name].pages.tolist())
        assert engine.allocate_slots(asked, len(tokens) - asked.num_computed_tokens)
        free.append(engine.block_pool.get_num_free_blocks())
        assert free[0] - free[1] <= blocks_to_load(groups(*specs), cached + external)
        assert free[1] - free[2] <= blocks_to_compute(groups(*specs), cached + external, len(tokens)).num_blocks
    else:
        assert engine.allocate_slots(asked, len(tokens) - cached, cached, found)
        asked.num_computed_tokens = cached
    for ids, spec, filled in zip(engine.get_block_ids("d-1"), specs, there, strict=True):
        wanted = looked_at(spec, asked.num_computed_tokens)
        assert all(ids[token // spec.block_size] != 0 for token in wanted), (len(tokens), cached, external, ids)
        assert wanted <= filled, (len(tokens), cached, external, sorted(wanted - filled))
    return int(cached + external)


def check_states(engine: KVCacheManager, specs: Sequence[Any], order: Load, num_tokens: int) -> None:
    """A state is loaded whole, at its position, into a page of its own, which is where vLLM goes on from (`mamba_utils`)."""
    for number, spec in enumerate(specs):
        if isinstance(spec, MambaSpec):
            blocks = engine.get_blocks("d-1").blocks[number]
            place = (num_tokens - 1) // spec.block_size if spec.mamba_cache_mode == "align" else 0
            assert order.transfer.intervals[f"g{number}"] == [(0, num_tokens)]
            assert order.transfer.dst_tables[f"g{number}"].pages.tolist() == [blocks[place].block_id]
            assert (blocks[place].is_null, blocks[place].ref_cnt, blocks[place].block_hash) == (False, 1, None)


@pytest.mark.parametrize("step_tokens", [8, LONGEST])
@pytest.mark.parametrize("num_cached", [0, 16])
@pytest.mark.parametrize(
    "spec",
    [state(PAGE, "align"), state(PAGE, "align", 2), state(512, "none", 2)],
    ids=lambda spec: f"{spec.mamba_cache_mode}-{spec.num_speculative_blocks}",
)
def test_states_beside_a_window_are_loaded_where_they_stand(spec: Any, num_cached: int, step_tokens: int) -> None:
    specs = [FULL, spec, WINDOWS[4]]
    for num_tokens in range(num_cached + 2, LONGEST):
        tokens = list(range(num_tokens))
        assert check_loaded(specs, offered(specs, tokens, step_tokens), tokens, num_cached) == num_tokens - 1


@pytest.mark.parametrize("step_tokens", [7, LONGEST])
@pytest.mark.parametrize("num_cached", [0, 16])
@pytest.mark.parametrize("spec", [*WINDOWS, *CHUNKS, FULL], ids=lambda spec: type(spec).__name__)
def test_what_the_next_token_looks_at_is_there(spec: Any, num_cached: int, step_tokens: int) -> None:
    """Whatever the pages' sizes are, and also where the decode side's prompt goes on beyond the prefill side's."""
    for src_page, dst_page in ((PAGE, PAGE), (PAGE // 2, PAGE), (PAGE, PAGE // 2)):
        src, dst = ([replace(one, block_size=page) for one in (FULL, spec)] for page in (src_page, dst_page))
        for num_tokens in range(num_cached + 1, LONGEST):
            tokens = list(range(num_tokens))
            params = offered(src, tokens, step_tokens)
            for num_added in (0, 1, 5):
                there = check_loaded(dst, params, [*tokens, *range(900, 900 + num_added)], num_cached)
                assert there == num_tokens - (num_added == 0)


@pytest.mark.parametrize("spec", [*WINDOWS, *CHUNKS, FULL], ids=lambda spec: type(spec).__name__)
def test_what_a_load_of_all_tokens_loses_is_found(spec: Any) -> None:
    """As NixlConnector loads: tables for all tokens, and the last one is computed with them."""
    specs, num_lost = [FULL, spec], 0
    for num_tokens in range(1, LONGEST):
        engine, asked = manager(specs), request(specs, "d-1", list(range(num_tokens)))
        assert engine.allocate_slots(asked, 0, num_external_computed_tokens=num_tokens, delay_cache_blocks=True)
        for group, ids, one in zip(groups(*specs), engine.get_block_ids("d-1"), specs, strict=True):
            lost = [token for token in looked_at(one, num_tokens - 1) if ids[token // PAGE] == 0]
            assert group.find_lost(ids, num_tokens) == min(lost, default=None)
            num_lost += bool(lost)
    assert (num_lost > 0) == (spec is not FULL and looked_at(spec, LONGEST) != set())


def test_pages_of_a_preempted_prefill_are_given_back_and_those_of_its_second_start_kept() -> None:
    specs = [FULL, SlidingWindowSpec(sliding_window=20, **SHAPE)]
    engine, asked, side = manager(specs), request(specs, "p", list(range(27))), producer(groups(*specs))
    asked.kv_transfer_params = {"do_remote_decode": True}
    free_before = engine.block_pool.get_num_free_blocks()
    side.last_pages.manager = engine
    list(side.schedule(asked))
    assert engine.allocate_slots(asked, 10)
    side.last_pages.hold()
    assert len(side.last_pages._held["p"]) == 1
    engine.free(asked)
    assert engine.block_pool.get_num_free_blocks() == free_before - 1
    side.last_pages.hold()
    assert list(side.schedule(asked)) == []
    assert engine.block_pool.get_num_free_blocks() == free_before
    compute(engine, asked, 10, side.last_pages.hold)
    second = engine.get_block_ids("p")[1][0]
    assert len(side.last_pages._held["p"]) == 1
    engine.remove_skipped_blocks("p", 27, 27)
    assert engine.get_block_ids("p")[1][0] == 0
    assert side.last_pages.restore("p", engine.get_block_ids("p"))[1] == [second, *engine.get_block_ids("p")[1][1:]]
    engine.free(asked)
    side.freed("p")
    assert engine.block_pool.get_num_free_blocks() == free_before


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR])
def test_a_prefill_that_did_not_end_well_keeps_nothing(status: RequestStatus) -> None:
    specs = [FULL, SlidingWindowSpec(sliding_window=20, **SHAPE)]
    engine, asked, side = manager(specs), request(specs, "p", list(range(27))), producer(groups(*specs))
    asked.kv_transfer_params = {"do_remote_decode": True}
    free_before = engine.block_pool.get_num_free_blocks()
    side.last_pages.manager = engine
    list(side.schedule(asked))
    compute(engine, asked, 10, side.last_pages.hold)
    asked.status = status
    params, _ = side.finish(asked, engine.get_block_ids("p"))
    assert params is None
    engine.free(asked)
    side.last_pages.hold()
    assert engine.block_pool.get_num_free_blocks() == free_before


def test_pages_with_a_hole_behind_them_are_not_restored() -> None:
    """A prefill that went on for several pages: its table begins later, and a page before the hole serves nobody."""
    specs = [FULL, SlidingWindowSpec(sliding_window=20, **SHAPE)]
    engine, asked, side = manager(specs), request(specs, "p", list(range(27))), producer(groups(*specs))
    side.last_pages.manager = engine
    list(side.schedule(asked))
    compute(engine, asked, 10, side.last_pages.hold)
    ids = [[1, 2, 3, 4, 5, 6], [0, 0, 7, 8, 9, 10]]
    assert side.last_pages.restore("p", ids) == ids
