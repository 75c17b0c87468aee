"""Sizes of `kv_transfer_params`, with block ids as vLLM's own cache manager hands them out: `python -m tests.vllm.params_sizes`.

An engine that has just started hands out ids in order. Each request that is freed puts its blocks back in pieces, and each allocation cuts
pieces again, so ids come closer to random with every pass through the pool. `Churn` drives vLLM's `KVCacheManager` through such passes.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request

from kvreshard.session.commands import RemoteEngine
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease
from kvreshard.session.seal import instance_id_of, prompt_key
from kvreshard.vllm.groups import CacheGroup, read_groups
from kvreshard.vllm.page_list import write_pages
from kvreshard.vllm.params import GroupParams, RemotePrefill, write_params
from kvreshard.vllm.prompt import Prompt, digest_prompt

KEY = bytes(range(32))
SIZES = {"tp_size": 8, "dcp_size": 1, "pp_size": 1}
STEP_TOKENS = 2048
SHORTEST, LONGEST = 200, 32768
NUM_HELD = 8
WINDOW = 1024
# vLLM makes the pages of attention as large as a state: this is a usual size.
HYBRID_PAGE = 528


def full(page: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=page, num_kv_heads=2, head_size=64, dtype=torch.float16)


def window() -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=16, sliding_window=WINDOW, num_kv_heads=2, head_size=64, dtype=torch.float16)


def state() -> MambaSpec:
    return MambaSpec(block_size=HYBRID_PAGE, shapes=((4, 3),), dtypes=(torch.float32,), mamba_cache_mode="align")


MODELS: dict[str, Callable[[], list[Any]]] = {
    "one group": lambda: [full()],
    "six full": lambda: [full() for _ in range(6)],
    "two full, four windows": lambda: [full(), full(), *(window() for _ in range(4))],
    "one full, three states": lambda: [full(HYBRID_PAGE), *(state() for _ in range(3))],
}


def config_of(specs: Sequence[Any], num_blocks: int) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)])


class Churn:
    """A prefill engine's cache manager, of `num_blocks` blocks: chunks of 2,048 tokens a step, prefix hits, requests of 200 to 32,768
    tokens that are read by another engine and then freed, not always in order.
    """

    def __init__(self, specs: Sequence[Any], num_blocks: int, seed: int = 0) -> None:
        self.rng, self.num_blocks = random.Random(seed), num_blocks
        self.page = max(spec.block_size for spec in specs)
        self.manager = KVCacheManager(
            config_of(specs, num_blocks), 1 << 21, self.page, self.page, max_in_flight_tokens=STEP_TOKENS
        )
        self.running: list[Request] = []
        self.finished: list[Request] = []
        self.count = self.num_allocated = 0

    def new_request(self, num_tokens: int, shares: bool = True) -> Request:
        self.count += 1
        hashes = [b"%d-%d" % (self.count, i) for i in range(num_tokens // self.page)]
        if shares and self.rng.random() < 0.5:
            prefix, length = self.rng.randrange(8), self.rng.choice([60, 125, 500])
            hashes[:length] = [b"prefix %d-%d" % (prefix, i) for i in range(min(length, len(hashes)))]
        params = SamplingParams(max_tokens=1)
        made = Request(f"r{self.count}", [0] * num_tokens, params, None)
        made.block_hashes.extend(hashes)
        return made

    def step(self, arriving: list[Request]) -> None:
        """One step of the scheduler: running requests first, then those that arrive, for 2,048 tokens together."""
        left = STEP_TOKENS
        for request in [*self.running]:
            left -= self._compute(request, left)
        while left > 0 and arriving:
            blocks, num_hits, *_ = self.manager.get_computed_blocks(arriving[0])
            amount = min(left, arriving[0].num_tokens - num_hits)
            got = self.manager.allocate_slots(arriving[0], amount, num_hits, blocks, full_sequence_must_fit=True)
            if got is None:
                self._free_one()
                return
            self.running.append(arriving.pop(0))
            self._note(self.running[-1], got, num_hits + amount)
            left -= amount

    def _compute(self, request: Request, most: int) -> int:
        amount = min(most, request.num_tokens - request.num_computed_tokens)
        if amount <= 0:
            return 0
        while (got := self.manager.allocate_slots(request, amount)) is None:
            self._free_one()
        self._note(request, got, amount)
        return amount

    def _note(self, request: Request, got: Any, amount: int) -> None:
        self.num_allocated += sum(map(len, got.get_block_ids()))
        request.num_computed_tokens += amount
        if request.num_computed_tokens == request.num_tokens:
            self.running.remove(request)
            self.finished.append(request)
            if len(self.finished) > NUM_HELD:
                self._free_one()

    def _free_one(self) -> None:
        self.manager.free(self.finished.pop(self.rng.randrange(min(4, len(self.finished)))))

    def run(self, passes: float) -> None:
        """Until as many blocks as the pool has were allocated, `passes` times."""
        arriving: list[Request] = []
        end = self.num_allocated + passes * self.num_blocks
        while self.num_allocated < end:
            if not arriving:
                length = math.exp(self.rng.uniform(math.log(SHORTEST), math.log(LONGEST)))
                arriving.append(self.new_request(int(length)))
            self.step(arriving)

    def prefill(self, num_tokens: int) -> list[list[int]]:
        """The block ids of one more request, which is freed again."""
        made = self.new_request(num_tokens, shares=False)
        arriving = [made]
        while made.num_computed_tokens < num_tokens:
            self.step(arriving)
        ids = [list(ids) for ids in self.manager.get_block_ids(made.request_id)]
        self.finished.remove(made)
        self.manager.free(made)
        return ids


def params_of(groups: Sequence[CacheGroup], block_ids: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    """What the router gets for a prefill with these blocks."""
    lease = Lease("cmpl-" + "0f" * 16, 7, (1 << 63) + 12345)
    pages = [group.pages(block_ids[group.index], num_tokens) for group in groups]
    prefill = RemotePrefill(
        RemoteEngine("0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0", instance_id_of(KEY), Address("10.0.0.1", 5600)),
        lease,
        num_tokens,
        tuple(
            GroupParams(group.name, first, group.page_tokens, group.is_state, group.window_tokens)
            for group, (first, _) in zip(groups, pages, strict=True)
        ),
        {group.name: write_pages(ids) for group, (_, ids) in zip(groups, pages, strict=True)},
        digest_prompt(Prompt(range(num_tokens)), num_tokens, prompt_key(KEY, lease.request, lease.word)),
    )
    return write_params(prefill, SIZES, KEY)


def count_pages(specs: Sequence[Any], num_tokens: int) -> int:
    """Blocks that a request of vLLM holds at its end, windows aside."""
    return sum(-(-num_tokens // spec.block_size) for spec in specs if isinstance(spec, FullAttentionSpec))


def measure(model: str, num_tokens: int, passes: float | None) -> tuple[int, int]:
    """Bytes of JSON of the parameters, and of their block ids as numbers. `passes` None: ids at random."""
    specs = MODELS[model]()
    num_blocks = max(20_000, 2 * count_pages(specs, num_tokens))
    churn = Churn(specs, num_blocks)
    churn.run(passes or 0)
    block_ids = churn.prefill(num_tokens)
    if passes is None:
        other = [0, *random.Random(0).sample(range(1, num_blocks), num_blocks - 1)]
        block_ids = [[other[block] for block in ids] for ids in block_ids]
    groups = read_groups(config_of(specs, num_blocks), 1)
    params = params_of(groups, block_ids, num_tokens)
    as_numbers = [group.pages(block_ids[group.index], num_tokens)[1] for group in groups]
    return len(json.dumps(params)), len(json.dumps(as_numbers))


def main() -> None:
    """The two tables of docs/reference/parameters.md. Models with states are not churned: `Churn` cuts no chunks at their pages."""
    print(
        "| model | tokens | new engine | after 10 passes | ids at random | the ids alone, as numbers |\n|---|---|---|---|---|---|"
    )
    for model in MODELS:
        for num_tokens in (1 << 13, 1 << 17, 1 << 20):
            new, at_random = (measure(model, num_tokens, passes) for passes in (0, None))
            later = "-" if "states" in model else f"{measure(model, num_tokens, 10)[0] / 1024:,.1f}"
            sizes = f"{new[0] / 1024:,.1f} | {later} | {at_random[0] / 1024:,.1f} | {at_random[1] / 1024:,.1f}"
            print(f"| {model} | {num_tokens:,} | {sizes} |", flush=True)
    for passes in (1, 3, 10, 30, 100):
        print(f"six full, {passes} passes: {measure('six full', 1 << 17, passes)[0] / 1024:.1f}", flush=True)


if __name__ == "__main__":
    main()
