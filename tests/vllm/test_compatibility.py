"""Properties of an engine, as vLLM derives them from its configuration, wherever its model has been loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm import models
from tests.vllm.engines import build
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from kvreshard.model import wire
from kvreshard.session.engine_metadata import RankMetadata
from kvreshard.vllm.compatibility import read_compatibility
from kvreshard.vllm.handshake import EngineHandshake, RankPart
from kvreshard.vllm.options import read_options

pytestmark = pytest.mark.vllm

PHI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "original_max_position_embeddings": 512, "torch_dtype": "float32", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512, "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
    },
}  # fmt: skip


@pytest.mark.parametrize(("max_model_len", "factors"), [(None, "short"), (512, "short"), (513, "long"), (2048, "long")])
def test_the_factors_of_long_rope_are_those_that_vllm_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_model_len: int | None, factors: str
) -> None:
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})  # one per process, which has one engine
    (tmp_path / "config.json").write_text(json.dumps(PHI))
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=max_model_len)
    config = VllmConfig(model_config=model)
    with set_current_vllm_config(config):
        rope: Any = rotary_embedding.get_rope(
            16, 2048, rope_parameters=model.hf_config.rope_parameters, dtype=torch.float32
        )
    assert read_compatibility(config)["rope_factors"] == factors == ("long" if rope.use_long_rope else "short")


def test_a_length_that_is_fitted_to_memory_afterwards_changes_no_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--max-model-len -1`: the model has been built for all that it was made for, then vLLM shortens what it allows.

    Of models that name the length only beside their factors, as Phi's do not; those are built for the original length then.
    """
    llama = {key: value for key, value in PHI.items() if key != "original_max_position_embeddings"}
    llama |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    (tmp_path / "config.json").write_text(json.dumps(llama))
    model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=-1)
    config = VllmConfig(model_config=model)
    with set_current_vllm_config(config):
        rope: Any = rotary_embedding.get_rope(
            16, 2048, rope_parameters=model.hf_config.rope_parameters, dtype=torch.float32
        )
    assert rope.use_long_rope
    assert read_compatibility(config)["rope_factors"] == "long"
    model.max_model_len = 500
    assert read_compatibility(config)["rope_factors"] == "long"


def test_facts_are_those_of_a_process_that_has_the_model() -> None:
    """The scheduler's has it with one rank, and has not with two: models write into their configuration."""
    layout = build("p", {models.name(0): models.attention(4, 8)}).layout
    part = RankPart(wire.encode(layout), RankMetadata(0, b"", 0, 0), {"model_config": "as loaded"})
    engine_metadata = EngineHandshake(SimpleNamespace(), read_options({})).make_engine_metadata({(0, 0): part})
    assert engine_metadata.compatibility == {"model_config": "as loaded"}
