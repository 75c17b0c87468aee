"""What a worker hands to `describe_rank` besides plain layers: kernel blocks, stages, shared names, drafts, unknown pages."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from tests.vllm import models, writers
from tests.vllm.engines import build, fake_config, give_pages, read, refused, reshard, run, write
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)

from kvreshard.model import LayoutMismatch, merge_ranks
from kvreshard.model.changed import replace
from kvreshard.model.wire import decode, encode
from kvreshard.vllm.describe import describe_rank
from kvreshard.vllm.describe.layer_info import LayerInfo
from kvreshard.vllm.describe.place import RankPlace
from kvreshard.vllm.versions import release

pytestmark = pytest.mark.vllm
TOKENS = 70


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
@pytest.mark.parametrize("kernel", [8, 16, 48])
def test_kernel_blocks_inside_a_page(order: str, kernel: int) -> None:
    src = build("prefill", models.llama(bs=48), order=order, kernel=lambda spec: kernel)
    dst = build("decode", models.llama(bs=32), tp=2, order="LBHNC", kernel=lambda spec: 16)
    assert src.caches[0][models.name(0)].shape[0] == 12 * 48 // kernel
    reshard(src, dst, TOKENS)


def test_kernel_blocks_next_to_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer under Nemotron: the page is many kernel blocks, another number on each side; states are not split."""
    layers = {
        models.name(0, "mixer"): models.mamba2(8, 4, 4, 6, 4, dim_first=False),
        models.name(1): models.attention(4, 8, bs=48),
    }

    def kernel(tokens: int) -> Any:
        return lambda spec: tokens if isinstance(spec, FullAttentionSpec) else None

    src = build("prefill", layers, kernel=kernel(16), blocks=20)
    dst = build("decode", {**layers, models.name(1): models.attention(4, 8, bs=96)}, tp=2, kernel=kernel(32), blocks=20)
    reshard(src, dst, TOKENS)


@pytest.mark.parametrize("interior", ["slots", "scaled-cell", "diffkv", "cpu"])
def test_insides_of_pages(interior: str) -> None:
    plain = {models.name(i): models.attention(4, 8, bs=32) for i in range(2)}
    if interior == "slots":
        info = LayerInfo("B12X", "auto", "cuda")
        packed = {"num_head_slots": 2, "state_content_bytes": lambda place: models.held(4, place) * 8 * 2}
        layer = models.attention(4, 8, info=info, writer=writers.slots(4, 8), **packed)
        reshard(build("prefill", dict.fromkeys(plain, layer), tp=2), build("decode", plain), TOKENS)
    elif interior == "scaled-cell":
        info = LayerInfo("TRITON_ATTN", "int8_per_token_head", "cuda")
        layer = models.attention(4, 8, dtype=torch.int8, info=info, writer=writers.cell(4, 12), state_content_bytes=24)
        layers = dict.fromkeys(plain, layer)
        reshard(build("prefill", layers, tp=2), build("decode", layers, order="LBNHC"), TOKENS)
    elif interior == "diffkv":
        info = LayerInfo("FLASH_ATTN_DIFFKV", "auto", "cuda")
        layers = {name: models.attention(4, 12, v_size=8, info=info) for name in plain}
        reshard(build("prefill", layers, tp=2), build("decode", layers, order="BLNHC"), TOKENS)
    else:
        for isa in ("vec", "amx"):
            info = LayerInfo("CPU_ATTN", "auto", isa)
            cpu = {
                name: models.attention(4, 32, bs=32, info=info, writer=writers.cpu_planes(4, 32, isa)) for name in plain
            }
            gpu = {name: models.attention(4, 32, bs=48) for name in plain}
            reshard(build("prefill", cpu, tp=2), build("decode", gpu, order="LBNHC"), TOKENS)
            reshard(build("prefill", gpu), build("decode", cpu), TOKENS)


