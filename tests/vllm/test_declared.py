"""The cache dtype that a model's file declares, as vLLM resolves it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from tests.unit.catalog.test_config import PLAIN
from transformers import LlamaConfig

from kvreshard.catalog import read_model

FLOAT = {"dynamic": False, "num_bits": 8, "type": "float"}
SCHEMES: tuple[Any, ...] = (
    None, "FP8", "fp8", "NVFP4", "INT8", FLOAT, {**FLOAT, "dynamic": True}, {**FLOAT, "num_bits": 4}, {**FLOAT, "type": "int"}, {"num_bits": 8},
)  # fmt: skip
METHODS: tuple[dict[str, Any], ...] = (
    {"quant_method": "modelopt"},
    {"quant_method": "MODELOPT_FP4"},
    {"quant_method": "fp8"},
    {"quant_method": "awq"},
    {},
    {"producer": {"name": "modelopt"}},
    {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}},
    {"quantization": {"quant_algo": "NVFP4", "modelopt_quant_config": {}}},
)


@pytest.mark.parametrize("name", ["kv_cache_scheme", "kv_cache_quant_algo"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_every_method_and_scheme(name: str, *, is_inside: bool) -> None:
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    answers = set()
    for method, scheme in itertools.product(METHODS, SCHEMES):
        quantised = copy.deepcopy(method)
        part = quantised.setdefault("quantization", {}) if is_inside else quantised
        part[name] = scheme
        own = LlamaConfig()
        own.quantization_config = copy.deepcopy(quantised)
        ModelArchConfigConvertorBase(own, own).get_quantization_config()
        expected = get_kv_cache_quant_algo_string(own.quantization_config) or "auto"
        assert read_model("m", {**PLAIN, "quantization_config": quantised}).declared == expected, quantised
        answers.add(expected)
    assert answers == {"auto", "fp8_e4m3", "nvfp4"}
