"""Does a config.json of each family give the caches that its own sources state, and is a bad one refused by name?"""

import copy
from typing import Any

import pytest

from kvreshard.catalog import Model, read_model
from kvreshard.catalog.entries import geometry
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, Mamba1, Mamba2, ScaledRows, ShortConv
from kvreshard.model import LayoutError

PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LATENT: dict[str, Any] = {**PLAIN, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
NEMOTRON: dict[str, Any] = {
    **PLAIN,
    "model_type": "nemotron_h",
    "head_dim": 128,
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
}
GRANITE: dict[str, Any] = {
    **PLAIN,
    "model_type": "granitemoehybrid",
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
GEMMA_4: dict[str, Any] = {
    **PLAIN,
    "model_type": "gemma4_text",
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "sliding_window": 1024,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
DELTA: dict[str, Any] = {
    **PLAIN,
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def kinds(model: Model) -> dict[str, Kind]:
    return {layer.name: layer.kind for layer in model.layers}


def windows(model: Model) -> list[int | None]:
    return [layer.kind.window_tokens for layer in model.layers]


def changed(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """`raw` with fields replaced; None removes one."""
    made = {**copy.deepcopy(raw), **fields}
    return {name: value for name, value in made.items() if value is not None}


def test_plain_attention() -> None:
    model = read_model("m", PLAIN)
    assert model.num_layers == 4
    assert kinds(model) == {f"layers.{i}.attn": Attention(8, 128, "bfloat16") for i in range(4)}
    assert read_model("m", changed(PLAIN, head_dim=64)).layers[0].kind == Attention(8, 64, "bfloat16")
    assert read_model("m", changed(PLAIN, num_key_value_heads=None)).layers[0].kind == Attention(32, 128, "bfloat16")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False}, [None] * 4),
        ({"model_type": "qwen3", "head_dim": 128, "sliding_window": 64}, [None] * 4),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
         [None, None, None, 64]),
        ({"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}, [128, None, 128, None]),
        ({"model_type": "gemma2", "head_dim": 64, "sliding_window": 64, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
         [None, None, None, 64]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, [64, None, 64, None]),
        ({"model_type": "another", "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, [64] * 4),
    ],
)  # fmt: skip
def test_windows(fields: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read_model("m", changed(PLAIN, **fields))) == expected


def test_gemma_3_fills_in_what_its_files_leave_out() -> None:
    model = read_model("m", {"model_type": "gemma3_text", "dtype": "bfloat16", "num_hidden_layers": 6})
    assert windows(model) == [4096] * 5 + [None]
    assert model.layers[5].kind == Attention(4, 256, "bfloat16")


def test_the_language_model_of_a_multimodal_file() -> None:
    inner = changed(PLAIN, torch_dtype=None)
    model = read_model("m", {"model_type": "wrapper", "torch_dtype": "float16", "text_config": inner})
    assert model.layers[0].kind == Attention(8, 128, "float16")


def test_gemma_4_full_layers_have_their_own_heads_and_width() -> None:
    model = read_model("m", GEMMA_4)
    assert kinds(model)["layers.0.attn"] == Attention(8, 256, "bfloat16", window_tokens=1024)
    assert kinds(model)["layers.3.attn"] == Attention(2, 512, "bfloat16")
    unequal = read_model("m", changed(GEMMA_4, attention_k_eq_v=False))
    assert kinds(unequal)["layers.3.attn"] == Attention(8, 512, "bfloat16")


def test_layers_that_share_have_no_cache() -> None:
    model = read_model("m", changed(GEMMA_4, num_kv_shared_layers=2))
    assert list(kinds(model)) == ["layers.0.attn", "layers.1.attn"]
    assert model.num_layers == 4


def test_latent_and_its_prediction_layer() -> None:
    model = read_model("m", changed(LATENT, num_nextn_predict_layers=1))
    assert kinds(model)["layers.3.attn"] == Latent(576, "bfloat16")
    last = model.layers[-1]
    assert (last.name, last.optional, last.predicts) == ("mtp.0.attn", True, True)
    assert model.layers[0].kind_for("fp8_ds_mla") == Latent(576, "uint8", "fp8_ds_mla", 656)
    assert model.layers[0].kind_for("fp8_e4m3") == Latent(576, "fp8_e4m3", "scale-per-tensor")


def test_sparse_latent_registers_its_indexer_first() -> None:
    model = read_model("m", changed(LATENT, model_type="deepseek_v32", index_head_dim=128))
    assert list(kinds(model))[:2] == ["layers.0.indexer", "layers.0.attn"]
    keys = model.layers[0].kind
    assert isinstance(keys, ScaledRows)
    assert (keys.row_bytes, keys.scale_bytes, keys.kernel_tokens) == (128, 4, 64)


def test_deepseek_v4_layers_by_ratio() -> None:
    raw = changed(
        LATENT, model_type="deepseek_v4", head_dim=512, sliding_window=128, index_head_dim=128,
        compress_ratios=[0, 4, 128, 1, 0], num_nextn_predict_layers=1,
    )  # fmt: skip
    model = read_model("m", raw)
    assert list(kinds(model)) == [
        "layers.0.window",
        "layers.1.indexer",
        "layers.1.indexer_compressor",
        "layers.1.window",
        "layers.1.attn",
        "layers.1.compressor",
        "layers.2.window",
        "layers.2.attn",
        "layers.2.compressor",
        "layers.3.window",
        "mtp.0.window",
    ]
    assert model.default_order == "BLHNC"
    with pytest.raises(LayoutError, match=r"compress_ratios\[1\].*is 8.*known are 0, 1, 4 and 128"):
        read_model("m", changed(raw, compress_ratios=[0, 8, 128, 1]))
    with pytest.raises(LayoutError, match="has 3 entries for 4 decoder layers"):
        read_model("m", changed(raw, compress_ratios=[0, 4, 128]))


def test_nemotron_by_pattern_or_list() -> None:
    model = read_model("m", NEMOTRON)
    assert kinds(model) == {
        "layers.0.mamba": Mamba2(64, 64, 8, 128, 4, "bfloat16", "float32"),
        "layers.2.attn": Attention(8, 128, "bfloat16"),
    }
    listed = changed(
        NEMOTRON, hybrid_override_pattern=None, layers_block_type=["mamba", "mlp", "full_attention", "moe"]
    )
    assert kinds(read_model("m", listed)) == kinds(model)
    predicting = read_model("m", changed(NEMOTRON, num_nextn_predict_layers=2, mtp_hybrid_override_pattern="*E"))
    assert [layer.name for layer in predicting.layers if layer.predicts] == ["mtp.0.attn", "mtp.1.attn"]
    stated = read_model("m", changed(NEMOTRON, mamba_ssm_cache_dtype="bfloat16")).layers[0].kind
    assert isinstance(stated, Mamba2)
    assert stated.state_dtype == "bfloat16"


def test_granite_and_falcon() -> None:
    model = read_model("m", GRANITE)
    assert list(kinds(model)) == ["layers.0.mamba", "layers.1.attn", "layers.2.mamba", "layers.3.mamba"]
    auto = read_model("m", changed(GRANITE, mamba_d_head="auto"))
    assert kinds(auto) == kinds(model)
    falcon = changed(GRANITE, model_type="falcon_h1", layer_types=None, mamba_d_ssm=8192)
    assert list(kinds(read_model("m", falcon)))[:2] == ["layers.0.attn", "layers.0.mamba"]
    with pytest.raises(LayoutError, match=r"mamba_d_head.*64 for 128 heads.*inner size is 4096"):
        read_model("m", changed(falcon, mamba_d_ssm=4096))


def test_jamba_period_and_offset() -> None:
    raw = changed(PLAIN, model_type="jamba", attn_layer_period=4, attn_layer_offset=1, mamba_expand=2,
                  mamba_d_state=16, mamba_d_conv=4)  # fmt: skip
    model = read_model("m", raw)
    assert list(kinds(model)) == ["layers.0.mamba", "layers.1.attn", "layers.2.mamba", "layers.3.mamba"]
    assert model.layers[0].kind == Mamba1(8192, 16, 4, "bfloat16", "bfloat16")
    with pytest.raises(LayoutError, match=r"attn_layer_offset.*must be below attn_layer_period 4"):
        read_model("m", changed(raw, attn_layer_offset=4))


def test_gated_delta() -> None:
    model = read_model("m", changed(DELTA, mamba_ssm_dtype="float32", mtp_num_hidden_layers=1))
    assert list(kinds(model)) == ["layers.0.delta", "layers.1.delta", "layers.2.delta", "layers.3.attn", "mtp.0.attn"]
    assert model.layers[0].kind == GatedDelta(16, 32, 128, 64, 4, "bfloat16", "float32")
    next_model = read_model("m", changed(DELTA, model_type="qwen3_next"))
    assert [layer.name for layer in next_model.layers if layer.optional] == ["mtp.0.attn"]


def test_states_only() -> None:
    two = {"model_type": "mamba2", "dtype": "float32", "num_hidden_layers": 2, "num_heads": 8, "head_dim": 4,
           "n_groups": 2, "state_size": 16, "conv_kernel": 4}  # fmt: skip
    assert read_model("m", two).layers[1].kind == Mamba2(8, 4, 2, 16, 4, "float32", "float32")
    one = {"model_type": "mamba", "dtype": "float32", "num_hidden_layers": 2, "hidden_size": 8, "expand": 2,
           "state_size": 16, "conv_kernel": 4}  # fmt: skip
    assert read_model("m", one).layers[1].kind == Mamba1(16, 16, 4, "float32", "float32")


@pytest.mark.parametrize(
    ("raw", "fields", "message"),
    [
        (PLAIN, {"num_key_value_heads": 0}, "field 'num_key_value_heads': is 0; it must be at least 1"),
        (PLAIN, {"num_key_value_heads": -8}, "field 'num_key_value_heads': is -8"),
        (PLAIN, {"num_key_value_heads": "8"}, "field 'num_key_value_heads': is '8'; give a whole number"),
        (PLAIN, {"num_key_value_heads": True}, "field 'num_key_value_heads': is True; give a whole number"),
        (PLAIN, {"num_hidden_layers": 4.0}, "field 'num_hidden_layers': is 4.0; give a whole number"),
        (PLAIN, {"num_hidden_layers": None}, "field 'num_hidden_layers': is missing"),
        (PLAIN, {"torch_dtype": None}, "field 'dtype': is missing"),
        (PLAIN, {"torch_dtype": "bf17"}, "field 'torch_dtype': is 'bf17'; use one of"),
        (PLAIN, {"hidden_size": 4095}, "hidden_size 4095 is no multiple of 32 heads; give head_dim"),
        (PLAIN, {"model_type": "qwen3"}, "field 'head_dim': is missing"),
        (LATENT, {"model_type": "glm_moe_dsa", "index_head_dim": 128, "indexer_types": ["full"] * 3 + ["shared"]},
         r"'indexer_types\[3\]': is 'shared'"),
        (PLAIN, {"model_type": None}, "field 'model_type': is missing"),
        (PLAIN, {"model_type": 3}, "field 'model_type': is 3"),
        (PLAIN, {"sliding_window": 64, "use_sliding_window": "yes"}, "'use_sliding_window': is 'yes'; give true or"),
        (PLAIN, {"layer_types": ["full_attention"] * 3}, "'layer_types': has 3 entries for 4 decoder layers"),
        (PLAIN, {"layer_types": ["full_attention"] * 3 + ["dense"]}, r"'layer_types\[3\]': is 'dense'; known here are"),
        (PLAIN, {"layer_types": 4}, "'layer_types': is 4; give one entry per layer"),
        (PLAIN, {"model_type": "gpt_oss"}, "field 'sliding_window': is missing"),
        (LATENT, {"kv_lora_rank": None}, "field 'kv_lora_rank': is missing"),
        (LATENT, {"model_type": "deepseek_v32"}, "field 'index_head_dim': is missing"),
        (LATENT, {"model_type": "deepseek_v32", "index_head_dim": 100}, "'index_head_dim': is 100"),
        (LATENT, {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk_freq": 2}, "'index_topk_freq': is 2"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*X"}, r"'hybrid_override_pattern\[3\]': is 'X'"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*"}, "has 3 entries for 4 decoder layers"),
        (GRANITE, {"layer_types": None}, "field 'layer_types': is missing"),
        (GEMMA_4, {"global_head_dim": None}, "field 'global_head_dim': is missing"),
        (GEMMA_4, {"num_kv_shared_layers": 4}, "'num_kv_shared_layers': is 4 of 4 layers"),
        (GEMMA_4, {"layer_types": ["sliding_attention"] * 4}, r"'layer_types\[3\]': is a sliding layer"),
        (DELTA, {"full_attention_interval": None}, "field 'full_attention_interval': is missing"),
        (PLAIN, {"model_type": "odd", "kv_lora_rank": 512}, "'kv_lora_rank': is set, and model type 'odd' is not known"),
        (PLAIN, {"model_type": "odd", "attention_chunk_size": 8192}, "'attention_chunk_size': is set"),
        (PLAIN, {"model_type": "odd", "sliding_window": 128}, "'sliding_window': is set"),
        (PLAIN, {"model_type": "odd", "is_encoder_decoder": True}, "'is_encoder_decoder': is set"),
        (PLAIN, {"model_type": "odd", "use_sliding_window": True, "sliding_window": 8}, "'use_sliding_window': is set"),
        (PLAIN, {"model_type": "odd", "num_key_value_heads": None}, "'num_key_value_heads': is missing"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(raw: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        read_model("m", changed(raw, **fields))


def test_the_path_of_a_nested_field_is_named() -> None:
    with pytest.raises(LayoutError, match=r"config of 'm', field 'text_config\.num_key_value_heads': is 0"):
        read_model("m", {"model_type": "wrapper", "text_config": changed(PLAIN, num_key_value_heads=0)})


def test_an_unknown_type_without_shaping_fields_is_plain_attention() -> None:
    raw = changed(PLAIN, model_type="brandnew", rope_scaling={"factor": 2}, sliding_window=None, n_experts=8)
    assert kinds(read_model("m", raw)) == kinds(read_model("m", PLAIN))
    off = changed(raw, use_sliding_window=False, sliding_window=64, max_window_layers=2)
    assert kinds(read_model("m", off)) == kinds(read_model("m", PLAIN))


GLM: dict[str, Any] = {**PLAIN, "model_type": "glm4_moe", "head_dim": 128, "num_nextn_predict_layers": 1}
KIMI: dict[str, Any] = {
    **LATENT,
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
LFM: dict[str, Any] = {**PLAIN, "model_type": "lfm2", "conv_dim": 2048, "conv_L_cache": 3, "full_attn_idxs": [2]}
LLAMA_4: dict[str, Any] = {**PLAIN, "model_type": "llama4_text", "head_dim": 128, "attention_chunk_size": 8192}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (LLAMA_4, [8192, 8192, 8192, None]),
        (changed(LLAMA_4, no_rope_layers=[]), [8192, 8192, 8192, None]),
        (changed(LLAMA_4, no_rope_layers=[0, 1, 1, 0]), [None, 8192, 8192, None]),
        (changed(LLAMA_4, no_rope_layer_interval=2), [8192, None, 8192, None]),
        (changed(LLAMA_4, layer_types=["chunked_attention"] * 3 + ["full_attention"]), [8192, 8192, 8192, None]),
        (changed(LLAMA_4, attention_chunk_size=None), [None] * 4),
        (changed(PLAIN, model_type="exaone4", sliding_window=4096), [4096, 4096, 4096, None]),
        (changed(PLAIN, model_type="exaone4", sliding_window=4096, sliding_window_pattern=2), [4096, None, 4096, None]),
        (changed(PLAIN, model_type="exaone4", sliding_window_pattern="LLLG"), [None] * 4),
        (changed(PLAIN, model_type="exaone4", sliding_window=4096, sliding_window_pattern="LLLG",
                 layer_types=["sliding_attention", "full_attention"] * 2), [4096, None, 4096, None]),
        (changed(PLAIN, model_type="exaone_moe", sliding_window=128), [128, 128, 128, None]),
        (changed(PLAIN, model_type="cohere2", sliding_window=4096, sliding_window_pattern=2), [4097, None, 4097, None]),
        (changed(PLAIN, model_type="cohere2"), [4097, 4097, 4097, None]),
        (changed(PLAIN, model_type="afmoe", sliding_window=2048), [2048, 2048, 2048, None]),
        (changed(PLAIN, model_type="afmoe", sliding_window=2048, global_attn_every_n_layers=2), [2048, None, 2048, None]),
        (changed(PLAIN, model_type="smollm3", no_rope_layers=[1, 1, 1, 0], no_rope_layer_interval=4), [None] * 4),
        (changed(PLAIN, model_type="minimax_m2", head_dim=128, attn_type_list=[1] * 4, num_mtp_modules=3), [None] * 4),
    ],
)  # fmt: skip
def test_windows_of_further_types(raw: dict[str, Any], expected: list[int | None]) -> None:
    model = read_model("m", raw)
    assert windows(model) == expected
    assert all(
        layer.kind == Attention(8, 128, "bfloat16", window_tokens=w)
        for layer, w in zip(model.layers, expected, strict=True)
    )


def test_glm_predicts_with_layers_like_its_own() -> None:
    model = read_model("m", GLM)
    assert [(layer.name, layer.index, layer.optional, layer.predicts) for layer in model.layers[-2:]] == [
        ("layers.3.attn", 3, False, False),
        ("mtp.0.attn", 4, True, True),
    ]
    assert model.layers[-1].kind == Attention(8, 128, "bfloat16")
    assert len(read_model("m", changed(GLM, num_nextn_predict_layers=None)).layers) == 4
    light = read_model("m", changed(LATENT, model_type="glm4_moe_lite", num_nextn_predict_layers=1))
    assert light.layers[-1].kind == Latent(576, "bfloat16")


def test_exaone_predicts_with_layers_like_its_first() -> None:
    raw = changed(PLAIN, model_type="exaone_moe", sliding_window=128, num_nextn_predict_layers=1)
    added = read_model("m", raw).layers[-1]
    assert (added.name, added.index, added.optional, added.predicts) == ("mtp.0.attn", 4, True, True)
    assert added.kind == Attention(8, 128, "bfloat16", window_tokens=128)


MIMO: dict[str, Any] = {
    **PLAIN, "model_type": "mimo_v2_flash", "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
    "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128,
    "hybrid_layer_pattern": [0, 1, 1, 0],
}  # fmt: skip


def test_mimo_has_narrow_values_and_more_heads_in_its_windows() -> None:
    model = read_model("m", MIMO)
    full, window = Attention(4, 192, "bfloat16", 128), Attention(8, 192, "bfloat16", 128, 128)
    assert [layer.kind for layer in model.layers] == [full, window, window, full]
    assert [layer.family for layer in model.layers] == ["full", "window", "window", "full"]
    assert "8 heads x 192 and 128 of V" in geometry(model)
    alike = read_model("m", changed(MIMO, swa_v_head_dim=None, v_head_dim=192))
    assert [layer.kind for layer in alike.layers[:2]] == [
        Attention(4, 192, "bfloat16"),
        Attention(8, 192, "bfloat16", window_tokens=128),
    ]


def test_step_takes_heads_from_its_other_setting() -> None:
    raw = changed(
        PLAIN, model_type="step3p5", num_attention_groups=8, head_dim=128, sliding_window=512, num_nextn_predict_layers=1,
        layer_types=["full_attention", *["sliding_attention"] * 3, "sliding_attention"],
        attention_other_setting={
            "attention_type": "sliding_attention", "num_attention_heads": 96, "num_attention_groups": 4, "head_dim": 64,
        },
    )  # fmt: skip
    layers = read_model("m", raw).layers
    assert layers[0].kind == Attention(8, 128, "bfloat16")
    assert {layer.kind for layer in layers[1:]} == {Attention(4, 64, "bfloat16", window_tokens=512)}
    assert [layer.predicts for layer in layers] == [False] * 4 + [True]
    same = read_model("m", changed(raw, attention_other_setting=None))
    assert same.layers[1].kind == Attention(8, 128, "bfloat16", window_tokens=512)


def test_kimi_linear_in_both_forms_of_its_file() -> None:
    model = read_model("m", KIMI)
    delta = GatedDelta(32, 32, 128, 128, 4, "bfloat16", "float32")
    assert list(kinds(model).values()) == [delta, delta, delta, Latent(576, "bfloat16")]
    newer = changed(
        KIMI, linear_attn_config=None, linear_num_heads=32, linear_head_dim=128, linear_conv_kernel_dim=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    assert read_model("m", newer).layers == model.layers


def test_lfm2_in_both_forms_of_its_file() -> None:
    model = read_model("m", LFM)
    conv = ShortConv(2048, 3, "bfloat16")
    assert list(kinds(model).values()) == [conv, conv, Attention(8, 128, "bfloat16"), conv]
    newer = changed(LFM, full_attn_idxs=None, layer_types=["conv", "conv", "full_attention", "conv"])
    assert read_model("m", newer).layers == model.layers
    assert read_model("m", changed(LFM, conv_dim=None)).layers[0].kind == ShortConv(4096, 3, "bfloat16")
    assert read_model("m", changed(LFM, model_type="lfm2_moe")).layers[0].kind == ShortConv(4096, 3, "bfloat16")


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (changed(PLAIN, model_type="minimax_m2", head_dim=128, attn_type_list=[1, 0, 1, 1]),
         r"attn_type_list\[1\]': is 0; only 1, full attention"),
        (changed(PLAIN, model_type="smollm3", use_sliding_window=True), "use_sliding_window': is True"),
        (changed(MIMO, swa_num_key_value_heads=None), "swa_num_key_value_heads': is missing"),
        (changed(MIMO, hybrid_layer_pattern=[0, 1]), "hybrid_layer_pattern': has 2 entries for 4 decoder layers"),
        (changed(PLAIN, model_type="exaone_moe", sliding_windows=[128]), r"sliding_windows': is \[128\]"),
        (changed(PLAIN, model_type="exaone4", sliding_window=64, sliding_window_pattern="LLLG"),
         "sliding_window_pattern': is 'LLLG'; give a whole number"),
        (changed(KIMI, linear_attn_config={"kda_layers": [1, 2, 3]}), "linear_attn_config.full_attn_layers': is missing"),
        (changed(KIMI, linear_attn_config={"kda_layers": [1, 2], "full_attn_layers": [4]}),
         "kda_layers': and full_attn_layers name 2 and 1 of 4 layers; name each once"),
        (changed(KIMI, linear_attn_config={"kda_layers": [0, 2], "full_attn_layers": [4]}),
         r"kda_layers\[0\]': is 0; give numbers from 1 to 4"),
        (changed(KIMI, linear_attn_config={"kda_layers": [2, 2], "full_attn_layers": [4]}), r"kda_layers\[1\]': is 2 again"),
        (changed(KIMI, linear_attn_config=[1]), r"linear_attn_config': is \[1\]; give an object"),
        (changed(LFM, full_attn_idxs=[4]), r"full_attn_idxs\[0\]': is 4; give numbers from 0 to 3"),
        (changed(LFM, full_attn_idxs=None), "full_attn_idxs': is missing"),
        (changed(LLAMA_4, no_rope_layers=[1, 0]), "no_rope_layers': has 2 entries for 4 decoder layers"),
    ],
)  # fmt: skip
def test_further_types_refuse_by_name(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        read_model("m", raw)
