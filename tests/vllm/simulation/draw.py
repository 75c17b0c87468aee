"""The engines, the model and the weather that a seed stands for.

All engines of a world run one model, each at its own TP (DCP with latents), PP, page size, order of dimensions, pool, step size, with or
without asynchronous scheduling and prefix caching; with or without drafts, of one module or several. A third serve by priority, but with vLLM 0.30, which is refused then. Some
pools are so small that requests are preempted, or hold no more than the largest one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.vllm import models
from tests.vllm.engines import ModelLayer, fake_config
from tests.vllm.planning import blocks_per_request, planning
from tests.vllm.simulation.base import MAX_MODEL_LEN
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.world import Weather
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

from kvreshard.model.changed import replace
from kvreshard.vllm.describe.place import RankPlace
from kvreshard.vllm.versions import find_version, minor

Layers = Mapping[str, ModelLayer]
# Tokens that become one compressed entry.
GROUP_TOKENS = 4

ORDER_POLICIES = ["fcfs", "fcfs", "fcfs" if minor(find_version() or "") == (0, 30) else "priority"]


@dataclass(frozen=True)
class Model:
    """`num_groups`: groups that need blocks of their own."""

    kind: str
    num_groups: int
    heads: int = 4
    window_heads: int | None = None

    @property
    def has_states(self) -> bool:
        return self.kind.startswith(("states", "aligned"))

    @property
    def is_aligned(self) -> bool:
        return self.kind.startswith("aligned")

    @property
    def has_rings(self) -> bool:
        return self.kind.endswith("ring")

    @property
    def is_replayed(self) -> bool:
        return self.kind.startswith("replayed")

    def layers(self, page: int, window: int, num_drafts: int = 0, laps: int = 1) -> Layers:
        """One or two layers per group. `num_drafts`: that an engine steps states into. `laps`: how much longer a ring is than need be."""
        one, two, three = (models.name(number) for number in range(3))
        full = models.attention(self.heads, 8, bs=page)
        windowed = models.attention(self.heads, 8, bs=page, window=window)
        if self.has_states:
            state = _state(page, self.is_aligned, num_drafts)
            more = {three: windowed} if self.kind.endswith("window") else {}
            if self.has_rings:
                more = _compressed(2, page, num_drafts, laps)
            return {models.name(0, "mixer"): state, two: full, **more}
        found: dict[str, Layers] = {
            "full": {one: full, two: full},
            "latent": {one: models.mla(24, bs=page), two: models.mla(24, bs=page)},
            "window": {one: full, two: windowed},
            "windows": {one: full, two: windowed, three: models.attention(4, 8, bs=page, window=2 * window + 1)},
            "only window": {one: windowed, two: windowed},
            "ring": {one: full, **_compressed(1, page, num_drafts, laps)},
            "window, ring": {one: windowed, **_compressed(1, page, num_drafts, laps)},
            "replayed, ring": {one: _replayed(page, window), **_compressed(1, page, num_drafts, laps)},
            "chunk": {one: full, two: _chunk(page, 32 * (1 + window % 3))},
            "unequal heads": {
                one: models.attention(2, 16, bs=page),
                two: models.attention(8, 8, bs=page, window=window),
            },
        }
        return found[self.kind]


MODELS = (
    Model("full", 1), Model("latent", 1), Model("window", 2), Model("windows", 3), Model("only window", 1), Model("chunk", 2),
    Model("unequal heads", 2, heads=2, window_heads=8), Model("states", 2), Model("states, window", 3), Model("aligned", 2),
    Model("aligned, window", 3), Model("ring", 2), Model("window, ring", 3), Model("states, ring", 3),
    Model("replayed, ring", 3),
)  # fmt: skip
CALM = (
    Weather(),
    Weather(delays=3, unwanted=0.1, retried=0.1),
    Weather(delays=2, choices=0.4),
    Weather(delays=2, longer_prefills=0.3, cache_resets=0.01, odd_names=0.3),
    Weather(delays=1, prefill_choices=0.4, longer_prefills=0.2),
    Weather(delays=1, longer_prefills=0.8, stops=0.7),
)
STORMS = (
    Weather(
        delays=4, failures=0.05, unmet=0.1, aborts=0.01, unwanted=0.1, retried=0.2, other_prompts=0.2, jumps=0.002,
        longer_prefills=0.2, cache_resets=0.01, connector_resets=0.005, pauses=0.01,
    ),
    Weather(delays=3, failures=0.3, aborts=0.01),
    Weather(delays=2, connector_resets=0.03, pauses=0.02),
    Weather(delays=2, pauses=0.03, jumps=0.005, aborts=0.01),
    Weather(delays=3, aborts=0.03, choices=0.3),
    Weather(aborts=0.1, misrouted=0.3),
    Weather(aborts=0.02, longer_prefills=0.5, stops=0.5),
    Weather(delays=1, other_prompts=0.5),
    Weather(delays=2, jumps=0.01, unwanted=0.2),
    Weather(delays=3, failures=0.2, retried=0.3, choices=0.2, prefill_choices=0.2, odd_names=0.1),
)  # fmt: skip


def draw(seed: int) -> tuple[Model, dict[str, Shape], Weather]:
    """Two to four engines. The first can prefill and the second decode."""
    rng = random.Random(seed)
    model, window = rng.choice(MODELS), rng.choice([3, 8, 9, 20, 24, 40])
    weather = rng.choice(CALM + STORMS)
    # There vLLM may group layers of one stage only.
    max_stages = 1 if model.window_heads or model.kind in ("window, ring", "replayed, ring") else rng.choice([1, 1, 2])
    if model.is_replayed:
        window = window // GROUP_TOKENS * GROUP_TOKENS or GROUP_TOKENS  # a replay begins with a whole group
    prefill, decode = rng.choice([("kv_producer", "kv_consumer")] * 2 + [("kv_both", "kv_both")])
    # vLLM 0.32 does not run chunks with an EAGLE draft and prefix caching.
    drafts = rng.choice([0, 0, 1, 3]) if model.kind != "chunk" else 0
    is_multi_module = rng.random() < 0.3 and drafts > 1 and not model.has_states
    roles = {"p": prefill, "d": decode}
    roles |= {"q": prefill} if rng.random() < 0.3 else {}
    roles |= {"e": decode} if rng.random() < 0.3 else {}
    shapes = {}
    for name, role in roles.items():
        shape = _shape(rng, model, window, role, max_stages, drafts)
        shapes[name] = replace(shape, is_multi_module=is_multi_module)
    return model, shapes, _with_early_reads(seed, weather)


def _with_early_reads(seed: int, weather: Weather) -> Weather:
    """In half of the worlds some or all requests are sent to both engines at once."""
    rng = random.Random(~seed)
    early = rng.choice([0.0, 0.0, 0.4, 1.0])
    return replace(weather, early=early, unheard=0.0 if weather.is_calm or not early else rng.choice([0.0, 0.2]))


def _shape(rng: random.Random, model: Model, window: int, role: str, max_stages: int, num_drafts: int) -> Shape:
    page = rng.choice([16, 32] if model.has_states or model.has_rings else [4, 8, 16, 32])
    tp = rng.choice([1, 2, 4, 8] if model.window_heads else [1, 2, 4])
    pp = rng.randint(1, max_stages)
    layers = _staged(model.layers(page, window, num_drafts, rng.choice([1, 2])), pp, max_stages)
    dcp = rng.choice([1, tp]) if model.kind == "latent" else 1
    max_tokens_per_step = rng.choice([16, 40, 64, 200]) if not model.is_aligned else rng.choice([40, 64, 200])
    order = rng.choice(["LBHNC", "LBNHC", "BLHNC"]) if not model.has_rings else "BLHNC"
    return Shape(
        layers,
        tp=tp,
        pp=pp,
        dcp=dcp,
        order=order,
        blocks=int(
            _largest_request(model, layers, order, tp, dcp, 2 * max_tokens_per_step)
            * rng.choice([1.0, 1.2, 1.5, 2, 3, 6])
        )
        + 1,
        max_tokens_per_step=max_tokens_per_step,
        max_requests=rng.choice([2, 4, 8]),
        is_async=pp == 1 and rng.random() < 0.5,  # both at once is nothing for vLLM's first model runner
        is_v2=rng.random() < 0.5 or model.is_replayed,
        has_prefix_caching=model.is_aligned or (not model.has_states and rng.random() < 0.75),
        is_aligned=model.is_aligned,
        match_unit=rng.choice([None, 4, 8]) if model.is_aligned else None,
        kv_heads=model.heads,
        window_heads=model.window_heads,
        num_drafts=num_drafts,
        role=role,
        failure_policy=rng.choice(["recompute", "recompute", "fail"]),
        order_policy=rng.choice(ORDER_POLICIES),
    )


def _largest_request(model: Model, layers: Layers, order: str, tp: int, dcp: int, max_in_flight_tokens: int) -> int:
    """Blocks that vLLM wants to have for one request at least; two more for aligned states, where a prompt with a prefix hit may not get
    what it asks for although the whole pool is free (vLLM 0.32.0, without a connector's doing).
    """
    config = fake_config(order, tp=tp, dcp=dcp, kv_heads=model.heads)
    config.model_config.max_model_len, config.max_in_flight_tokens = MAX_MODEL_LEN, max_in_flight_tokens
    if model.is_aligned:
        config.cache_config.mamba_cache_mode = "align"
    place = RankPlace(0, tp, dcp_size=dcp)
    groups = planning.get_kv_cache_groups(config, {name: layer.spec(place) for name, layer in layers.items()})
    return blocks_per_request(config, groups) + 2 * model.is_aligned


def _compressed(number: int, page: int, num_drafts: int, laps: int) -> Layers:
    """One entry for some tokens, and the ring of those whose entry is not complete (as `Qwen4Exp` sizes it)."""
    capacity = GROUP_TOKENS * -(-(GROUP_TOKENS + num_drafts) // GROUP_TOKENS) * laps
    return {
        models.name(number): models.mla(24, bs=page, tokens_per_state=GROUP_TOKENS),
        models.name(number + 1, "compressor.state_cache"): models.ring(capacity, 6),
    }


def _replayed(page: int, window: int) -> ModelLayer:
    """A window of latents that is in no prefix hit: its last tokens are computed again (DeepSeek-V4.1)."""
    return models.mla(24, bs=page, window=window, **models.since_0_31(bounded_replay=True))


def _staged(layers: Layers, pp: int, max_stages: int) -> Layers:
    """The layers once per stage that an engine of this world may have, since vLLM wants some of each group in each stage."""
    found = {}
    for stage in range(max_stages):
        for name, layer in layers.items():
            number = int(name.split(".")[2])
            renamed = name.replace(f".{number}.", f".{number + stage * len(layers)}.")
            found[renamed] = replace(layer, stage=min(stage, pp - 1))
    return found


def _state(page: int, is_aligned: bool, num_drafts: int) -> ModelLayer:
    """A small Mamba-2 state in a page of the attention beside it."""
    made = models.mamba2(
        4,
        2,
        2,
        3,
        3,
        dim_first=False,
        padded=lambda place: page * models.held(4, place) * 8 * 2 * 2,
        num_spec=num_drafts,
    )
    if not is_aligned:
        return made
    return replace(made, spec=lambda place: replace(made.spec(place), block_size=page, mamba_cache_mode="align"))


def _chunk(page: int, chunk: int) -> ModelLayer:
    """A chunk is a whole number of pages: vLLM 0.32's prefix hits are wrong where it is not (pages of the chunk are missing)."""
    made = models.attention(4, 8, bs=page)

    def spec(place: Any) -> Any:
        heads = made.spec(place)
        return ChunkedLocalAttentionSpec(
            block_size=page, num_kv_heads=heads.num_kv_heads, head_size=heads.head_size, dtype=heads.dtype,
            attention_chunk_size=chunk,
        )  # fmt: skip

    return replace(made, spec=spec)
