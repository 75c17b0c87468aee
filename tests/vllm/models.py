"""Tiny models for `engines.build`: what each layer's specification is on a rank, and how its backend indexes it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tests.vllm import writers
from tests.vllm.engines import ModelLayer
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvreshard.model.changed import replace
from kvreshard.vllm.describe.layer_info import LayerInfo
from kvreshard.vllm.describe.place import RankPlace

BF16, FP32 = torch.bfloat16, torch.float32
FLASH = LayerInfo("FLASH_ATTN", "auto", "cuda")
Layers = dict[str, ModelLayer]


def name(index: int, part: str = "self_attn.attn") -> str:
    return f"model.layers.{index}.{part}"


def since_0_31(**options: Any) -> dict[str, Any]:
    """Options of specifications that 0.30 does not have."""
    return options if "dcp_sharded" in CircularBufferSpec.__dataclass_fields__ else {}


def held(total: int, place: RankPlace) -> int:
    return max(1, total // place.tp_size)


def attention(
    total: int,
    head_size: int,
    *,
    bs: int = 16,
    window: int | None = None,
    v_size: int | None = None,
    dtype: Any = BF16,
    info: LayerInfo = FLASH,
    writer: Any = None,
    stage: int = 0,
    **options: Any,
) -> ModelLayer:
    """Full attention, or a window; heads as `divide` leaves them on a rank."""

    def spec(place: RankPlace) -> Any:
        common: dict[str, Any] = {
            "block_size": bs,
            "num_kv_heads": held(total, place),
            "head_size": head_size,
            "head_size_v": v_size,
            "dtype": dtype,
            **{key: value(place) if callable(value) else value for key, value in options.items()},
        }
        if window is None:
            return FullAttentionSpec(**common)
        return SlidingWindowSpec(sliding_window=window, **common)

    return ModelLayer(spec, info, writer or writers.cell(total, head_size, v_size), stage)


def mla(
    channels: int,
    *,
    bs: int = 16,
    dtype: Any = BF16,
    backend: str = "FLASHMLA",
    cache_dtype: str = "auto",
    platform: str = "cuda",
    writer: Any = None,
    stage: int = 0,
    window: int | None = None,
    **options: Any,
) -> ModelLayer:
    """A latent, or a cache with the same specification."""
    info = LayerInfo(backend, cache_dtype, platform)

    def spec(place: RankPlace) -> Any:
        common: dict[str, Any] = {
            "block_size": bs,
            "num_kv_heads": 1,
            **since_0_31(max_tp_shards=1),
            "head_size": channels,
            "dtype": dtype,
            **options,
        }
        if window is None:
            return MLAAttentionSpec(**common)
        return SlidingWindowMLASpec(sliding_window=window, **common)

    tokens_per_state = int(options.get("tokens_per_state", 1))
    return ModelLayer(spec, info, writer or writers.latent("latent", tokens_per_state), stage)


def indexer(bs: int = 16, platform: str = "cuda", stage: int = 0) -> ModelLayer:
    """The sparse indexer of DeepSeek-V3.2: 128 values and one float32 scale per token."""
    writer = writers.scaled_rows(128, 4, ("index_k", "index_scale"))
    made = mla(
        132, bs=bs, dtype=torch.uint8, backend="DEEPSEEK_V32_INDEXER", platform=platform, writer=writer, stage=stage
    )
    return ModelLayer(made.spec, LayerInfo("DEEPSEEK_V32_INDEXER", "", platform), writer, stage)


def ring(
    capacity: int, channels: int, *parts: str, backend: str = "CompressorBackend", dtype: Any = FP32
) -> ModelLayer:
    """The last tokens of a request, in one part or in several that have names."""

    def spec(place: RankPlace) -> Any:
        return CircularBufferSpec(
            block_size=capacity, num_kv_heads=max(1, len(parts)), head_size=channels, head_size_v=0, dtype=dtype,
            **since_0_31(dcp_sharded=False),
        )  # fmt: skip

    return ModelLayer(spec, LayerInfo(backend, "", "cuda"), writers.ring(*parts))


def state(
    form: str,
    sizes: dict[str, int],
    shapes: Callable[[RankPlace, int], Any],
    writer: Any,
    *,
    dtypes: tuple[Any, ...] = (BF16, FP32),
    num_spec: int = 0,
    padded: Any = None,
    stage: int = 0,
    is_replicated: bool = False,
) -> ModelLayer:
    """A recurrent layer, its shapes by vLLM's own calculators."""

    def spec(place: RankPlace) -> Any:
        found = shapes(place, num_spec)
        return MambaSpec(
            block_size=4096,
            shapes=tuple(found),
            dtypes=dtypes[: len(found)],
            page_size_padded=padded(place) if callable(padded) else padded,
            num_speculative_blocks=num_spec,
            tp_replicated=is_replicated,
        )

    return ModelLayer(spec, LayerInfo("MAMBA", "", "cuda", state_form=form, state_sizes=sizes), writer, stage)


