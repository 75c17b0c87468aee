"""Has a cache that the engine leaves to the model the dtype that its file declares, and is the engine asked where it declares none?"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.catalog.test_config import DELTA, LATENT, NEMOTRON, PLAIN, changed

from kvreshard.catalog import as_draft, describe, parse_engine, read_model
from kvreshard.catalog.engine import engine_layers
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, ScaledRows
from kvreshard.model import LayoutError

SCHEME = {"dynamic": False, "num_bits": 8, "type": "float"}
FP8 = Attention(8, 128, "fp8_e4m3", quantisation="scale-per-tensor")
OWN = Attention(8, 128, "bfloat16")


def first_kind(raw: dict[str, Any], engine: str = "tp=1") -> Kind:
    return engine_layers(read_model("m", raw), parse_engine(engine))[0].kind


@pytest.mark.parametrize(
    ("quantised", "expected"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": SCHEME}, FP8),
        ({"quant_method": "modelopt_fp4", "kv_cache_quant_algo": "FP8"}, FP8),
        ({"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "fp8"}}, FP8),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}, FP8),
        ({"producer": {"name": "modelopt"}, "quant_algo": "FP8", "kv_cache_scheme": "FP8"}, OWN),
        ({"quant_method": "modelopt", "kv_cache_scheme": {**SCHEME, "dynamic": True}}, OWN),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "INT8"}, OWN),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": None}, OWN),
        ({"quant_method": "fp8", "kv_cache_scheme": SCHEME}, OWN),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "strategy": "tensor"}}, FP8),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, OWN),
    ],
)  # fmt: skip
def test_what_a_file_declares_holds_where_the_engine_does_not_say(quantised: dict[str, Any], expected: Kind) -> None:
    raw = {**PLAIN, "quantization_config": quantised}
    assert first_kind(raw) == expected
    assert first_kind(raw, "tp=1,dtype=bf16") == OWN
    assert first_kind(raw, "tp=1,dtype=fp8") == FP8


def test_latents_are_in_what_modelopt_declares_and_not_in_what_compressed_tensors_does() -> None:
    modelopt = {"quant_method": "modelopt", "kv_cache_scheme": SCHEME}
    assert first_kind({**LATENT, "quantization_config": modelopt}) == Latent(576, "fp8_e4m3", "scale-per-tensor")
    compressed = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "strategy": "tensor"}}
    assert first_kind({**LATENT, "quantization_config": compressed}) == Latent(576, "bfloat16")
    assert first_kind({**PLAIN, "text_config": PLAIN, "compression_config": compressed}) == FP8


def test_a_class_that_makes_attention_without_the_files_quantisation_ignores_its_scheme() -> None:
    compressed = {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "strategy": "tensor"}}
    raw = changed(PLAIN, model_type="bailing_moe_v2", head_dim=128, quantization_config=compressed)
    assert first_kind(raw) == OWN
    assert first_kind(raw, "tp=1,dtype=fp8") == FP8
    modelopt = {"quant_method": "modelopt", "kv_cache_scheme": SCHEME}
    assert first_kind({**raw, "quantization_config": modelopt}) == FP8


def test_caches_with_a_form_of_their_own_keep_it() -> None:
    quantised = {"quant_method": "modelopt", "kv_cache_scheme": SCHEME}
    four = changed(
        LATENT, model_type="deepseek_v4", head_dim=512, sliding_window=128, index_head_dim=128, compress_ratios=[0] * 4
    )
    packed = first_kind({**four, "quantization_config": quantised})
    assert isinstance(packed, ScaledRows)
    assert packed == first_kind(four) == first_kind(changed(four, torch_dtype=None))
    assert isinstance(first_kind({**DELTA, "quantization_config": quantised}), GatedDelta)


def test_a_hybrid_has_pages_for_the_cache_that_it_declares() -> None:
    quantised = {**NEMOTRON, "quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": SCHEME}}
    one, other = (
        describe(read_model("m", raw), parse_engine(engine), "e", 2)
        for raw, engine in ((quantised, "tp=1"), (NEMOTRON, "tp=1,dtype=fp8"))
    )
    assert one == other
    assert one != describe(read_model("m", NEMOTRON), parse_engine("tp=1"), "e", 2)


def test_a_draft_has_the_cache_of_its_model() -> None:
    quantised = {**PLAIN, "quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": SCHEME}}
    both = as_draft(read_model("m", quantised), read_model("d", changed(PLAIN, torch_dtype=None)))
    assert {layer.kind for layer in engine_layers(both, parse_engine("tp=1"))} == {FP8}


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (changed(PLAIN, torch_dtype=None), "field 'dtype': is missing, .*; give the engine dtype=bfloat16 "),
        ({**PLAIN, "quantization_config": {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}},
         "'quantization_config': declares a cache in nvfp4, which is not described; give the engine a dtype, as in dtype=fp8"),
        ({**PLAIN, "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {**SCHEME, "strategy": "attn_head"}}},
         r"declares a cache in 8 bits \(float, per attn_head\)"),
    ],
)  # fmt: skip
def test_what_the_file_does_not_tell_the_engine_must_say(raw: dict[str, Any], told: str) -> None:
    model = read_model("m", raw)
    with pytest.raises(LayoutError, match=f"^engine 'prefill': config of 'm', .*{told}"):
        describe(model, parse_engine("tp=1"), "prefill", 2)
    assert engine_layers(model, parse_engine("dtype=fp8"))[0].kind == FP8
    assert engine_layers(model, parse_engine("dtype=bfloat16"))[0].kind == OWN


@pytest.mark.parametrize(
    ("outer", "inner", "expected", "cast_from"),
    [
        ({"dtype": "float16"}, {"dtype": "bfloat16"}, "float16", ""),
        ({}, {"torch_dtype": "float16"}, "float16", ""),
        ({"vision_config": {"dtype": "float16"}}, {}, "float16", ""),
        ({"vision_config": {"dtype": "float16"}}, {"dtype": "bfloat16"}, "bfloat16", ""),
        ({"dtype": None, "torch_dtype": "float16"}, {"dtype": "bfloat16"}, "float16", ""),
        ({"dtype": "float32"}, {"dtype": "float16"}, "bfloat16", "float32"),
        ({"dtype": "float16", "model_type": "gemma3"}, {}, "bfloat16", "float16"),
    ],
)
def test_the_dtype_is_the_one_that_vllm_finds_first_and_runs(
    outer: dict[str, Any], inner: dict[str, Any], expected: str, cast_from: str
) -> None:
    text = {**changed(PLAIN, torch_dtype=None), **inner}
    model = read_model("m", {"model_type": "wrapper", **outer, "text_config": text})
    assert (model.dtype, model.cast_from) == (expected, cast_from)
    assert {layer.kind for layer in model.layers} == {Attention(8, 128, expected)}


def test_a_null_inside_says_no_dtype() -> None:
    spoken = {"dtype": "float16", "thinker_config": {"dtype": None, "text_config": changed(PLAIN, torch_dtype=None)}}
    assert read_model("m", spoken).dtype == "float16"


@pytest.mark.parametrize("junk", [[], [1], "fp8", 7])
def test_what_is_no_object_is_refused(junk: object) -> None:
    with pytest.raises(LayoutError, match="field 'quantization_config': is "):
        read_model("m", {**PLAIN, "quantization_config": junk})
