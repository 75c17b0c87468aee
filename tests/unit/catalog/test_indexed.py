"""Are models whose attention an indexer chooses, or that convolve what they cache, read as vLLM lays out their caches?

Held to vLLM's own classes elsewhere (`tests/vllm/test_families.py`); here is what they cannot say: other engines, files of multimodal
models, families whose configuration classes come with their files.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.catalog.test_config import LATENT, PLAIN, changed

from kvreshard.catalog import read_model
from kvreshard.catalog.advice import assumed, warnings
from kvreshard.catalog.engine import describe, engine_layers, plan_pages
from kvreshard.catalog.entries import geometry
from kvreshard.catalog.spec import EngineSpec, parse_engine
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, LinearState, Ring, ScaledRows, ShortConv, Style
from kvreshard.kinds.page import DTYPE_BYTES
from kvreshard.model import LayoutError, LayoutMismatch
from kvreshard.plan import compile_route

QWEN: dict[str, Any] = changed(
    PLAIN, model_type="qwen4_exp_text", head_dim=256, num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=32,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4, indexer_n_heads=8, indexer_head_dim=128,
    indexer_compress_ratio=4, ple_layer_ids=[2], hc_count=4,
)  # fmt: skip
GLM: dict[str, Any] = changed(
    PLAIN, model_type="glm5_next_text", linear_num_heads=64, linear_head_dim=128, linear_conv_kernel_dim=4, index_kpool=16,
    index_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=0, num_nextn_predict_layers=1,
)  # fmt: skip
M3: dict[str, Any] = changed(
    PLAIN, model_type="minimax_m3_text", head_dim=128, sparse_attention_config={"sparse_index_dim": 128, "sparse_attention_freq": [0, 1, 1, 1]}
)  # fmt: skip
INKLING: dict[str, Any] = changed(
    PLAIN, model_type="inkling_model", head_dim=128, hidden_size=6144, num_key_value_heads=8, swa_num_key_value_heads=16, swa_head_dim=128,
    sliding_window_size=512, local_layer_ids=[1, 2, 3], num_nextn_predict_layers=3, mtp_config={"local_layer_ids": [0, 2]},
)  # fmt: skip
V41: dict[str, Any] = changed(
    PLAIN, model_type="deepseek_v41_text", head_dim=512, qk_rope_head_dim=64, sliding_window=128, compress_ratios=[0, 1, 2, 2], index_head_dim=128,
    kv_source_layer_ids=[1, 2], index_source_layer_ids=[1, 2, 3],
)  # fmt: skip
LING: dict[str, Any] = changed(PLAIN, model_type="bailing_hybrid", head_dim=128, layer_group_size=2)


@pytest.mark.parametrize(
    ("raw", "drafts", "capacity"),
    [(QWEN, 0, 4), (QWEN, 1, 8), (QWEN, 4, 8), (QWEN, 5, 12), (GLM, 0, 16), (GLM, 1, 32), (GLM, 17, 64)],
)
def test_a_ring_has_whole_groups_and_room_for_drafts(raw: dict[str, Any], drafts: int, capacity: int) -> None:
    """`qsa_cache.py:847` and `glm5next/common/attention.py:162` of vLLM 0.32; GLM doubles."""
    model = read_model("m", raw)
    rings = [layer.kind for layer in model.layers if isinstance(layer.kind, Ring)]
    assert {ring.capacity(Style(speculative_tokens=drafts)) for ring in rings} == {capacity}
    plan = plan_pages(model, EngineSpec(spec=drafts))
    assert [group.tokens_per_page for group in plan.groups if group.name.startswith("ring")] == [capacity]


def test_positions_stand_behind_the_keys_of_a_multimodal_model() -> None:
    rope = {"rope_type": "default", "mrope_section": [11, 11, 10]}
    text = changed(QWEN, rope_parameters=rope)
    for raw, channels in ((text, 128), ({"model_type": "qwen4_exp", "text_config": text}, 140), (QWEN, 128)):
        rings = [layer.kind for layer in read_model("m", raw).layers if isinstance(layer.kind, Ring)]
        assert {ring.channels for ring in rings} == {channels}


def test_qwen4_exp() -> None:
    model = read_model("m", QWEN)
    assert [(layer.name, layer.family) for layer in model.layers] == [
        ("layers.0.delta", "state"), ("layers.1.ple", "state"), ("layers.1.delta", "state"), ("layers.2.delta", "state"),
        ("layers.3.open_keys", "ring"), ("layers.3.indexer", "latent"), ("layers.3.attn", "full"),
        ("mtp.0.open_keys", "ring"), ("mtp.0.indexer", "latent"), ("mtp.0.attn", "full"),
    ]  # fmt: skip
    assert model.layers[1].kind == ShortConv(4 * 4096, 10, "bfloat16", is_replicated=True)
    assert model.layers[5].kind == Latent(128, "bfloat16", tokens_per_state=4)
    assert model.default_order == "BLHNC"


@pytest.mark.parametrize(("tp", "page"), [(2, 544), (4, 288), (32, 288)])
def test_qwen4_exp_has_room_for_a_convolution_that_no_layer_has(tp: int, page: int) -> None:
    """vLLM 0.32 `models/qwen4_exp/nvidia/model.py`, `get_mamba_specs_from_config`: both states count, whatever the layers are."""
    plain = changed(QWEN, ple_layer_ids=[])
    for raw in (QWEN, plain):
        plan = plan_pages(read_model("m", raw), EngineSpec(tp))
        assert [group.tokens_per_page for group in plan.groups if "full" in group.name] == [page], raw
    assert not any("ple" in layer.name for layer in plan.layers)


def test_minimax_m3_in_both_forms_of_its_file() -> None:
    model = read_model("m", M3)
    assert [layer.name for layer in model.layers if layer.family == "latent"] == [
        "layers.1.indexer", "layers.2.indexer", "layers.3.indexer", "mtp.0.indexer",
    ]  # fmt: skip
    untyped = {"model_type": "minimax_m3_vl", "text_config": changed(M3, model_type=None)}
    assert read_model("m", untyped).layers == read_model("m", M3).layers
    types = ["full_attention", *["minimax_m3_sparse"] * 3]
    other = changed(
        M3, model_type="minimax_m3_vl_text", sparse_attention_config=None, layer_types=types, index_head_dim=128
    )
    assert read_model("m", other).layers == model.layers
    assert engine_layers(model, EngineSpec(dtype="fp8_e4m3"))[1].kind == Latent(128, "bfloat16")


def test_glm_5_next_in_both_forms_of_its_file() -> None:
    inner = {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4}
    other = {name: value for name, value in GLM.items() if not name.startswith("linear_")}
    model = read_model("m", GLM)
    assert read_model("m", {**other, "linear_attn_config": inner}).layers == model.layers
    assert model.layers[0].kind == GatedDelta(64, 64, 128, 128, 4, "bfloat16", "float32")


def test_a_packed_form_is_advised_only_where_the_engine_can_have_it() -> None:
    (told,) = assumed(read_model("m", GLM), EngineSpec(dtype="fp8_e4m3"))
    assert told.endswith("vLLM 0.32 packs them, in a form that is not described")
    with pytest.raises(LayoutError, match="has no cache of that dtype"):
        engine_layers(read_model("m", GLM), EngineSpec(dtype="fp8_ds_mla"))


def test_inkling_has_as_many_prediction_layers_as_drafts() -> None:
    model = read_model("m", INKLING)
    inputs, window = Attention(8, 2048, "bfloat16", 0, 4), Attention(16, 1024, "bfloat16", 0, 4)
    assert [layer.kind for layer in model.layers if layer.name.endswith("conv")] == [
        inputs, *[window] * 3, window, inputs, window,
    ]  # fmt: skip
    assert [len(engine_layers(model, EngineSpec(spec=drafts))) for drafts in (0, 1, 2, 9)] == [8, 10, 12, 14]
    assert geometry(model).startswith(
        "1 x window 4, 8 heads x 2048; 1 x full, 8 heads x 128; 3 x window 4, 16 heads x 1024; "
    )


def test_their_caches_are_told_in_one_line() -> None:
    assert "1 x ring of 4 tokens, 1 x 128 channels; 1 x latent, 256 bytes per 4 tokens" in geometry(
        read_model("m", QWEN)
    )
    assert "1 x state, convolution 16384 channels x 9" in geometry(read_model("m", QWEN))
    assert "1 x ring of 16 tokens, 2 x 128 channels" in geometry(read_model("m", GLM))
    assert geometry(read_model("m", LING)) == "2 x state, linear 32 heads x 128 x 128; 2 x latent, 1152 bytes per token"


def test_more_ranks_than_heads_of_a_convolution_do_not_start() -> None:
    told = "tp=16 does not divide the 8 KV heads of 'window' layers; use a divisor"
    assert told in warnings(read_model("m", INKLING), EngineSpec(tp=16))
    assert not warnings(read_model("m", INKLING), EngineSpec(tp=8))


def test_ling_in_both_generations() -> None:
    """The rest behind the last whole group are latents in Ling 3, and linear in Ling 2.5 (`bailing_moe_v3.py:131`)."""
    five = changed(LING, num_hidden_layers=5)
    linear = read_model("m", five).layers
    assert [layer.family for layer in linear] == ["state", "latent", "state", "latent", "state"]
    assert (linear[0].kind, linear[1].kind) == (LinearState(32, 128, "bfloat16"), Latent(576, "bfloat16"))
    delta = read_model("m", changed(five, short_conv_kernel_size=4)).layers
    assert [layer.family for layer in delta] == ["state", "latent", "state", "latent", "latent"]
    assert delta[0].kind == GatedDelta(32, 32, 128, 128, 4, "bfloat16", "float32")


@pytest.mark.parametrize("raw", [QWEN, GLM, M3, INKLING, LING])
@pytest.mark.parametrize(("src", "dst"), [("tp=4", "tp=2,spec=2"), ("tp=1,spec=3", "tp=8"), ("tp=2,pp=2", "tp=4")])
def test_every_engine_can_be_reached(raw: dict[str, Any], src: str, dst: str) -> None:
    model = read_model("m", raw)
    prefill, decode = (describe(model, parse_engine(text), name) for text, name in ((src, "p"), (dst, "d")))
    assert compile_route(prefill, decode, 0).transfers


@pytest.mark.parametrize(
    ("raw", "engine", "told"),
    [
        (GLM, "order=LBHNC", "rings of model 'm' only in orders with pages outermost; use BLHNC"),
        (GLM, "page.ring=8", "that of a ring all its entries"),
        (changed(GLM, index_kpool=0), "", "field 'index_kpool': is 0"),
        (changed(QWEN, ple_layer_ids=[5]), "", "field 'ple_layer_ids[0]': is 5; give numbers from 1 to 4"),
        (changed(QWEN, layer_types=["conv"] * 4), "", "layer_types[0]"),
        (changed(M3, num_mtp_modules=10**9), "", "num_mtp_modules"),
        (changed(M3, sparse_attention_config={"sparse_attention_freq": [1]}), "", "sparse_attention_config.sparse_attention_freq"),
        (changed(INKLING, local_layer_ids=[9]), "", "local_layer_ids[0]"),
        (changed(INKLING, mtp_config={"local_layer_ids": [3]}), "", "mtp_config.local_layer_ids[0]"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_clear_error(raw: dict[str, Any], engine: str, told: str) -> None:
    with pytest.raises(LayoutError) as caught:
        plan_pages(read_model("m", raw), parse_engine(engine) if engine else EngineSpec())
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "window", "latents"),
    [
        ("auto", 528, 528),
        ("fp8_ds_mla", 528, 528),
        ("nvfp4_ds_mla", 528, 288),
        ("fp8_ds_mla_v4", 584, 584),
        ("bf16", 1024, 1024),
    ],
)
def test_the_records_of_latents_are_those_of_the_cache_dtype(dtype: str, window: int, latents: int) -> None:
    """`deepseek_v41/sparse_mla.py` of vLLM 0.32: 512 values and 16 scales, 256 bytes of pairs and 32 scales, V4's 576 and 8."""
    layers = engine_layers(read_model("m", V41), parse_engine(f"dtype={dtype}"))
    bytes_of = {layer.name: record_bytes(layer.kind) for layer in layers if not isinstance(layer.kind, Ring)}
    assert bytes_of == {
        **{f"layers.{index}.window": window for index in range(4)},
        **{f"layers.{index}.attn": latents for index in (1, 2)},
        **{f"layers.{index}.indexer": 132 for index in (1, 2)},
    }


