"""Latent caches and what lies beside them: packed rows, indexers, compressors, rings, drafts of another kind."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm import models, writers
from tests.vllm.engines import LAYOUTS, Side, build, reshard

from kvreshard.model import LayoutMismatch
from kvreshard.model.changed import replace
from kvreshard.plan import match_fields
from kvreshard.vllm.describe import paged
from kvreshard.vllm.describe.layer_info import LayerInfo

pytestmark = pytest.mark.vllm
TOKENS = 150


@pytest.mark.parametrize("order", LAYOUTS)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
def test_a_latent_on_every_rank(order: str, cache_dtype: str) -> None:
    options = {
        "auto": {},
        "fp8": {"dtype": torch.uint8},
        "fp8_ds_mla": {"dtype": torch.uint8, "state_content_bytes": 656, "backend": "FLASHMLA_SPARSE"},
    }[cache_dtype]
    layers = {models.name(i): models.mla(576, bs=64, cache_dtype=cache_dtype, **options) for i in range(2)}
    others = {models.name(i): models.mla(576, bs=32, cache_dtype=cache_dtype, **options) for i in range(2)}
    src, dst = build("prefill", layers, order=order, tp=2), build("decode", others, order="LBNHC")
    assert {field.element_bytes for field in src.layout.fields} == {2 if cache_dtype == "auto" else 1}
    reshard(src, dst, TOKENS)


@pytest.mark.parametrize("orders", [("LBHNC", "BLHNC"), ("BLNHC", "LBNHC")])
@pytest.mark.parametrize("manager_tokens", [64, 128])
def test_an_indexer_beside_a_latent(orders: tuple[str, str], manager_tokens: int) -> None:
    """One group of two page sizes. Its values and scales are laid out per kernel block of 64 tokens."""
    sides = []
    for engine, order, bs in zip(("prefill", "decode"), orders, (manager_tokens, 64), strict=True):
        bs = 64 if order[0] == "B" else bs  # pages of block-outer orders are not split
        layers = {}
        for i in range(2):
            layers[models.name(i, "self_attn.indexer.k_cache")] = models.indexer(bs)
            layers[models.name(i)] = models.mla(576, bs=bs)
        sides.append(build(engine, layers, order=order, tp=2, kernel=lambda spec: 64))
    assert len(sides[0].layout.groups) == 1
    reshard(*sides, TOKENS)


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC"])
def test_compressed_latents(order: str) -> None:
    """DeepSeek-V4: windows, compressed latents with an indexer, and the compressor's window, in four page sizes."""
    fp8 = {"dtype": torch.uint8, "cache_dtype": "fp8_ds_mla", "state_content_bytes": 584, "alignment": 576}
    rows = ("latent", "latent_scale")

    def packed(ratio: int, backend: str, bs: int, window: int | None = None) -> models.ModelLayer:
        extra = {} if window is None else {"model_version": "deepseek_v4"}
        writer = writers.scaled_rows(576, 8, rows, ratio)
        return models.mla(
            512, bs=bs, backend=backend, writer=writer, window=window, tokens_per_state=ratio, **fp8, **extra
        )

    def layers() -> models.Layers:
        found: models.Layers = {}
        for i, ratio in enumerate((1, 4, 128, 4)):
            attn = models.name(i, "attn")
            if ratio == 4:
                keys = writers.scaled_rows(128, 4, ("index_k", "index_scale"), 4)
                index = models.mla(
                    132,
                    bs=256,
                    dtype=torch.uint8,
                    backend="DEEPSEEK_V4_INDEXER",
                    writer=keys,
                    tokens_per_state=4,
                    alignment=576,
                    cache_dtype="",
                )
                found[f"{attn}.indexer.k_cache"] = index
            found[f"{attn}.swa_cache"] = packed(1, "DEEPSEEK_SPARSE_SWA", 64, 128)
            if ratio > 1:
                found[attn] = packed(ratio, "FLASHMLA_SPARSE_DSV4", 256)
                found[f"{attn}.compressor.state_cache"] = models.mla(
                    64,
                    bs=4 if ratio == 4 else 8,
                    dtype=torch.float32,
                    backend="CompressorBackend",
                    cache_dtype="",
                    window=8 if ratio == 4 else 128,
                    alignment=576,
                    writer=writers.latent("partial"),
                )
        return found

    src, dst = (
        build("prefill", layers(), order=order, blocks=400),
        build("decode", layers(), order=order, tp=2, blocks=400),
    )
    assert not [field.name for field in src.layout.fields if field.encoding.startswith("opaque")]
    reshard(src, dst, 300)