@pytest.mark.parametrize("interleave", [1, 4, 16])
def test_context_parallelism(interleave: int) -> None:
    gqa, mla = models.llama(total=2), {models.name(0): models.mla(32)}
    for layers, tp, dcp in ((gqa, 8, 2), (gqa, 4, 2), (mla, 4, 4), (mla, 4, 2)):
        options = {"tp": tp, "dcp": dcp, "interleave": interleave, "config": {"kv_heads": 2}}
        sharded = build("prefill", layers, order="LBNHC", **options)
        assert sharded.layout.groups[0].tokens_per_page == 16 * dcp
        plain = build("decode", layers, config={"kv_heads": 2})
        reshard(sharded, plain, TOKENS)
        reshard(plain, build("decode", layers, **options), TOKENS)


def test_pipeline_stages_with_uneven_layers() -> None:
    """Some stages have no layer of some groups, and a rank's offsets count its own layers."""
    layers = models.gemma4()
    config = {"text": {"swa_num_key_value_heads": 8}, "kv_heads": 2}
    late = {name: replace(layer, stage=min(1, i // 4)) for i, (name, layer) in enumerate(layers.items())}
    src = build("prefill", late, tp=2, pp=2, blocks=40, config=config)
    dst = build("decode", layers, order="BLHNC", blocks=40)
    assert [rank.place for rank in src.layout.ranks][2] == (("pp", 1), ("tp", 0))
    reshard(src, dst, TOKENS)
    only = {name: replace(layer, stage=0 if i % 3 == 2 else 1) for i, (name, layer) in enumerate(layers.items())}
    reshard(build("prefill", only, pp=2, blocks=40), dst, TOKENS)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_a_stage_without_states(order: str) -> None:
    """Its part of the group of states says what the specification says, so that the engine's parts agree."""
    layers = {
        models.name(0, "mixer"): replace(models.mamba2(8, 4, 4, 6, 4, dim_first=False), stage=1),
        models.name(1): models.attention(4, 8, bs=32),
    }
    src = build("prefill", layers, pp=2, order=order)
    assert [group.tokens_per_page for group in src.layout.groups] == [None, 32]
    reshard(src, build("decode", {name: replace(layer, stage=0) for name, layer in layers.items()}), TOKENS)


def described(layers: dict[str, Any], config: Any, groups: list[KVCacheGroupSpec], caches: dict[str, Any]) -> Any:
    """One rank from a configuration made by hand."""
    kv_cache_config = KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)
    return describe_rank(
        engine="prefill",
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        kv_caches=caches,
        place=RankPlace(),
        info=layers,
    )


def by_hand(**options: Any) -> tuple[FullAttentionSpec, Any]:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, **options)
    return spec, torch.zeros(4, 2, 16, 16, dtype=torch.bfloat16)


def test_a_shared_cache_has_fields_under_one_name() -> None:
    spec, cache = by_hand()
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    info = {names[0]: models.FLASH, names[1]: replace(models.FLASH, shares_with=names[0])}
    layout = described(info, fake_config(), [KVCacheGroupSpec(names, spec)], dict.fromkeys(names, cache))
    assert [field.name for field in layout.fields] == ["model.layers.0.attn.k", "model.layers.0.attn.v"]


def test_every_storage_is_a_region() -> None:
    spec, cache = by_hand()
    other = torch.zeros(4 * 2 * 16 * 16 + 24, dtype=torch.bfloat16)[24:].view(4, 2, 16, 16)
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    layout = described(
        dict.fromkeys(names, models.FLASH),
        fake_config(),
        [KVCacheGroupSpec(names, spec)],
        {names[0]: cache, names[1]: other},
    )
    (rank,) = layout.ranks
    assert [(r.name, r.address, r.device) for r in rank.regions] == [
        ("kv", cache.data_ptr(), "cpu"),
        ("kv1", other.data_ptr() - 48, "cpu"),
    ]
    assert rank.shard_by_field["model.layers.1.attn.k"].offset_bytes == 48
    assert decode(encode(layout)) == layout


def test_groups_that_are_not_transferred_or_have_no_pages_get_no_name() -> None:
    spec, cache = by_hand()
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    groups = [
        KVCacheGroupSpec(["hot"], spec, enable_kv_transfer=False),
        KVCacheGroupSpec(names[:1], spec),
        KVCacheGroupSpec(
            ["encoder"], EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
        ),
    ]
    layout = described({names[0]: models.FLASH}, fake_config(), groups, {names[0]: cache, "hot": cache})
    assert [group.name for group in layout.groups] == ["g0"]
    assert {(group.num_pages, group.null_page) for group in layout.groups} == {(4, 0)}


@pytest.mark.parametrize(
    ("tp", "held", "draft_tp", "total"), [(4, 1, None, 2), (4, 2, None, 8), (4, 6, 1, 6), (2, 1, 1, 1)]
)
def test_a_draft_has_a_config_of_its_own(tp: int, held: int, draft_tp: int | None, total: int) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=held, head_size=8, dtype=torch.bfloat16)
    cache = torch.zeros(4, held, 16, 16, dtype=torch.bfloat16)
    speculative = models.speculative(draft_heads=total, draft_tp=draft_tp)
    if draft_tp is None:
        speculative.draft_parallel_config.tensor_parallel_size = tp
    config = fake_config(tp=tp, num_layers=2, kv_heads=4, speculative=speculative)
    parts = [
        describe_rank(
            engine="prefill",
            vllm_config=config,
            kv_cache_config=KVCacheConfig(4, [], [KVCacheGroupSpec(["model.layers.2.attn"], spec)]),
            kv_caches={"model.layers.2.attn": cache.clone()},
            place=RankPlace(rank, tp),
            info={"model.layers.2.attn": models.FLASH},
        )
        for rank in range(tp)
    ]
    layout = merge_ranks(parts)
    field = layout.fields[0]
    assert (field.optional, field.axes[1].extent) == (True, total)
    heads = [rank.shards[0].geometry.axis("head").owned for rank in layout.ranks]
    assert [(h.start, h.stop) for h in heads] == [
        (0, total) if draft_tp == 1 else (r * total // tp, r * total // tp + held) for r in range(tp)
    ]


def test_an_unknown_backend_is_an_opaque_page() -> None:
    layers = {
        name: replace(layer, info=LayerInfo("ROCM_ATTN", "auto", "rocm")) for name, layer in models.llama().items()
    }
    src, dst = build("prefill", layers, tp=2), build("decode", layers, tp=2, blocks=9)
    assert [field.axes[2].extent for field in src.layout.fields] == [2 * 16 * 32] * 2
    rng = np.random.default_rng(2)
    for side in (src, dst):
        give_pages(side, TOKENS, rng)
    write(src, TOKENS)
    run(src, dst, TOKENS, rng)
    read(dst, TOKENS)
    for other, what in (
        (build("decode", layers), "axis 'part'"),
        (
            build(
                "decode",
                {name: models.attention(4, 8, bs=32, info=LayerInfo("ROCM_ATTN", "auto", "rocm")) for name in layers},
                tp=2,
            ),
            "tokens per index",
        ),
        (build("decode", layers, tp=2, order="LBNHC"), "encoding"),
        (build("decode", models.llama(), tp=2), "not in engine"),
    ):
        with pytest.raises(LayoutMismatch, match=what):
            run(src, other, TOKENS, rng)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_an_opaque_page_in_pieces(order: str) -> None:
    info = LayerInfo("ROCM_ATTN", "auto", "rocm")
    layers = {name: replace(layer, info=info) for name, layer in models.llama().items()}
    src, dst = build("prefill", layers, order=order), build("decode", layers, order=order, blocks=9)
    rng = np.random.default_rng(2)
    for side in (src, dst):
        give_pages(side, TOKENS, rng)
    write(src, TOKENS)
    run(src, dst, TOKENS, rng)
    read(dst, TOKENS)


def test_an_unknown_page_that_all_ranks_hold_goes_to_any_number_of_ranks() -> None:
    layers = {models.name(0): models.mla(32, backend="ROCM_AITER_MLA", platform="rocm")}
    src, dst = build("prefill", layers, tp=2), build("decode", layers)
    rng = np.random.default_rng(2)
    for side in (src, dst):
        give_pages(side, TOKENS, rng)
    write(src, TOKENS)
    run(src, dst, TOKENS, rng)
    read(dst, TOKENS)


def test_pages_that_a_backend_repacks_are_opaque() -> None:
    """ROCm's attention calls itself FLASH_ATTN and shuffles pages exactly when it repacks them."""
    packed = {"num_head_slots": 2, "state_content_bytes": lambda place: 4 * 8 * 2}
    layer = models.attention(4, 8, info=LayerInfo("FLASH_ATTN", "auto", "rocm"), **packed)
    layout = build("prefill", {models.name(0): layer}).layout
    assert [field.name for field in layout.fields] == [f"{models.name(0)}.page"]
    assert "/FLASH_ATTN/rocm/auto/bfloat16/" in layout.fields[0].encoding


def test_heads_are_not_asked_for_where_the_page_is_opaque() -> None:
    info = LayerInfo("ROCM_ATTN", "auto", "rocm")
    layers = {name: replace(layer, info=info) for name, layer in models.llama().items()}
    assert len(build("prefill", layers, tp=8).layout.fields) == 2


def test_opaque_pages_tell_scales_apart() -> None:
    layers = {models.name(0): models.attention(4, 8, dtype=torch.uint8, info=LayerInfo("ROCM_ATTN", "fp8", "rocm"))}
    one, two = (build("prefill", models.with_scales(layers, 1.0, v)) for v in (1.0, 0.25))
    with pytest.raises(LayoutMismatch, match=r"scales=1,0\.25"):
        run(one, two, TOKENS, np.random.default_rng(0))


def test_what_is_refused() -> None:
    spec, cache = by_hand()
    name = "model.layers.0.attn"
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)

    def one(own: Any = spec, tensor: Any = cache, **info: Any) -> Any:
        caches = {} if tensor is None else {name: tensor}
        found = replace(models.FLASH, **info)
        return lambda: described({name: found}, fake_config(), [KVCacheGroupSpec([name], own)], caches)

    refused(f"'{name}'|CrossAttentionSpec|encoder", one(cross))
    refused(f"'{name}' of group 'g0'|no registered cache", one(tensor=None))
    refused(f"'{name}'|(3, 16, 32)|(2, 16, 32)", one(tensor=torch.zeros(4, 3, 16, 16, dtype=torch.bfloat16)))
    refused(f"'{name}'|shape (4, 2, 16)", one(tensor=torch.zeros(4, 2, 16, dtype=torch.bfloat16)))
    refused(f"'{name}'|5 blocks|4 pages", one(tensor=torch.zeros(5, 2, 16, 16, dtype=torch.bfloat16)))
    refused(f"'{name}'|2 bytes each", one(tensor=torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)[..., ::2]))
    refused("make no dense page", one(tensor=torch.zeros(8, 2, 8, 20, dtype=torch.bfloat16)[..., :16]))


def test_a_ring_that_is_a_window_by_its_class_is_refused() -> None:
    """0.30 and 0.31 have such a specification; later releases have none of that name."""
    if release().minor >= (0, 32):
        assert not hasattr(kv_cache_interface, "KpoolTailSpec")
        return
    name = "model.layers.0.tail"
    cache = torch.zeros(4, 1, 16, 16, dtype=torch.bfloat16)
    window = kv_cache_interface.KpoolTailSpec(
        block_size=16, num_kv_heads=1, head_size=16, head_size_v=0, dtype=torch.bfloat16, sliding_window=4
    )
    group = [KVCacheGroupSpec([name], window)]
    refused(
        f"'{name}'|KpoolTailSpec|ring|cannot be moved",
        lambda: described({name: models.FLASH}, fake_config(), group, {name: cache}),
    )


def test_heads_that_the_config_does_not_explain_are_refused() -> None:
    refused(
        "1 KV head of 4 parts|total_num_kv_heads = 8",
        lambda: build("p", models.llama(total=4), tp=4, config={"kv_heads": 8}),
    )
    refused("total_num_kv_heads = 3", lambda: build("p", models.llama(total=4), tp=4, config={"kv_heads": 3}))