@pytest.mark.parametrize(
    ("drafts", "given", "windows"),
    [(0, {}, 4), (5, {}, 7), (5, {"num_nextn_predict_layers": 1}, 5), (5, {"n_mtp_layers": 2}, 6)],
)
def test_layers_that_draft_keep_windows_alone(drafts: int, given: dict[str, int], windows: int) -> None:
    """Three where the file does not say (`deepseek_v41/nvidia/dspark.py:89`); seen to be so with its class on one of two ranks."""
    layers = engine_layers(read_model("m", changed(V41, **given)), EngineSpec(spec=drafts))
    assert sum(layer.family == "window" for layer in layers) == windows


def test_latents_of_one_gpu_are_not_read_by_another() -> None:
    model = read_model("m", V41)
    new, old = describe(model, EngineSpec(tp=2), "new"), describe(model, EngineSpec(dtype="fp8_ds_mla_v4"), "old")
    with pytest.raises(
        LayoutMismatch, match=r"mxfp8.* in engine 'new' and .*fp8_ds_mla.* in engine 'old': use the same cache dtype"
    ):
        compile_route(new, old, 0)


INDEXED, FULL = "indexed_attention", "full_attention"


@pytest.mark.parametrize(
    ("types", "shared", "has_indexer"),
    [
        (None, None, [False] * 5),
        ([INDEXED] * 4, None, [True, True, False, False, True]),
        ([INDEXED] * 4, ["full", "shared", "full", "shared"], [True, False, True, False, True]),
        ([FULL, INDEXED, "sparse", FULL], ["full"] * 4, [False, True, True, False, False]),
    ],
)
def test_hy_v4_has_indexers_where_its_layers_choose(
    types: list[str] | None, shared: list[str] | None, has_indexer: list[bool]
) -> None:
    raw = changed(LATENT, model_type="hy_v4", index_head_dim=128, layer_types=types, indexer_types=shared)
    names = [layer.name for layer in read_model("m", raw).layers]
    assert [f"{name}.indexer" in names for name in (*(f"layers.{i}" for i in range(4)), "mtp.0")] == has_indexer
    assert not any(layer.predicts for layer in read_model("m", {**raw, "num_nextn_predict_layers": 0}).layers)


def test_ratios_of_another_model_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"compress_ratios\[1\].* is 4"):
        read_model("m", changed(V41, compress_ratios=[0, 4, 2, 2]))


def record_bytes(kind: Kind) -> int:
    """Bytes of one state."""
    if isinstance(kind, ScaledRows):
        return kind.row_bytes + kind.scale_bytes
    assert isinstance(kind, Latent)
    return kind.channels * DTYPE_BYTES[kind.dtype]
