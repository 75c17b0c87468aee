"""Is each family of models, by its `model_type`, read as vLLM lays out its cache?"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.catalog.test_config import LATENT, PLAIN, changed, kinds, windows

from kvreshard.catalog import read_model
from kvreshard.catalog.entries import geometry
from kvreshard.catalog.families import FAMILIES
from kvreshard.kinds import Attention, GatedDelta, Latent, ShortConv
from kvreshard.model import LayoutError

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
        ({**LLAMA_4, "attention_chunk_size": None}, [None] * 4),
        ({name: value for name, value in LLAMA_4.items() if name != "attention_chunk_size"}, [8192, 8192, 8192, None]),
        (changed(PLAIN, model_type="gpt_oss", head_dim=128, sliding_window=128), [128, None, 128, None]),
        (changed(PLAIN, model_type="gpt_oss", head_dim=128, sliding_window=128, layer_types=["sliding_attention"] * 4), [128] * 4),
        (changed(PLAIN, model_type="qwen2", use_sliding_window=True, max_window_layers=0), [4096] * 4),
        (changed(PLAIN, model_type="qwen3_moe", head_dim=128, use_sliding_window=True), [4096] * 4),
        (changed(PLAIN, model_type="qwen3", head_dim=128), [None] * 4),
        (changed(PLAIN, model_type="exaone4", sliding_window=4096), [4096, 4096, 4096, None]),
        (changed(PLAIN, model_type="exaone4", sliding_window=4096, sliding_window_pattern=2), [4096, None, 4096, None]),
        ({**changed(PLAIN, model_type="exaone4", sliding_window_pattern="LLLG"), "sliding_window": None}, [None] * 4),
        (changed(PLAIN, model_type="exaone4"), [4096, 4096, 4096, None]),
        (changed(PLAIN, model_type="muse_glimmer_text"), [2048, 2048, 2048, None]),
        (changed(PLAIN, model_type="muse_glimmer_text", sliding_window=64, no_rope_layers=[0, 1, 0, 1]), [None, 64, None, 64]),
        (changed(PLAIN, model_type="plamo3", head_dim=128, interleaved_sliding_window=[64, None, 32, None]), [64, None, 32, None]),
        (changed(PLAIN, model_type="phimoe", sliding_window=64), [64] * 4),
        (changed(PLAIN, model_type="exaone4", sliding_window=4096, sliding_window_pattern="LLLG",
                 layer_types=["sliding_attention", "full_attention"] * 2), [4096, None, 4096, None]),
        (changed(PLAIN, model_type="exaone_moe", sliding_window=128, num_nextn_predict_layers=0), [128, 128, 128, None]),
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


TYPES = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        *[(name, {"head_dim": 48}, Attention(8, 128, "bfloat16")) for name in ("qwen2", "qwen2_moe", "granitemoe", "olmoe", "stablelm")],
        *[(name, {"head_dim": 48, "num_key_value_heads": 8}, Attention(32, 128, "bfloat16")) for name in ("gpt2", "gptj", "opt")],
        *[(name, {"layer_types": TYPES, "sliding_window": 64}, Attention(8, 128, "bfloat16")) for name in ("solar", "step1")],
        *[(name, {"use_sliding_window": False, "sliding_window": 64}, Attention(heads, 128, "bfloat16", window_tokens=64))
          for name, heads in (("step1", 8), ("gpt_neox", 32), ("telechat", 32), ("gpt_bigcode", 1))],
    ],
)  # fmt: skip
def test_what_a_class_of_vllm_ignores_shapes_no_cache(
    model_type: str, fields: dict[str, Any], expected: Attention
) -> None:
    sizes = {"n_layer": 4, "n_head": 32, "n_embd": 4096, "head_dim": 128, "num_attention_groups": 8}
    if model_type != "gpt_bigcode":
        sizes |= {"num_attention_heads": 32}
    unusual = model_type in ("gpt_neox", "telechat", "gpt_bigcode")
    raw = {**PLAIN, "num_key_value_heads": None if unusual else 8, **sizes, "model_type": model_type, **fields}
    assert {layer.kind for layer in read_model("m", changed(raw)).layers} == {expected}


@pytest.mark.parametrize("value", [None, 0])
@pytest.mark.parametrize(
    "model_type", ["gemma3_text", "muse_glimmer_text", "exaone4", "exaone_moe", "afmoe", "gpt_oss", "gemma2"]
)
def test_an_explicit_null_is_no_window(model_type: str, value: int | None) -> None:
    """transformers keeps it where the class has a default for an absent field, and vLLM makes null of 0: every layer is full."""
    raw = changed(PLAIN, model_type=model_type, head_dim=128, num_nextn_predict_layers=0)
    model = read_model("m", {**raw, "sliding_window": value})
    assert windows(model) == [None] * 4
    assert {layer.family for layer in model.layers} == {"full"}


@pytest.mark.parametrize("value", [None, 0])
@pytest.mark.parametrize("model_type", ["cohere2", "cohere2_moe"])
def test_a_class_that_needs_a_window_is_refused_without(model_type: str, value: int | None) -> None:
    with pytest.raises(LayoutError, match="field 'sliding_window': is null or 0; vLLM's class needs a number"):
        read_model("m", {**changed(PLAIN, model_type=model_type, head_dim=128), "sliding_window": value})


def test_chunks_have_a_name_of_their_own() -> None:
    model = read_model("m", LLAMA_4)
    assert [layer.family for layer in model.layers] == ["chunk"] * 3 + ["full"]
    assert geometry(model) == "3 x chunk 8192, 8 heads x 128; 1 x full, 8 heads x 128"


@pytest.mark.parametrize("model_type", ["glm4_moe", "ernie4_5_moe", "mimo", "bailing_moe", "bailing_moe_v2", "hy_v3"])
def test_glm_and_others_predict_with_layers_like_their_own(model_type: str) -> None:
    model = read_model("m", changed(GLM, model_type=model_type))
    assert [(layer.name, layer.index, layer.optional, layer.predicts) for layer in model.layers[-2:]] == [
        ("layers.3.attn", 3, False, False),
        ("mtp.0.attn", 4, True, True),
    ]
    assert model.layers[-1].kind == Attention(8, 128, "bfloat16")
    assert len(read_model("m", changed(GLM, num_nextn_predict_layers=0)).layers) == 4
    light = read_model("m", changed(LATENT, model_type="glm4_moe_lite", num_nextn_predict_layers=1))
    assert light.layers[-1].kind == Latent(576, "bfloat16")


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("deepseek_v3", 1),
        ("glm4_moe", 1),
        ("exaone_moe", 1),
        ("deepseek_v2", 0),
        ("ernie4_5_moe", 0),
        ("glm4_moe_lite", 0),
    ],
)
def test_a_file_without_the_number_of_layers_that_predict_has_that_of_its_class(model_type: str, expected: int) -> None:
    raw = changed(LATENT, model_type=model_type, head_dim=128, sliding_window=64)
    assert sum(layer.predicts for layer in read_model("m", raw).layers) == expected
    stated = changed(raw, num_nextn_predict_layers=0)
    assert not any(layer.predicts for layer in read_model("m", stated).layers)


@pytest.mark.parametrize("number", [None, 1, 3])
def test_one_layer_of_longcat_predicts_whatever_its_file_has(number: int | None) -> None:
    raw = changed(
        LATENT, model_type="longcat_flash", num_hidden_layers=None, num_layers=2, num_nextn_predict_layers=number
    )
    assert [layer.name for layer in read_model("m", raw).layers if layer.predicts] == ["mtp.0.attn"]


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
    assert [layer.kind for layer in model.layers] == [full, window, window, full, window]
    assert [layer.family for layer in model.layers] == ["full", "window", "window", "full", "window"]
    assert [layer.predicts for layer in model.layers] == [False] * 4 + [True]
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
    both = changed(KIMI, linear_num_heads=16, linear_head_dim=64, linear_conv_kernel_dim=2)
    assert read_model("m", both).layers == model.layers  # as transformers' class reads it


def test_a_model_that_loops_keeps_a_window_of_every_loop_but_the_first() -> None:
    model = read_model("m", changed(PLAIN, model_type="iquestloopcoder", loop_num=3, loop_window_size=32))
    assert [(layer.name, layer.index) for layer in model.layers[2:5]] == [
        ("layers.0.loop.2", 0), ("layers.1.attn", 1), ("layers.1.loop.1", 1),
    ]  # fmt: skip
    assert windows(model) == [None, 32, 32] * 4


def test_longcat_is_known_by_its_architecture() -> None:
    raw = changed(LATENT, model_type=None, num_hidden_layers=None, num_layers=2)
    for name in ("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"):
        assert read_model("m", {**raw, "architectures": [name]}).model_type == "longcat_flash"


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
        (changed(PLAIN, model_type="voxtral_realtime_text"), "model_type': is 'voxtral_realtime_text', whose encoder of sound keeps caches"),
        (changed(MIMO, swa_num_key_value_heads=None), "swa_num_key_value_heads': is missing"),
        (changed(MIMO, hybrid_layer_pattern=[0, 1]), "hybrid_layer_pattern': has 2 entries for 4 decoder layers"),
        (changed(PLAIN, model_type="exaone_moe", sliding_windows=[128]), r"sliding_windows': is \[128\]"),
        (changed(PLAIN, model_type="exaone4", sliding_window=64, sliding_window_pattern="LLLG"),
         "sliding_window_pattern': is 'LLLG'; give a whole number"),
        (changed(PLAIN, model_type="muse_glimmer_text", layer_types=["full_attention"] * 4), "layer_types': contradicts no_rope_layers"),
        (changed(PLAIN, model_type="plamo3", head_dim=128, sliding_window=64), "interleaved_sliding_window': is missing; give one number, or null, per layer"),
        (changed(PLAIN, model_type="plamo3", head_dim=128, interleaved_sliding_window=[64]), "has 1 entries for 4 decoder layers"),
        (changed(PLAIN, model_type="plamo3", head_dim=128, interleaved_sliding_window=[None, 1 << 63, 64, 64]),
         r"interleaved_sliding_window\[1\]': is 9223372036854775808; it must be at most 4294967296"),
        (changed(PLAIN, model_type="pangu", head_dim=128, param_sink_number=128), "param_sink_number': is set, and model type 'pangu'"),
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


COHERE: dict[str, Any] = {**PLAIN, "model_type": "cohere2_moe", "head_dim": 128, "first_k_dense_replace": 5}
V4: dict[str, Any] = {
    **PLAIN, "model_type": "deepseek_v4", "head_dim": 480, "qk_rope_head_dim": 32, "compress_ratios": [0] * 4, "sliding_window": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (changed(PLAIN, model_type="olmo3"), "field 'layer_types': is missing, and model type 'olmo3' has windows by default"),
        (changed(LLAMA_4, layer_types=["full_attention"] * 4), "field 'layer_types': contradicts no_rope_layers"),
        (changed(PLAIN, model_type="gpt_oss", head_dim=128, sliding_window=128, layer_types=["full_attention"] * 4),
         "field 'layer_types': contradicts vLLM's class"),
        (COHERE, "field 'first_k_dense_replace': is 5 of 4 layers; give at most as many"),
        (V4, "field 'head_dim': is 480, of which 32 rotated; rows are known for 512 and 64 only"),
        (changed(LLAMA_4, layer_types="full"), "field 'layer_types': is 'full'; give one entry per layer"),
        ({"text_config": PLAIN, "dtype": "int4"}, "field 'dtype': is 'int4'; use one of"),
        ({"text_config": changed(PLAIN, torch_dtype="int4")}, "field 'text_config.torch_dtype': is 'int4'; use one of"),
        (changed(PLAIN, model_type="dbrx", attn_config=[8], n_layers=4, n_heads=32, d_model=4096), "field 'attn_config': is"),
    ],
)  # fmt: skip
def test_the_field_at_fault_is_named_where_it_stands(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(LayoutError) as refused:
        read_model("m", raw)
    assert told in str(refused.value)


def test_what_no_layer_needs_is_not_asked_for() -> None:
    raw = changed(PLAIN, model_type="olmo_hybrid", layer_types=["full_attention"] * 4)
    assert windows(read_model("m", raw)) == [None] * 4
    with pytest.raises(LayoutError, match="linear_num_key_heads': is missing"):
        read_model("m", changed(raw, layer_types=["full_attention"] * 3 + ["linear_attention"]))


REFINED_WEB: dict[str, Any] = {
    "model_type": "RefinedWeb", "torch_dtype": "bfloat16", "hidden_size": 512, "n_layer": 2, "n_head": 8, "n_head_kv": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "architecture", "is_doubted"),
    [
        (REFINED_WEB, "FalconForCausalLM", False),
        (changed(GLM, model_type="bailing_moe"), "BailingMoeV2ForCausalLM", False),
        (LFM, "Lfm2ForCausalLM", False),
        (LFM, "Lfm2MoeForCausalLM", True),
        (PLAIN, "MistralForCausalLM", True),
    ],
)
def test_only_types_with_the_same_rules_stand_for_each_other(
    raw: dict[str, Any], architecture: str, is_doubted: bool
) -> None:
    assert bool(read_model("m", {**raw, "architectures": [architecture]}).doubts) == is_doubted


def test_the_last_layers_of_gemma_3n_read_the_cache_of_others() -> None:
    types = ["sliding_attention", "full_attention"] * 3
    raw = changed(
        PLAIN, model_type="gemma3n_text", head_dim=256, num_hidden_layers=6, layer_types=types, sliding_window=512
    )
    model = read_model("m", {**raw, "num_kv_shared_layers": 2})
    assert (windows(model), model.num_layers) == ([512, None, 512, None], 6)
    assert windows(read_model("m", {**raw, "num_kv_shared_layers": 0})) == [512, None] * 3
    with pytest.raises(LayoutError, match="num_kv_shared_layers': is 6 of 6 layers; one layer needs a cache"):
        read_model("m", {**raw, "num_kv_shared_layers": 6})


def test_types_that_are_known_for_their_head_size_only_have_no_rules() -> None:
    others = [row for row in FAMILIES.values() if row.layers is None]
    assert len(others) > 40
    assert all(row.head_size is not None and not row.caches and row.kv_heads is None for row in others)


QWEN_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16", "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "max_window_layers": 28, "sliding_window": 32768,
    "use_sliding_window": False, "vision_start_token_id": 151652, "vision_config": {"hidden_size": 1280, "depth": 32},
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_the_published_files_of_qwen_vl_are_flat(model_type: str) -> None:
    model = read_model("m", changed(QWEN_VL, model_type=model_type, architectures=None))
    assert [layer.kind for layer in model.layers] == [Attention(4, 128, "bfloat16")] * 28
    nested = {
        "model_type": model_type,
        "text_config": changed(QWEN_VL, model_type=f"{model_type}_text", architectures=None),
    }
    assert read_model("m", nested).layers == model.layers
    assert read_model("m", QWEN_VL).doubts == ()
    assert windows(read_model("m", changed(QWEN_VL, use_sliding_window=None))) == [None] * 28


@pytest.mark.parametrize(
    ("text", "num_layers", "kind"),
    [
        ({"model_type": "qwen2", "sliding_window": 32768, "vocab_size": 156032}, 32, Attention(32, 128, "bfloat16")),
        ({"model_type": "mistral", "hidden_size": 5120, "head_dim": 128, "num_hidden_layers": 40, "num_key_value_heads": 8,
          "sliding_window": None}, 40, Attention(8, 128, "bfloat16")),
        ({"model_type": "llama", "vocab_size": 32064}, 32, Attention(32, 128, "bfloat16")),
    ],
    ids=["Qwen2-Audio-7B", "Pixtral-12B", "LLaVA-1.5-7B"],
)  # fmt: skip
def test_a_text_config_leaves_out_what_is_the_default_of_its_class(
    text: dict[str, Any], num_layers: int, kind: Attention
) -> None:
    model = read_model("m", {"model_type": "llava", "torch_dtype": "bfloat16", "text_config": text})
    assert [layer.kind for layer in model.layers] == [kind] * num_layers