SHAPES = mamba_utils.MambaStateShapeCalculator


def mamba2(
    heads: int, head_dim: int, groups: int, size: int, kernel: int, *, dim_first: bool, **options: Any
) -> ModelLayer:
    return state(
        "mamba2",
        {
            "num_heads": heads,
            "head_dim": head_dim,
            "n_groups": groups,
            "ssm_state_size": size,
            "conv_kernel_size": kernel,
        },
        lambda place, spec: SHAPES.mamba2_state_shape(
            place.tp_size, heads * head_dim, groups, heads, head_dim, size, kernel, spec
        ),
        writers.mamba2(heads, head_dim, groups, size, kernel - 1, dim_first),
        **options,
    )


def mamba1(channels: int, size: int, kernel: int, *, dim_first: bool, **options: Any) -> ModelLayer:
    return state(
        "mamba1",
        {"intermediate_size": channels, "ssm_state_size": size, "conv_kernel_size": kernel},
        lambda place, spec: SHAPES.mamba1_state_shape(place.tp_size, channels, size, kernel),
        writers.mamba1(channels, size, kernel - 1, dim_first),
        **options,
    )


def gated_delta(
    k_heads: int, v_heads: int, k: int, v: int, kernel: int, *, dim_first: bool, **options: Any
) -> ModelLayer:
    return state(
        "gated-delta",
        {"num_k_heads": k_heads, "num_v_heads": v_heads, "head_k_dim": k, "head_v_dim": v, "conv_kernel_size": kernel},
        lambda place, spec: SHAPES.gated_delta_net_state_shape(place.tp_size, k_heads, v_heads, k, v, kernel, spec),
        writers.gated_delta(k_heads, v_heads, k, v, kernel - 1, dim_first),
        **options,
    )


def kimi_delta(heads: int, width: int, kernel: int, *, dim_first: bool, **options: Any) -> ModelLayer:
    return state(
        "kimi-delta",
        {"num_heads": heads, "head_dim": width, "conv_size": kernel},
        lambda place, spec: SHAPES.kda_state_shape(place.tp_size, heads, width, conv_kernel_size=kernel, num_spec=spec),
        writers.gated_delta(heads, heads, width, width, kernel - 1, dim_first),
        **options,
    )


def short_conv(channels: int, kernel: int, *, dim_first: bool, **options: Any) -> ModelLayer:
    return state(
        "short-conv",
        {"conv_dim": channels, "L_cache": kernel},
        lambda place, spec: SHAPES.short_conv_state_shape(place.tp_size, channels, kernel, spec),
        writers.short_conv(channels, kernel - 1, dim_first),
        **options,
    )


def position_conv(channels: int, taps: int, *, dim_first: bool, **options: Any) -> ModelLayer:
    return state(
        "position-conv",
        {"hc_hidden_size": channels, "conv_state_len": taps},
        lambda place, spec: SHAPES.short_conv_state_shape(1, channels, taps + 1, spec),
        writers.position_conv(channels, taps, dim_first),
        is_replicated=True,
        **options,
    )


def linear(heads: int, width: int, **options: Any) -> ModelLayer:
    return state(
        "linear",
        {"num_heads": heads, "head_dim": width},
        lambda place, spec: SHAPES.linear_attention_state_shape(heads, place.tp_size, width),
        writers.linear(heads, width),
        dtypes=(FP32,),
        **options,
    )


def llama(total: int = 4, head_size: int = 8, layers: int = 2, **options: Any) -> Layers:
    return {name(i): attention(total, head_size, **options) for i in range(layers)}


def gemma4(bs: int = 16, **options: Any) -> Layers:
    """Windows of 8 heads of 32, every third layer 2 heads of 64: twice the bytes per token at TP 1, half at TP 8."""
    return {
        name(i): attention(2, 64, bs=bs, **options) if i % 3 == 2 else attention(8, 32, bs=bs, window=40, **options)
        for i in range(7)
    }


def speculative(draft_heads: int, draft_tp: int | None = None) -> Any:
    """As much of a SpeculativeConfig as describing a draft takes."""
    arch = SimpleNamespace(total_num_kv_heads=draft_heads, per_layer_overrides=None)
    model = SimpleNamespace(model_arch_config=arch, hf_text_config=SimpleNamespace())
    parallel = {} if draft_tp is None else {"tensor_parallel_size": draft_tp}
    return SimpleNamespace(
        draft_model_config=model,
        draft_parallel_config=SimpleNamespace(**parallel),
        method="eagle3",
        use_eagle=lambda: True,
        use_eagle_block_drop=lambda: False,
    )


def with_scales(layers: Layers, k: float, v: float) -> Layers:
    """The same layers with the scales that their fp8 values are multiplied by."""
    return {key: replace(layer, info=replace(layer.info, scales=(k, v))) for key, layer in layers.items()}