def test_rings_of_different_length() -> None:
    layers = {models.name(0, "compressor.state_cache"): models.ring(8, 6), models.name(0): models.mla(16, bs=16)}
    longer = {**layers, models.name(0, "compressor.state_cache"): models.ring(16, 6)}
    src, dst = build("prefill", layers, order="BLHNC"), build("decode", longer, order="BLHNC", tp=2)
    assert [group.tokens_per_page for group in src.layout.groups] == [8, 16]
    dst.ring_tokens = 8
    reshard(src, dst, 37)


def test_a_draft_of_keys_and_values_beside_a_latent() -> None:
    """Kimi-K2.5 with Eagle-3: one group. The draft may be absent at the source."""
    target = {models.name(i): models.mla(576, bs=64) for i in range(2)}
    draft = {**target, models.name(2): models.attention(4, 16, bs=64)}
    speculative = models.speculative(draft_heads=4)
    options = {"num_layers": 2, "speculative": speculative}
    src = build("prefill", draft, tp=2, config=options, order="LBNHC")
    dst = build("decode", draft, config=options, order="BLHNC")
    assert {field.name: field.optional for field in src.layout.fields} == {
        "model.layers.0.self_attn.attn.latent": False,
        "model.layers.1.self_attn.attn.latent": False,
        "model.layers.2.self_attn.attn.k": True,
        "model.layers.2.self_attn.attn.v": True,
    }
    reshard(src, dst, TOKENS)
    without = build("prefill", target)
    (told,) = match_fields(without.layout, dst.layout).warnings
    assert told.startswith(
        "fields 'model.layers.2.self_attn.attn.k', 'model.layers.2.self_attn.attn.v': in engine 'decode'"
    )


def test_values_of_scales_are_part_of_what_bytes_mean() -> None:
    layers = {models.name(0): models.mla(576, bs=64, cache_dtype="fp8", dtype=torch.uint8)}
    one, two = (build("prefill", models.with_scales(layers, k, 1.0)) for k in (1.0, 0.5))
    assert one.layout.fields[0].encoding == "fp8_e4m3/scale-per-tensor(k=1,v=1)"
    with pytest.raises(LayoutMismatch, match=r"k=0\.5"):
        match_fields(one.layout, two.layout)


@pytest.mark.parametrize("backend", ["DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER"])
def test_keys_with_other_scales_are_other_keys(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 0.33 kernels of SM100 take four UE8M0 bytes where those of other devices, and 0.32's, take a float32: equal sizes."""
    monkeypatch.setattr(paged, "release", lambda: SimpleNamespace(minor=(0, 33)))

    def engine(name: str, has_mx_scales: bool) -> Side:
        made = models.indexer(64)
        info = replace(made.info, backend=backend, has_mx_scales=has_mx_scales)
        return build(name, {models.name(0): replace(made, info=info)}, order="LBHNC")

    reshard(engine("prefill", True), engine("decode", True), TOKENS)
    for src, dst in ((True, False), (False, True)):
        with pytest.raises(LayoutMismatch, match=r"four-ue8m0-per-token.*scale-per-token|scale-per-token.*four-ue8m0"):
            match_fields(engine("prefill", src).layout, engine("decode", dst).layout)


def test_an_opaque_page_of_another_device_is_another_page() -> None:
    """Kernels choose by the device how they fill a page that is not known, such as NVFP4's on Hopper and on Blackwell."""

    def engine(name: str, device: str) -> Side:
        info = LayerInfo("FLASHINFER", "nvfp4", "cuda", device)
        return build(
            name, {models.name(0): models.attention(2, 16, dtype=torch.uint8, info=info)}, config={"kv_heads": 2}
        )

    assert match_fields(engine("prefill", "10.0").layout, engine("decode", "10.0").layout)
    with pytest.raises(LayoutMismatch, match=r"cuda-9\.0.*cuda-10\.0"):
        match_fields(engine("prefill", "9.0").layout, engine("decode", "10.0").layout)
