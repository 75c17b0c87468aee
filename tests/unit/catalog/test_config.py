"""Does a config.json of each family give the caches that its own sources state, and is a bad one refused by name?"""

import copy
from typing import Any

import pytest

from kvreshard.catalog import Model, read_model
from kvreshard.catalog.engine import engine_layers
from kvreshard.catalog.spec import EngineSpec
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, Mamba1, Mamba2, ScaledRows
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
        ({"model_type": "mistral", "sliding_window": 4096, "use_sliding_window": False}, [4096] * 4),
        ({"model_type": "mistral", "sliding_window": 0}, [None] * 4),
        ({"model_type": "mixtral", "sliding_window": 64, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, [None] * 4),
        ({"model_type": "mixtral", "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, [64] * 4),
        ({"model_type": "falcon", "sliding_window": 64}, [None] * 4),
        ({"model_type": "laguna", "head_dim": 128, "sliding_window": 64}, [None] * 4),
        ({"model_type": "qwen3", "head_dim": 128, "sliding_window": 64}, [None] * 4),
        ({"model_type": "qwen3", "head_dim": 128, "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, [None] * 4),
        ({"model_type": "qwen3_moe", "head_dim": 128, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3}, [64] * 4),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
         [None, None, None, 64]),
        ({"model_type": "gpt_oss", "head_dim": 64, "sliding_window": 128}, [128, None, 128, None]),
        ({"model_type": "gemma2", "head_dim": 64, "sliding_window": 64, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
         [None, None, None, 64]),
        ({"model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 2}, [64, None, 64, None]),
        ({"model_type": "another", "head_dim": 128, "sliding_window": 64, "layer_types": ["sliding_attention"] * 4}, [64] * 4),
    ],
)  # fmt: skip
def test_windows(fields: dict[str, Any], expected: list[int | None]) -> None:
    assert windows(read_model("m", changed(PLAIN, **fields))) == expected


# What transformers' class of the family has where the file says nothing; `tests/vllm/test_defaults.py` asks all of them.
@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("mistral", Attention(8, 128, "bfloat16", window_tokens=4096)),
        ("mixtral", Attention(8, 128, "bfloat16")),
        ("starcoder2", Attention(2, 128, "bfloat16")),
        ("glm4", Attention(2, 128, "bfloat16")),
        ("qwen3_moe", Attention(4, 128, "bfloat16")),
        ("gemma", Attention(16, 256, "bfloat16")),
        ("afmoe", Attention(32, 128, "bfloat16")),
    ],
)  # fmt: skip
def test_a_file_without_kv_heads_and_width_has_those_of_its_family(model_type: str, expected: Attention) -> None:
    raw = changed(
        PLAIN,
        model_type=model_type,
        num_key_value_heads=None,
        layer_types=["full_attention"] * 4 if model_type == "afmoe" else None,
    )
    assert set(kinds(read_model("m", raw)).values()) == {expected}


@pytest.mark.parametrize("width", [None, 64])
def test_the_width_of_a_family_without_a_reader(width: int | None) -> None:
    raw = changed(PLAIN, model_type="ernie4_5", head_dim=width)
    assert read_model("m", raw).layers[0].kind == Attention(8, width or 128, "bfloat16")
    assert read_model("m", changed(PLAIN, model_type="olmoe")).layers[0].kind == Attention(8, 128, "bfloat16")


@pytest.mark.parametrize(
    ("model_type", "name", "known"),
    [("mistral", "num_key_value_heads", 8), ("qwen3", "head_dim", 128), ("helium", "head_dim", 128)],
)
def test_null_is_not_absent_where_the_family_has_a_number(model_type: str, name: str, known: int) -> None:
    with pytest.raises(
        LayoutError, match=f"'{name}': is null, which is not the {known} of a '{model_type}' file without it"
    ):
        read_model("m", {**PLAIN, "model_type": model_type, name: None})


def test_no_window_is_said_with_a_null() -> None:
    assert windows(read_model("m", {**PLAIN, "model_type": "mistral", "sliding_window": None})) == [None] * 4


def test_gemma_3_fills_in_what_its_files_leave_out() -> None:
    model = read_model("m", {"model_type": "gemma3_text", "dtype": "bfloat16", "num_hidden_layers": 6})
    assert windows(model) == [4096] * 5 + [None]
    assert model.layers[5].kind == Attention(4, 256, "bfloat16")


def test_the_language_model_of_a_multimodal_file() -> None:
    inner = changed(PLAIN, torch_dtype=None)
    model = read_model("m", {"model_type": "wrapper", "torch_dtype": "float16", "text_config": inner})
    assert model.layers[0].kind == Attention(8, 128, "float16")


def test_the_language_model_of_one_that_speaks() -> None:
    inner = changed(PLAIN, torch_dtype=None)
    spoken = {
        "model_type": "omni",
        "thinker_config": {"model_type": "t", "dtype": "float16", "text_config": inner},
        "talker_config": {},
    }
    assert read_model("m", spoken).layers[0].kind == Attention(8, 128, "float16")
    inner["num_key_value_heads"] = 0
    with pytest.raises(LayoutError, match=r"field 'thinker_config\.text_config\.num_key_value_heads': is 0"):
        read_model("m", spoken)


def test_deepseek_without_latents_is_plain_attention() -> None:
    raw = {
        **LATENT,
        "model_type": "deepseek_v2",
        "kv_lora_rank": None,
        "qk_nope_head_dim": 0,
        "qk_rope_head_dim": 0,
        "use_mla": False,
    }
    model = read_model("m", {**raw, "num_nextn_predict_layers": 1})
    assert {layer.kind for layer in model.layers} == {Attention(8, 128, "bfloat16")}
    assert [layer.family for layer in model.layers] == ["full"] * 5
    with pytest.raises(
        LayoutError, match="'kv_lora_rank': is missing; it shapes the cache; add it to a copy of the file"
    ):
        read_model("m", {**raw, "qk_rope_head_dim": 64})


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


@pytest.mark.parametrize(
    "form", [{}, {"hybrid_override_pattern": None, "layers_block_type": ["mamba", "mlp", "attention", "moe"]}]
)
def test_nemotron_has_as_many_layers_as_it_lists(form: dict[str, Any]) -> None:
    raw = changed(NEMOTRON, num_hidden_layers=None, head_dim=None, attention_head_dim=128, **form)
    assert read_model("m", raw) == read_model("m", NEMOTRON)


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
    for raw in (DELTA, changed(DELTA, model_type="qwen3_next")):
        assert [layer.name for layer in read_model("m", raw).layers if layer.optional] == ["mtp.0.attn"]
    without = read_model("m", changed(DELTA, mtp_num_hidden_layers=0))
    assert not any(layer.optional for layer in without.layers)


def test_states_only() -> None:
    two = {"model_type": "mamba2", "dtype": "float32", "num_hidden_layers": 2, "num_heads": 8, "head_dim": 4,
           "n_groups": 2, "state_size": 16, "conv_kernel": 4}  # fmt: skip
    assert read_model("m", two).layers[1].kind == Mamba2(8, 4, 2, 16, 4, "bfloat16", "bfloat16")
    one = {"model_type": "mamba", "dtype": "float32", "num_hidden_layers": 2, "hidden_size": 8, "expand": 2,
           "state_size": 16, "conv_kernel": 4}  # fmt: skip
    assert read_model("m", one).layers[1].kind == Mamba1(16, 16, 4, "bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("raw", "fields", "message"),
    [
        (PLAIN, {"num_key_value_heads": 0}, "field 'num_key_value_heads': is 0; it must be at least 1"),
        (PLAIN, {"num_key_value_heads": -8}, "field 'num_key_value_heads': is -8"),
        (PLAIN, {"num_key_value_heads": "8"}, "field 'num_key_value_heads': is '8'; give a whole number"),
        (PLAIN, {"num_key_value_heads": True}, "field 'num_key_value_heads': is True; give a whole number"),
        (PLAIN, {"num_key_value_heads": 64}, "'num_key_value_heads': is 64, which does not divide num_attention_heads 32; every KV"),
        (PLAIN, {"num_key_value_heads": 7}, "'num_key_value_heads': is 7, which does not divide"),
        (PLAIN, {"model_type": "mistral", "num_key_value_heads": None, "num_attention_heads": 20}, "is 8 by default, which does not divide"),
        (PLAIN, {"num_hidden_layers": 4.0}, "field 'num_hidden_layers': is 4.0; give a whole number"),
        (PLAIN, {"num_hidden_layers": None}, "field 'num_hidden_layers': is missing"),
        (DELTA, {"torch_dtype": None}, "field 'dtype': is missing, and the weights .*; layers with a state have it; add it to a copy"),
        (PLAIN, {"torch_dtype": "bf17"}, "field 'torch_dtype': is 'bf17'; use one of"),
        (PLAIN, {"torch_dtype": "uint8"}, "field 'torch_dtype': is 'uint8'; use one of float32, bfloat16, float16$"),
        (PLAIN, {"torch_dtype": "fp8_e4m3"}, "field 'torch_dtype': is 'fp8_e4m3'; use one of float32"),
        (PLAIN, {"hidden_size": 4095}, "hidden_size 4095 is no multiple of 32 heads; give head_dim"),
        (PLAIN, {"model_type": "nobody_knows"}, "field 'head_dim': is missing, and model type 'nobody_knows' is not known; it shapes"),
        (LATENT, {"model_type": "glm_moe_dsa", "index_head_dim": 128, "indexer_types": ["full"] * 3 + ["shared"]},
         r"'indexer_types\[3\]': is 'shared', but by index_topk_freq and index_skip_topk_offset, .* is 'full'; make them agree"),
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
        (LATENT, {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk_freq": 0}, "'index_topk_freq': is 0"),
        (NEMOTRON, {"hybrid_override_pattern": "M-*X"}, r"'hybrid_override_pattern\[3\]': is 'X'"),
        (NEMOTRON, {"num_hidden_layers": None, "hybrid_override_pattern": None}, "'num_hidden_layers': is missing; it shapes the cache"),
        (NEMOTRON, {"num_hidden_layers": None, "hybrid_override_pattern": None, "layers_block_type": []}, "'num_hidden_layers': is missing"),
        (NEMOTRON, {"attention_head_dim": 64}, "'attention_head_dim': is 64; caches of that shape"),
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
        *((PLAIN, {"model_type": "odd", "head_dim": 128, name: value}, f"'{name}': is set, and model type 'odd' is not known") for name, value in (
            ("use_cla", True), ("cla_share_factor", 2), ("attention_head_dim", 64), ("num_kv_groups", 4), ("kv_heads", 2), ("head_size", 96),
            ("d_kv", 64), ("qk_head_dim", 192), ("yoco", True), ("share_kv", True), ("num_shared_kv_layers", 8), ("use_mla", True),
            ("num_query_groups", 4), ("swa_layers", [1]), ("indexer_types", ["full"]), ("kv_cache_reuse_layers", [2]),
        )),
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
    raw = changed(
        PLAIN, model_type="brandnew", head_dim=128, rope_scaling={"factor": 2}, sliding_window=None, n_experts=8
    )
    assert kinds(read_model("m", raw)) == kinds(read_model("m", PLAIN))
    alike = changed(
        raw, attention_head_dim=128, qk_head_dim=128, use_cla=False, cla_share_factor=2, classifier_dropout=0.1
    )
    assert kinds(read_model("m", alike)) == kinds(read_model("m", PLAIN))
    off = changed(raw, use_sliding_window=False, sliding_window=64, max_window_layers=2)
    assert kinds(read_model("m", off)) == kinds(read_model("m", PLAIN))


@pytest.mark.parametrize("listed", [[[]], [{}], [None], "LongcatFlashForCausalLM"])
def test_architectures_that_are_no_names_are_no_type(listed: object) -> None:
    with pytest.raises(LayoutError, match="'model_type': is missing"):
        read_model("m", {"architectures": listed, "dtype": "bfloat16"})


@pytest.mark.parametrize("model_type", ["falcon", "RefinedWeb"])
def test_falcon_keeps_its_dtype_in_an_engine_of_fp8_caches(model_type: str) -> None:
    """vLLM 0.32 `models/falcon.py` makes its attention without the engine's cache options; compressed-tensors sets the layer's own."""
    raw = changed(PLAIN, model_type=model_type, n_layer=4, n_head=32, multi_query=False, new_decoder_architecture=False)
    scheme = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "tensor"}
    for quantised, dtype in ((None, "bfloat16"), ("modelopt", "bfloat16"), ("compressed-tensors", "fp8_e4m3")):
        given = {"quantization_config": {"quant_method": quantised, "kv_cache_scheme": scheme}} if quantised else {}
        model = read_model("m", {**raw, **given})
        for spec in (EngineSpec(), EngineSpec(dtype="fp8_e4m3")):
            assert {layer.kind.dtype for layer in engine_layers(model, spec)} == {dtype}, (quantised, spec)
