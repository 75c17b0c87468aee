"""Which tiny models are there? Each has the geometry of its family: heads, windows, states, layers that share a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.e2e.tiny import PICTURE_TOKEN, ROPE, VOCABULARY, WIDTH, YARN, TinyModel


def _layers(pattern: str, names: Mapping[str, str]) -> list[str]:
    return [names[letter] for letter in pattern]


_WINDOW = {"w": "sliding_attention", "f": "full_attention"}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": _layers("wwfwwf", _WINDOW),
    "sliding_window": 160,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "head_dim": 32,
    "global_head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_theta": 1000000.0}},
}
_MLA = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "rope_parameters": YARN,
}

_DEEPSEEK_V3 = {
    **_MLA,
    "q_lora_rank": 64,
    "n_group": 2,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
_GRANITE_HYBRID: dict[str, Any] = {
    "hidden_size": 256,  # heads of 32, the narrowest that the CPU kernels know
    "num_hidden_layers": 4,
    "layer_types": _layers("mmam", {"m": "mamba", "a": "attention"}),
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 64,
    "shared_intermediate_size": 128,
    "rope_parameters": ROPE,
    "attention_multiplier": 0.125,
}
_QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _layers("lllf", {"l": "linear_attention", "f": "full_attention"}),
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}

# The smallest model of vLLM that sees and starts without torchvision: a picture is the first 40 tokens of its prompt.
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
_BLIP2 = {
    "vision_config": {**_TOWER, "image_size": 56, "patch_size": 14, "initializer_range": WIDTH},
    "qformer_config": {
        **_TOWER,
        "vocab_size": VOCABULARY,
        "encoder_hidden_size": 64,
        "cross_attention_frequency": 1,
        "initializer_range": WIDTH,
    },
    "text_config": {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "word_embed_proj_dim": 256,
        "ffn_dim": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "init_std": WIDTH,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
    "num_query_tokens": 40,
    "image_token_index": PICTURE_TOKEN,
}

# What three ranks can share: heads, and words once vLLM has filled them up to a multiple of 64.
_BY_THREES = {
    "hidden_size": 192,
    "intermediate_size": 192,
    "vocab_size": 576,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
}
_GEMMA2 = {
    "num_hidden_layers": 5,
    "head_dim": 64,
    "layer_types": _layers("wfwwf", _WINDOW),
    "query_pre_attn_scalar": 64,
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
}
_MOSTLY_WINDOWS = {
    "num_hidden_layers": 4,
    "head_dim": 64,
    "layer_types": _layers("wwwf", _WINDOW),
    "rope_parameters": ROPE,
}

MODELS: dict[str, TinyModel] = {
    model.name: model
    for model in [
        TinyModel("llama", "LlamaForCausalLM", {"head_dim": 64, "rope_parameters": ROPE}),
        TinyModel(
            "llama-deep",
            "LlamaForCausalLM",
            {"num_hidden_layers": 32, "head_dim": 64, "num_key_value_heads": 2, "rope_parameters": ROPE},
        ),
        TinyModel("qwen3", "Qwen3ForCausalLM", {"head_dim": 64, "num_key_value_heads": 2, "rope_parameters": ROPE}),
        TinyModel(
            "gemma3",
            "Gemma3ForCausalLM",
            {
                "num_hidden_layers": 6,
                "head_dim": 64,
                "layer_types": _layers("wwfwww", _WINDOW),
                "sliding_window": 160,
                "query_pre_attn_scalar": 64,
                "tie_word_embeddings": True,
                "rope_parameters": {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_theta": 1000000.0}},
            },
        ),
        TinyModel(
            "llama4",
            "Llama4ForCausalLM",
            {
                "num_hidden_layers": 4,  # three look at their chunk, one at all
                "head_dim": 64,
                "attention_chunk_size": 128,
                "no_rope_layer_interval": 4,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 256,
                "interleave_moe_layer_step": 2,
                "attn_temperature_tuning": False,
                "rope_parameters": ROPE,
            },
        ),
        # The geometry of Gemma-4 12B and 26B: window heads twice as many as global ones, and half as wide.
        TinyModel(
            "gemma4", "Gemma4ForCausalLM", {**_GEMMA4, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
        ),
        # That of the 31B: a window token takes twice the bytes of a global one.
        TinyModel(
            "gemma4-wide", "Gemma4ForCausalLM", {**_GEMMA4, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
        ),
        TinyModel(
            "gpt-oss",
            "GptOssForCausalLM",
            {
                "num_hidden_layers": 4,
                "head_dim": 64,
                "layer_types": _layers("wfwf", _WINDOW),
                "sliding_window": 160,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size": 128,
                "rope_parameters": YARN,
            },
        ),
        TinyModel(
            "deepseek-v2",
            "DeepseekV2ForCausalLM",
            {**_MLA, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
            prefix_caching=False,
        ),
        TinyModel(
            "deepseek-v3",
            "DeepseekV3ForCausalLM",
            _DEEPSEEK_V3,
            prefix_caching=False,
        ),
        TinyModel(
            "nemotron-h",
            "NemotronHForCausalLM",
            {
                "num_hidden_layers": 4,
                "layers_block_type": _layers("mamf", {"m": "mamba", "a": "attention", "f": "mlp"}),
                "head_dim": 64,
                "ssm_state_size": 32,
                "mamba_num_heads": 8,
                "mamba_head_dim": 64,
                "n_groups": 4,
                "chunk_size": 32,
                "intermediate_size": 128,
            },
            prefix_caching=False,
        ),
        TinyModel(
            "falcon-h1",
            "FalconH1ForCausalLM",
            {
                "head_dim": 64,
                "mamba_d_ssm": 512,
                "mamba_n_heads": 8,
                "mamba_d_head": 64,
                "mamba_n_groups": 4,
                "mamba_d_state": 32,
                "mamba_chunk_size": 32,
                "rope_parameters": ROPE,
            },
            prefix_caching=False,
        ),
        TinyModel("granite-hybrid", "GraniteMoeHybridForCausalLM", _GRANITE_HYBRID, prefix_caching=False),
        # For 0.30 and 0.31, whose CPU operators have no float32 convolution.
        TinyModel(
            "granite-hybrid-bf16",
            "GraniteMoeHybridForCausalLM",
            _GRANITE_HYBRID,
            dtype="bfloat16",
            prefix_caching=False,
        ),
        TinyModel("qwen3-next", "Qwen3NextForCausalLM", _QWEN3_NEXT, dtype="bfloat16", prefix_caching=False),
        TinyModel(
            "qwen3-next-mtp",
            "Qwen3NextForCausalLM",
            _QWEN3_NEXT,
            dtype="bfloat16",
            prefix_caching=False,
            draft="mtp-beside",
        ),
        TinyModel(
            "mixtral",
            "MixtralForCausalLM",
            {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": ROPE},
        ),
        TinyModel(
            "qwen3-moe",
            "Qwen3MoeForCausalLM",
            {
                "head_dim": 64,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "norm_topk_prob": True,
                "rope_parameters": ROPE,
            },
        ),
        TinyModel(
            "llama-eagle3",
            "LlamaForCausalLM",
            {"num_hidden_layers": 4, "head_dim": 64, "rope_parameters": ROPE},
            draft="eagle3",
        ),
        TinyModel(
            "deepseek-mtp",
            "DeepseekV3ForCausalLM",
            _DEEPSEEK_V3,
            prefix_caching=False,
            draft="mtp",
        ),
        TinyModel(
            "llama-three",
            "LlamaForCausalLM",
            {**_BY_THREES, "num_hidden_layers": 3, "head_dim": 96, "rope_parameters": ROPE},
        ),
        TinyModel("gemma2", "Gemma2ForCausalLM", {**_GEMMA2, "sliding_window": 100}),
        TinyModel("gemma2-three", "Gemma2ForCausalLM", {**_GEMMA2, **_BY_THREES, "sliding_window": 77}),
        TinyModel(
            "gemma3n",
            "Gemma3nForCausalLM",
            {
                "num_hidden_layers": 6,
                "num_kv_shared_layers": 3,  # the last three look into the caches of the first
                "head_dim": 64,
                "layer_types": _layers("wwfwwf", _WINDOW),
                "sliding_window": 100,
                "vocab_size_per_layer_input": VOCABULARY,
                "hidden_size_per_layer_input": 32,
                "laurel_rank": 16,
                "altup_num_inputs": 2,
                "activation_sparsity_pattern": [0.0] * 6,
                "intermediate_size": [256] * 6,
                "tie_word_embeddings": True,
                "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
            },
        ),
        TinyModel("olmo3", "Olmo3ForCausalLM", {**_MOSTLY_WINDOWS, "sliding_window": 96}),
        TinyModel(
            "exaone4",
            "Exaone4ForCausalLM",
            {**_MOSTLY_WINDOWS, "sliding_window": 130, "sliding_window_pattern": "LLLG"},
        ),
        TinyModel(
            "blip2",
            "Blip2ForConditionalGeneration",
            _BLIP2,
            engine_args={"skip_tokenizer_init": False, "enable_mm_embeds": True},
            picture_tokens=40,
        ),
        TinyModel("mistral", "MistralForCausalLM", {"head_dim": 64, "sliding_window": 100, "rope_parameters": ROPE}),
        TinyModel(
            "glm4-moe",
            "Glm4MoeForCausalLM",
            {
                "head_dim": 64,
                "n_routed_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "first_k_dense_replace": 1,
                "n_group": 1,
                "topk_group": 1,
                "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
            },
        ),
        TinyModel(
            "nemotron-h-three",
            "NemotronHForCausalLM",
            {
                **_BY_THREES,
                "num_hidden_layers": 6,
                "layers_block_type": _layers("mammaf", {"m": "mamba", "a": "attention", "f": "mlp"}),
                "head_dim": 64,
                "ssm_state_size": 16,
                "mamba_num_heads": 12,
                "mamba_head_dim": 32,
                "n_groups": 3,
                "chunk_size": 32,
                "intermediate_size": 96,
            },
            prefix_caching=False,
        ),
        TinyModel(
            "zamba2",
            "Zamba2ForCausalLM",
            {
                "hidden_size": 256,
                "num_hidden_layers": 6,
                "layers_block_type": _layers("mhmmhm", {"m": "mamba", "h": "hybrid"}),
                "num_key_value_heads": 8,
                "num_mem_blocks": 1,
                "n_mamba_heads": 8,
                "mamba_d_state": 32,
                "mamba_expand": 2,
                "mamba_ngroups": 2,
                "chunk_size": 32,
                "use_mem_rope": True,
                "rope_parameters": ROPE,
            },
            prefix_caching=False,
        ),
        TinyModel(
            "mamba2",
            "Mamba2ForCausalLM",
            {
                "num_hidden_layers": 3,
                "state_size": 32,
                "num_heads": 8,
                "head_dim": 32,
                "expand": 2,
                "n_groups": 2,
                "chunk_size": 32,
                "conv_kernel": 4,
            },
            prefix_caching=False,
        ),
    ]
}
