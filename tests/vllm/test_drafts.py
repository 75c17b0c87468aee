"""Caches of drafts, read from the draft's file, against those that vLLM's own class registers beside its target's."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.families.asking import SECONDS, Answers, as_json, ask_vllm
from tests.vllm.families.caches import ORDERS, caches_of, tables_of

from kvreshard.catalog import as_draft, read_model
from kvreshard.catalog.drafts import read_draft
from kvreshard.catalog.spec import EngineSpec

pytestmark = pytest.mark.vllm

Fields = dict[str, Any]
LLAMA: Fields = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 512, "num_attention_heads": 32,
    "num_key_value_heads": 8, "num_hidden_layers": 4, "head_dim": 128, "vocab_size": 1000, "max_position_embeddings": 8192,
    "dtype": "bfloat16", "rms_norm_eps": 1e-5,
}  # fmt: skip
QWEN = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 1024}
GEMMA = {
    **LLAMA,
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 512,
    "num_hidden_layers": 7,
}
COHERE = {
    **LLAMA,
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "sliding_window": 512,
    "sliding_window_pattern": 4,
}
DEEPSEEK: Fields = {
    **LLAMA, "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 32, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "head_dim": None,
}  # fmt: skip
ONE = {**LLAMA, "num_hidden_layers": 1}
EAGLE3 = {**ONE, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 500}
DFLASH = {**QWEN, "num_hidden_layers": 2, "architectures": ["DFlashDraftModel"], "block_size": 8}
TOKENS = {"mask_token_id": 3, "target_layer_ids": [1, 2]}
SWA = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
MIXED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
SAID = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
FOUND = {
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 2}],
        "verifier": {"name_or_path": "it"},
    },
    "draft_vocab_size": 500,
    "dtype": "bfloat16",
}

# Target, method, draft. The first has experts, whose groups of ranks vLLM makes once.
CASES: Mapping[str, tuple[Fields, str, Fields]] = {
    "Eagle of a latent": (DEEPSEEK, "eagle", {**DEEPSEEK, "architectures": ["EagleDeepSeekMTPModel"], "num_hidden_layers": 1}),
    "Eagle": (LLAMA, "eagle", ONE),
    "Eagle in another dtype": (LLAMA, "eagle", {**ONE, "dtype": "float16"}),
    "Eagle without a dtype": (LLAMA, "eagle", {**ONE, "dtype": None}),
    "Eagle inside": (LLAMA, "eagle", {"model_type": "eagle", "model": ONE, "num_key_value_heads": 4}),
    "Eagle with a window that nobody looks at": (LLAMA, "eagle", {**ONE, "sliding_window": 64}),
    "Eagle of a target with windows": (MISTRAL, "eagle", {**MISTRAL, "num_hidden_layers": 1, "sliding_window": 64}),
    "Eagle of Cohere": (COHERE, "eagle", {**COHERE, **MIXED, "architectures": ["CohereForCausalLM"]}),
    "Eagle-3 with fewer heads": (QWEN, "eagle3", {**EAGLE3, "num_key_value_heads": 4}),
    "Eagle-3 by type": (LLAMA, "eagle3", {**EAGLE3, **MIXED}),
    "Eagle-3 by type of a target with windows": (MISTRAL, "eagle3", {**EAGLE3, **MIXED}),
    "Eagle-3 of a target with windows": (MISTRAL, "eagle3", EAGLE3),
    "Eagle-3 of Qwen": (
        QWEN,
        "eagle3",
        {**QWEN, **MIXED, "architectures": ["Eagle3Qwen3ForCausalLM"], "use_sliding_window": True, "draft_vocab_size": 500},
    ),
    "Eagle-3 of the speculators": (
        LLAMA,
        "eagle3",
        {**FOUND, "speculators_model_type": "eagle3", "transformer_layer_config": {**ONE, **SAID, "num_key_value_heads": 4}},
    ),
    "DFlash": (QWEN, "dflash", {**DFLASH, "dflash_config": TOKENS}),
    "DFlash of a target with windows": (MISTRAL, "dflash", {**DFLASH, "dflash_config": TOKENS}),
    "DFlash that has windows": (QWEN, "dflash", {**DFLASH, "dflash_config": {**TOKENS, "use_swa": True, "swa_window_size": 128}}),
    "DFlash by type": (QWEN, "dflash", {**DFLASH, **SWA, "use_sliding_window": True, "dflash_config": TOKENS}),
    "DFlash by type, its own": (QWEN, "dflash", {**DFLASH, **SWA, "dflash_config": {**TOKENS, "swa_window_size": 32}}),
    "DFlash with Qwen's windows": (
        QWEN,
        "dflash",
        {**DFLASH, "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0, "dflash_config": TOKENS},
    ),
    "DFlash of the speculators": (
        QWEN,
        "dflash",
        {
            **FOUND, "speculators_model_type": "dflash", "mask_token_id": 3, "aux_hidden_state_layer_ids": [1, 2],
            "transformer_layer_config": {**QWEN, **SAID, **SWA, "num_hidden_layers": 2, "use_sliding_window": False},
        },
    ),
    "DSpark": (
        QWEN,
        "dspark",
        {
            **DFLASH, "architectures": ["Qwen3DSparkModel"], "mask_token_id": 3, "target_layer_ids": [1, 2], "markov_rank": 16,
            "markov_head_type": "vanilla", "use_aux_hidden_state": True,
        },
    ),
    "a model that stands alone": (LLAMA, "draft_model", {**LLAMA, "num_key_value_heads": 4, "head_dim": 64}),
    "Gemma that stands alone": (GEMMA, "draft_model", {**GEMMA, "num_hidden_layers": 12}),
    "Mistral that stands alone": (LLAMA, "draft_model", MISTRAL),
}  # fmt: skip


@functools.cache
def answers(tp: int, rank: int) -> Answers:
    cases = [
        (name, _said(target), {"method": method, "config": _said(draft)})
        for name, (target, method, draft) in CASES.items()
    ]
    return ask_vllm(cases, EngineSpec(tp, spec=2), rank)


def _said(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if value is not None}


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize(("tp", "rank"), [(1, 0), (4, 3)])
def test_drafts_are_read_as_their_classes_cache(tp: int, rank: int) -> None:
    spec = EngineSpec(tp, spec=2)
    for name, (raw, _, draft) in CASES.items():
        said, error = answers(tp, rank)[name]
        assert said is not None, (name, error)
        target = read_model(name, _said(raw))
        model = as_draft(target, read_draft(name, _said(draft), target))
        assert as_json(caches_of(model, spec, rank)) == said["caches"], name
        for order in ORDERS:
            assert as_json(tables_of(model, spec, order)) == said["tables"][order], (name, order)
