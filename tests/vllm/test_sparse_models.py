"""Caches of models with an indexer, side by side as each model has them, at the described addresses.

| model | caches |
|---|---|
| MiniMax-M3 | K and V, and one key per token for the indexer |
| GLM-5-Next | delta states, latents, one quantised key per pool of tokens, and the ring of the pool that is not full |
| Qwen4-Exp | delta states, a convolution that every rank has whole, K and V, one key per group of tokens, and the ring of its tokens |
| DeepSeek-V4.1 | windows of latents, compressed latents with an indexer, and the ring of the compressor |
| Inkling | windows and full attention, and the inputs of four convolutions in windows of a few tokens |
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm import models, writers
from tests.vllm.engines import ModelLayer, Side, build, reshard
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvreshard.model import LayoutMismatch
from kvreshard.model.changed import replace
from kvreshard.plan import match_fields
from kvreshard.vllm.describe import paged
from kvreshard.vllm.describe.interiors import Minor
from kvreshard.vllm.describe.layer_info import LayerInfo
from kvreshard.vllm.versions import release

pytestmark = pytest.mark.vllm
TOKENS = 150
BF16, FP32, U8 = torch.bfloat16, torch.float32, torch.uint8


@pytest.fixture(autouse=True)
def dim_first(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Channels before taps, by vLLM's own function."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    return True


def rows(channels: int, backend: str, **options: Any) -> ModelLayer:
    """A key per token, or per entry of several."""
    made = models.mla(channels, backend=backend, cache_dtype="", **options)
    return replace(made, info=LayerInfo(backend, "", "cuda"))


def keys(bs: int, backend: str, tokens: int, alignment: int | None = None) -> ModelLayer:
    """Quantised keys with their scales, one per `tokens` tokens."""
    writer = writers.scaled_rows(128, 4, ("index_k", "index_scale"), tokens)
    return rows(132, backend, bs=bs, dtype=U8, writer=writer, tokens_per_state=tokens, alignment=alignment)


def check(src: Side, dst: Side, num_tokens: int = TOKENS) -> None:
    """Nothing is opaque, and everything arrives."""
    for side in (src, dst):
        assert not [field.name for field in side.layout.fields if field.encoding.startswith("opaque")]
    rings = [group.tokens_per_page for side in (src, dst) for group in side.layout.groups if is_ring(side, group.name)]
    if rings:
        src.ring_tokens = dst.ring_tokens = min(length for length in rings if length)
    reshard(src, dst, num_tokens)


def is_ring(side: Side, group: str) -> bool:
    return any("tail_cache" in name or "state_cache" in name for name in side.layers if side.group_of(name) == group)


@pytest.mark.parametrize("orders", [("LBHNC", "LBNHC"), ("BLHNC", "LBHNC")])
@pytest.mark.parametrize("backend", ["MINIMAX_M3_SPARSE", "CUTLASS_MSA"])
def test_minimax_m3(orders: tuple[str, str], backend: str) -> None:
    def layers(bs: int) -> models.Layers:
        found = {models.name(0): models.attention(4, 16, bs=bs)}
        for number in (1, 2):
            found[models.name(number, "self_attn.attn.index_cache")] = rows(16, "MINIMAX_M3_SPARSE_INDEXER", bs=bs)
            found[models.name(number)] = models.attention(4, 16, bs=bs, info=LayerInfo(backend, "auto", "cuda"))
        return found

    config = {"kv_heads": 4}
    src = build("prefill", layers(128), tp=4, order=orders[0], config=config)
    check(src, build("decode", layers(128), tp=8, order=orders[1], config=config), 300)


@pytest.mark.parametrize(("src_drafts", "dst_drafts"), [(0, 0), (0, 3), (5, 1)])
def test_glm_5_next(src_drafts: int, dst_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of 4 tokens; a ring has whole pools (`glm5next/common/attention.py`, `Glm5NextTailCache`). As since 0.32."""
    monkeypatch.setattr(paged, "release", lambda: SimpleNamespace(minor=max(release().minor, (0, 32))))

    def layers(num_drafts: int) -> models.Layers:
        ring = 4 * (1 << (-(-(4 + num_drafts) // 4) - 1).bit_length())
        state = models.kimi_delta(4, 6, 4, dim_first=True, num_spec=num_drafts)
        attn = models.name(1, "self_attn")
        return {
            models.name(0, "linear_attn"): state,
            f"{attn}.indexer.k_cache": keys(64, "DEEPSEEK_V32_INDEXER", 4),
            f"{attn}.indexer.tail_cache": models.ring(ring, 16, "k", "gate", backend="KPOOL_TAIL", dtype=BF16),
            f"{attn}.attn": models.mla(64, bs=64),
        }

    src = build("prefill", layers(src_drafts), tp=2, order="BLHNC", blocks=40)
    check(src, build("decode", layers(dst_drafts), tp=4, order="BLHNC", blocks=40))


@pytest.mark.parametrize("tps", [(1, 2), (4, 2)])
def test_qwen4_exp(tps: tuple[int, int]) -> None:
    def layers(num_drafts: int) -> models.Layers:
        indexer = models.name(3, "self_attn.indexer")
        ring = 4 * -(-(4 + num_drafts) // 4)
        qsa = "QWEN4_EXP_EXP_QSA_STATE"
        return {
            models.name(0, "ple"): models.position_conv(12, 9, dim_first=True, num_spec=num_drafts),
            models.name(0, "linear_attn"): models.gated_delta(4, 8, 6, 4, 4, dim_first=True, num_spec=num_drafts),
            f"{indexer}.state_cache": models.ring(ring, 28, backend=qsa, dtype=BF16),
            f"{indexer}.compressed_key_cache": rows(16, qsa, bs=64, tokens_per_state=4),
            models.name(3): models.attention(2, 16, bs=64, info=LayerInfo("QWEN4_EXP_QSA_TRITON", "auto", "cuda")),
        }

    src, dst = (
        build(name, layers(drafts), tp=tp, order="BLHNC", blocks=40, config={"kv_heads": 2})
        for name, drafts, tp in zip(("prefill", "decode"), (0, 2), tps, strict=True)
    )
    whole = [s for s in src.layout.ranks[0].shards if s.field == "model.layers.0.ple.conv.x"]
    assert str(whole[0].geometry.axes[0].owned) == "[0, 12)"
    check(src, dst)


V41 = {"fp8_ds_mla": (528, 512, 16), "nvfp4_ds_mla": (288, 256, 32)}


def v41_layers(cache_dtype: str, capacity: int, minor: Minor) -> models.Layers:
    """As `minor` fills them: windows have the wider record of an engine, compressed latents its own."""
    name, alignment = ("fp8_ds_mla", 576) if cache_dtype == "before SM100" else (cache_dtype, 512)
    window = (584, 576, 8) if alignment == 576 else V41["fp8_ds_mla"]
    latent = window if alignment == 576 else V41[cache_dtype]

    def packed(record: tuple[int, int, int], backend: str, bs: int, **options: Any) -> ModelLayer:
        tokens = options.get("tokens_per_state", 1)
        is_inline = minor >= (0, 33) and record[0] != 584
        rows_apart = writers.scaled_rows(*record[1:], ("latent", "latent_scale"), tokens)
        writer = writers.latent("latent", tokens) if is_inline else rows_apart
        return models.mla(
            512, bs=bs, dtype=U8, backend=backend, writer=writer, cache_dtype=name, state_content_bytes=record[0],
            alignment=alignment, model_version="deepseek_v4", **options,
        )  # fmt: skip

    found: models.Layers = {}
    for number, ratio in enumerate((0, 1, 2)):
        attn = models.name(number, "attn")
        found[f"{attn}.swa_cache"] = packed(window, "DEEPSEEK_SPARSE_SWA", 64, window=128)
        if ratio:
            found[f"{attn}.indexer.k_cache"] = keys(128, "DEEPSEEK_V41_INDEXER", ratio, alignment)
            found[attn] = packed(latent, "FLASHMLA_SPARSE_DSV41", 128, tokens_per_state=ratio)
        if ratio == 2:
            found[f"{attn}.compressor.state_cache"] = models.ring(capacity, 32)
    return found


def v41(name: str, cache_dtype: str, capacity: int, minor: Minor, monkeypatch: pytest.MonkeyPatch, tp: int = 1) -> Side:
    """An engine of release `minor`, described as there."""
    monkeypatch.setattr(paged, "release", lambda: SimpleNamespace(minor=minor))
    return build(name, v41_layers(cache_dtype, capacity, minor), order="BLHNC", blocks=60, tp=tp)


@pytest.mark.parametrize("minor", [(0, 31), (0, 32), (0, 33), (0, 34)])
@pytest.mark.parametrize("cache_dtype", [*V41, "before SM100"])
def test_deepseek_v41(cache_dtype: str, minor: Minor, monkeypatch: pytest.MonkeyPatch) -> None:
    src = v41("prefill", cache_dtype, 8, minor, monkeypatch)
    check(src, v41("decode", cache_dtype, 16, minor, monkeypatch, tp=2), 290)


@pytest.mark.parametrize("cache_dtype", V41)
@pytest.mark.parametrize("minors", [((0, 32), (0, 33)), ((0, 33), (0, 32)), ((0, 31), (0, 33))])
def test_releases_that_put_scales_elsewhere_refuse_each_other(
    cache_dtype: str, minors: tuple[Minor, Minor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4.1's rows have as many bytes in both: scales behind all rows of a block until 0.32, in each row since 0.33."""
    src, dst = (
        v41(name, cache_dtype, 8, minor, monkeypatch) for name, minor in zip(("prefill", "decode"), minors, strict=True)
    )
    with pytest.raises(LayoutMismatch) as caught:
        match_fields(src.layout, dst.layout)
    for fact in (
        "prefill",
        "decode",
        "encoding",
        "mxfp8/scale-per-32'",
        "mxfp8/scale-per-32/scales-in-row'",
        "use the same",
    ):
        assert fact in str(caught.value), fact


def test_releases_that_fill_rows_alike_match(monkeypatch: pytest.MonkeyPatch) -> None:
    src = v41("prefill", "before SM100", 8, (0, 32), monkeypatch)
    check(src, v41("decode", "before SM100", 8, (0, 33), monkeypatch, tp=2), 290)


@pytest.mark.parametrize("tps", [(1, 2), (4, 1), (2, 4)])
@pytest.mark.parametrize("orders", [("LBHNC", "LBNHC"), ("LBNHC", "LBHNC")])
def test_inkling(tps: tuple[int, int], orders: tuple[str, str]) -> None:
    """Full layers of 4 heads, windows of 8; the inputs of a head's convolutions are as wide as a power of two."""

    def conv(heads: int, width: int) -> ModelLayer:
        def spec(place: Any) -> Any:
            return SlidingWindowSpec(
                block_size=4, num_kv_heads=models.held(heads, place), head_size=width, head_size_v=0, dtype=BF16,
                sliding_window=4,
            )  # fmt: skip

        return ModelLayer(spec, LayerInfo("INKLING_SCONV_SWA", "", "cuda"), writers.conv_inputs(heads))

    made: Callable[..., ModelLayer] = models.attention
    layers = {
        models.name(0, "conv_state"): conv(4, 256),
        models.name(0): made(4, 16, bs=32),
        models.name(1, "conv_state"): conv(8, 128),
        models.name(1): made(8, 16, bs=32, window=70),
    }
    src, dst = (
        build(
            name, layers, tp=tp, order=order, blocks=400,
            config={"kv_heads": 4, "text": {"swa_num_key_value_heads": 8}},
        )
        for name, tp, order in zip(("prefill", "decode"), tps, orders, strict=True)
    )  # fmt: skip
    check(src, dst)
