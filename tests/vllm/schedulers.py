"""Both sides' halves of a scheduler, called without an engine.

With vLLM's own block classes and specifications, and requests that have only what is looked at. What the prefill side answers
goes through JSON to the decode side.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
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

from kvreshard.session.commands import Acquire, Command, Failure, Load, Publish
from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.consumer import Consumer
from kvreshard.vllm.groups import CacheGroup, read_groups
from kvreshard.vllm.items import Positions
from kvreshard.vllm.outcomes import OutcomeLog
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.requests import EngineConfig
from kvreshard.vllm.sources import SourceHosts

KEY = bytes(range(32))

FULL = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
WINDOW = 100


def full(block: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **FULL)


def window(block: int, num_tokens: int = WINDOW) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size=block, sliding_window=num_tokens, **FULL)


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
        "prompt_is_token_ids": None,
        "cache_salt": None,
        "trace_headers": None,
        "block_hashes": [],
        "update_block_hashes": lambda: None,
        "max_tokens": 1,
        "num_output_tokens": 1,
        "status": RequestStatus.FINISHED_LENGTH_CAPPED,
        "kv_transfer_params": {"do_remote_decode": True},
        "get_skip_reading_prefix_cache": lambda: False,
        "resumable": False,
        **more,
    }
    return SimpleNamespace(**fields)


def producer(
    some: tuple[CacheGroup, ...], backoff: int = 0, slots: int = 4, positions: Positions = Positions.PLAIN
) -> Producer:
    sizes = {"tp_size": 1, "dcp_size": 1, "pp_size": 1}
    made = Producer(
        "p", KEY, EngineConfig(some, num_backoff_tokens=backoff, positions=positions, sizes=sizes), 30.0, slots
    )
    made.address = Address("127.0.0.1", 5)
    return made


def picture(
    name: str, first: int, num_tokens: int, grid: tuple[int, ...] | None = None, modality: str = "image"
) -> MultiModalFeatureSpec:
    """A multimodal item, as a request has it: without its data, or with a grid and pixels."""
    data = None
    if grid is not None:
        fields = {
            f"{modality}_grid_thw": torch.tensor(grid),
            "pixel_values": torch.full((num_tokens, 8), 1.0 * len(name)),
        }
        batched = MultiModalBatchedField()
        data = MultiModalKwargsItem({key: MultiModalFieldElem(value, batched) for key, value in fields.items()})
    return MultiModalFeatureSpec(data, modality, name, PlaceholderRange(first, num_tokens), mm_hash=name)


def prefill(
    some: tuple[CacheGroup, ...],
    tokens: list[int],
    block_ids: list[list[int]],
    backoff: int = 0,
    positions: Positions = Positions.PLAIN,
    **more: Any,
) -> dict[str, Any]:
    """What the router gets for a prompt."""
    side, asked = producer(some, backoff, positions=positions), request("p-1", tokens, **more)
    side.arrive(asked)
    asked.num_computed_tokens = asked.num_prompt_tokens
    assert [type(order) for order in side.schedule(asked)] == [Acquire]
    params, order = side.finish(asked, block_ids)
    assert isinstance(order, Publish)
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
    """A decode side with what it has counted. `has_met`: its ranks have met the source before. `config`: entries of `EngineConfig`."""

    def __init__(
        self,
        *specs: Any,
        backoff: int = 0,
        engine: str = "d",
        own_key: bytes = bytes(32),
        has_met: bool = True,
        hosts: SourceHosts | None = None,
        **config: Any,
    ) -> None:
        self.fallbacks: list[str] = []
        self.not_loaded: list[tuple[str, int]] = []
        settings = EngineConfig(groups(*specs), num_backoff_tokens=backoff, **config)
        self.side = Consumer(engine, own_key, settings, OutcomeLog(self._count), hosts=hosts)
        if has_met:
            self.side.known.add_key(KEY)

    def _count(self, counter: str, label: str, amount: int) -> None:
        if counter == "fallbacks":
            self.fallbacks.append(label)
        elif counter == "tokens_not_loaded":
            self.not_loaded.append((label, amount))

    def arrive(self, params: dict[str, Any], tokens: list[int], **more: Any) -> Any:
        asked = request("d-1", tokens, kv_transfer_params=params, **({"block_hashes": []} | more))
        self.watched = list(self.side.arrive(asked, params))
        return asked

    def meet(self, keys: dict[str, bytes], unmet: dict[str, Failure] | None = None) -> list[Command]:
        return list(self.side.meet(keys, unmet or {}))

    def load(self, asked: Any, held: KVCacheBlocks, num_external: int) -> Load:
        (order,) = self.side.allocate(asked, held, num_external)
        assert isinstance(order, Load)
        return order


TOKENS = list(range(300))
