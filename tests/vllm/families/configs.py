"""Configs of the families that the catalog reads, as transformers has them by default, with what only files on the hub have.

`PLAIN` need nothing else. A field of `CHANGED` is one that vLLM's class asks for and transformers' default lacks, or one that is the
case: its first word is the model type; one that is `ABSENT` is taken out of the file. `HUB` are families that transformers has no class for; vLLM has its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PLAIN = (
    "axk1",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "deepseek_v3",
    "deepseek_v32",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "falcon_h1",
    "falcon_mamba",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "glm_moe_dsa",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "granitemoehybrid",
    "granitemoeshared",
    "granite_swa",
    "granitemoe_swa",
    "hy_v4",
    "hyperclovax",
    "jamba",
    "laguna",
    "llama",
    "llama4_text",
    "mamba",
    "mamba2",
    "minicpm3",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo_hybrid",
    "olmoe",
    "opt",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "stablelm",
    "zamba2",
)
SWA = {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128}
GLM5 = {
    "mhc": True,
    "mla_use_nope": True,
    "indexer_rope_interleave": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
INDEXER = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
QWEN4 = {"architectures": ["Qwen4ExpForCausalLM"], "num_experts": 16, "ngram_vocab_size_base": 1000, "output_gate_type": "silu",
         "eos_token_id": 1, **INDEXER}  # fmt: skip
ABSENT = "absent"
WINDOW = {"sliding_window": 64}
FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT = {
    "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": FP8, "ignore": []}
}
COMPRESSED = {
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": [],
        "kv_cache_scheme": {**FP8, "strategy": "tensor", "symmetric": True},
    }
}  # fmt: skip
BARE = {"num_key_value_heads": ABSENT, "head_dim": ABSENT, "sliding_window": ABSENT}
CHANGED: Mapping[str, Mapping[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "cohere2_moe dense": {"first_k_dense_replace": 3, "num_hidden_layers": 11, "layer_types": None, "mlp_layer_types": None,
                          "prefix_dense_sliding_window_pattern": 2},
    "deepseek_v2": {"n_shared_experts": 2, "moe_intermediate_size": 1536},
    "falcon newer": {"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 128, "hidden_size": 8192},
    "falcon heads": {"multi_query": False},
    "deepseek_v2 plain": { "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0, "use_mla": False,
                          "num_key_value_heads": 8, "hidden_size": 4096, "n_shared_experts": 2, "moe_intermediate_size": 1536, "q_lora_rank": None},
    "deepseek_v3 modelopt": MODELOPT,
    "deepseek_v3 compressed": COMPRESSED,
    "gemma2 modelopt": MODELOPT,
    "gemma2 compressed": COMPRESSED,
    "llama modelopt": MODELOPT,
    "qwen3_next modelopt": MODELOPT,
    "qwen3_next compressed": COMPRESSED,
    "jamba compressed": COMPRESSED,
    "lfm2 compressed": {"block_dim": 2560, "conv_dim": 2560, "conv_dim_out": 2560, **COMPRESSED},
    "lfm2_moe compressed": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], **COMPRESSED},
    "zamba2 compressed": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], **COMPRESSED},
    "ernie4_5 bare": {**BARE, "num_key_value_heads": 2},
    "gemma2 bare": {**BARE, "sliding_window": 4096},
    "glm4 bare": BARE,
    "gpt_oss bare": {**BARE, "sliding_window": 128, "intermediate_size": 4096},
    "mistral bare": BARE,
    "mixtral bare": BARE,
    "qwen3_moe bare": BARE,
    "gemma3_text pattern": {"layer_types": ["full_attention", "sliding_attention"] * 13, "head_dim": 128},
    "gemma4_text unequal": {"per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": 2}, "29": {"head_dim": 64}}},
    "glm4_moe": {"head_dim": 128},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm_moe_dsa every fourth": {"index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_types": None},
    "glm_moe_dsa both": {"index_topk_freq": 4, "index_skip_topk_offset": 3,
                         "indexer_types": ["shared" if max(index - 2, 0) % 4 else "full" for index in range(78)]},
    "glm_moe_dsa pattern": {"index_topk_pattern": "FSSFS" * 15, "indexer_types": None},
    "glm5_next_text": {"architectures": ["Glm5NextForCausalLM"], "num_hidden_layers": 8, "layer_types": None, "mlp_layer_types": None,
                       "indexer_types": None, "n_routed_experts": 8, **GLM5},
    "glm5_next_text sizes": {"architectures": ["Glm5NextForCausalLM"], "num_hidden_layers": 5, "n_routed_experts": 8, "mlp_layer_types": None,
                             "layer_types": ["full_attention", "linear_attention", "indexed_attention", "linear_attention", "full_attention"],
                             "indexer_types": None, "linear_num_heads": 32, "linear_head_dim": 64, "index_kpool": 4, **GLM5},
    "gpt_oss": {"intermediate_size": 4096},
    "granitemoehybrid states": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hy_v4 untyped": {"layer_types": None},
    "hy_v4 some": {"layer_types": ["full_attention", "indexed_attention"] * 17, "indexer_types": ["full", "full", "shared", "shared"] * 8 + ["full"] * 2},
    "hy_v4 last full": {"layer_types": ["indexed_attention"] * 33 + ["full_attention"]},
    "hy_v3": {"first_k_dense_replace": 1, "num_hidden_layers": 4, "mlp_layer_types": None, "expert_hidden_dim": 1536,
              "route_norm": True, "qk_norm": True},
    "kimi_linear": {"mla_use_nope": True, "layer_types": None, "num_hidden_layers": 4,
                    "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 32, "head_dim": 128,
                                           "short_conv_kernel_size": 4}},
    "kimi_linear both": {"mla_use_nope": True, "layer_types": None, "num_hidden_layers": 4, "linear_head_dim": 64, "linear_num_heads": 16,
                         "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 32, "head_dim": 128,
                                                "short_conv_kernel_size": 4}},
    "laguna windows": {"layer_types": ["sliding_attention", "full_attention"] * 20, "sliding_window": 512},
    "lfm2": {"block_dim": 2560, "conv_dim": 2560, "conv_dim_out": 2560},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "longcat_flash": {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": "identity"},
    "mimo_v2_flash": {"hybrid_layer_pattern": [0, 1, 1, 1] * 12, "v_head_dim": 128, "layernorm_epsilon": 1e-5,
                      "sliding_window_size": 128, **SWA},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid"},
    "nemotron": {"num_key_value_heads": 8},
    "nemotron_h": {"num_hidden_layers": 6, "layers_block_type": None, "hybrid_override_pattern": "M-M*-M", "mamba_num_heads": 96},
    "nemotron_h listed": {"num_hidden_layers": ABSENT, "head_dim": ABSENT, "attention_head_dim": 128, "num_key_value_heads": ABSENT,
                          "mamba_num_heads": 96, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"]},
    "olmo_hybrid few": {"num_key_value_heads": 6, "linear_num_key_heads": 12, "linear_num_value_heads": 24},
    "qwen4_exp_text": {**QWEN4, "num_hidden_layers": 8, "layer_types": None, "ple_layer_ids": [1, 2]},
    "qwen4_exp_text axes": {**QWEN4, "num_hidden_layers": 6, "indexer_compress_ratio": 8,
                            "layer_types": ["linear_attention", "full_attention"] * 3, "ple_layer_ids": [3], "ngram_size": 2,
                            "heads_per_ngram": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                                                      "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}},
    "qwen4_exp_text no indexer": {**QWEN4, "num_hidden_layers": 4, "layer_types": None, **dict.fromkeys(INDEXER)},
    "exaone4 bare": dict.fromkeys(("sliding_window", "sliding_window_pattern", "layer_types"), ABSENT),
    "gpt_bigcode heads": {"multi_query": False, "num_key_value_heads": ABSENT},
    "muse_glimmer_text": {"architectures": ["MuseGlimmerForCausalLM"], "layer_types": None},
    "muse_glimmer_text bare": {"architectures": ["MuseGlimmerForCausalLM"], "layer_types": ABSENT, "no_rope_layers": ABSENT, **BARE},
    "falcon window": WINDOW,
    "gemma window off": {**WINDOW, "use_sliding_window": False},
    "glm4 types": {**WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 20},
    "laguna untyped": {**WINDOW, "layer_types": None},
    "gemma2 float16": {"dtype": "float16"},
    "llama float32": {"dtype": "float32"},
    "llama no window": {"sliding_window": 0},
    "llama window": WINDOW,
    "llama window off": {**WINDOW, "use_sliding_window": False},
    "mixtral types": {**WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 16},
    "gpt2 sizes": {"head_dim": 48, "num_key_value_heads": 1},
    "gpt_neox window off": {**WINDOW, "use_sliding_window": False},
    "granitemoe size": {"head_dim": 48},
    "olmoe size": {"head_dim": 48},
    "qwen2 size": {"head_dim": 48},
    "qwen2_moe window": {**WINDOW, "layer_types": None, "use_sliding_window": True, "max_window_layers": 4},
    "qwen3_moe window": {**WINDOW, "use_sliding_window": True, "max_window_layers": 4},
    "zamba2 few": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_ngroups": 2,
                   "hybrid_layer_ids": [1, 3]},
}  # fmt: skip
M3 = {
    "model_type": "minimax_m3_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
    "moe_layer_freq": [0] * 6,
    "sparse_attention_config": {
        "use_sparse_attention": True, "sparse_index_dim": 128, "sparse_num_index_heads": 4, "sparse_topk_blocks": 16,
        "sparse_block_size": 128, "sparse_attention_freq": [0, 0, 0, 1, 1, 1],
    },
}  # fmt: skip
V41 = {
    "model_type": "deepseek_v41_text", "vocab_size": 1024, "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 64,
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280, "o_lora_rank": 1024, "o_groups": 8,
    "sliding_window": 128, "rms_norm_eps": 1e-6, "max_position_embeddings": 65536, "rope_theta": 10000.0, "hidden_act": "silu",
    "compress_rope_theta": 160000.0, "compress_ratios": [0, 1, 1, 2, 2, 2], "kv_source_layer_ids": [1, 3, 5],
    "index_source_layer_ids": [1, 2, 3, 4, 5], "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_hash_layers": 0, "hc_mult": 4,
    "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "swiglu_limit": 10.0, "expert_dtype": "bf16", "num_nextn_predict_layers": 3, "dspark_target_layer_ids": [1, 3], "dspark_markov_rank": 64,
    "dspark_block_size": 5, "dspark_noise_token_id": 7,
}  # fmt: skip
INKLING = {
    "architectures": ["InklingForCausalLM"], "hidden_size": 3072, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "swa_num_key_value_heads": 8, "swa_num_attention_heads": 16, "swa_head_dim": 128,
    "local_layer_ids": [1, 2, 3, 4, 5, 7], "sliding_window_size": 512, "use_sconv": True, "sconv_kernel_size": 4,
    "n_routed_experts": 8, "n_shared_experts": 1, "shared_expert_sink": True, "num_experts_per_tok": 2, "vocab_size": 1024,
}  # fmt: skip
FALCON = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "n_layer": 3,
    "n_head": 8,
    "bias": False,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
PLAIN_FILE = {
    "vocab_size": 1024, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "attention_bias": False, "bias": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "score_function": "sigmoid", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "use_bias": False,
    "use_qkv_bias": False, "use_qk_norm": True, "moe_router_enable_expert_bias": True, "embedding_dropout": 0, "norm_head": False,
    "norm_softmax": False, "head_dim": 128,
}  # fmt: skip
LATENTS = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Their configuration classes come with the weights (`refusals.AsInTheFile`).
FOREIGN: Mapping[str, Mapping[str, Any]] = {
    "PanguEmbedded": {"architectures": ["PanguEmbeddedForCausalLM"]},
    "TeleFLM": {"architectures": ["TeleFLMForCausalLM"], "input_mult": 1.0, "output_mult": 1.0, "use_mup": False, "mup_scale_factor": 1.0},
    "bailing_moe": {"architectures": ["BailingMoeForCausalLM"], **EXPERTS},
    "bailing_moe_v2": {"architectures": ["BailingMoeV2ForCausalLM"], **EXPERTS},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"]},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "head_dim": 128, "qkv_bias": False},
    "iquestloopcoder": {"architectures": ["IQuestLoopCoderForCausalLM"], "loop_num": 3, "loop_window_size": 32},
    "mimo_v2": {"architectures": ["MiMoV2ForCausalLM"], "hybrid_layer_pattern": [0, 1, 1, 1], "head_dim": 192, "v_head_dim": 128,
                "layernorm_epsilon": 1e-5, "sliding_window_size": 64, "moe_layer_freq": [0] * 4, **SWA},
    "minicpm": {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4, "num_experts": 0,
                "sparse_config": {"kernel_size": 32, "block_size": 64, "window_size": 2048}},
    "molmo": {"architectures": ["MolmoForCausalLM"], "embedding_size": 1024, "layer_norm_eps": 1e-5, "attention_layer_norm": False, "layer_norm_type": "rms",
              "norm_after": False, "qkv_bias": True, "weight_tying": False},
    "orion": {"architectures": ["OrionForCausalLM"]},
    "param2moe": {"architectures": ["Param2MoEForCausalLM"], "rope_theta": 10000.0, **EXPERTS},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "sliding_window": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
               "lm_head_bias": True, "original_max_position_embeddings": 4096},
    "plamo3": {"architectures": ["Plamo3ForCausalLM"], "head_dim": 128, "window_size": 64, "rope_local_theta": 10000, "sliding_window": 64, "sliding_window_pattern": 4,
               "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "interleaved_sliding_window": [64, 64, 64, None]},
    "sarvam_mla": {"architectures": ["SarvamMLAForCausalLM"], **EXPERTS, **LATENTS},
    "sarvam_moe": {"architectures": ["SarvamMoEForCausalLM"], **EXPERTS},
    "solar": {"architectures": ["SolarForCausalLM"], "sliding_window": 64, "head_dim": 128, "mlp_bias": False, "bskcn_1": [1], "bskcn_2": [2],
              "bskcn_3": [1], "bskcn_4": [2], "bskcn_tv": [0.9, 0.8]},
    "telechat": {"architectures": ["TeleChat2ForCausalLM"], "n_layer": 4, "n_head": 8, "num_hidden_layers": ABSENT,
                 "num_key_value_heads": ABSENT, "ffn_hidden_size": 512, "layer_norm_epsilon": 1e-5},
}  # fmt: skip
HUB: Mapping[str, Mapping[str, Any]] = {
    **{case: {**PLAIN_FILE, **fields} for case, fields in FOREIGN.items()},
    "RefinedWeb": {**FALCON, "architectures": ["FalconForCausalLM"], "n_head_kv": 4, "new_decoder_architecture": True},
    "RefinedWebModel": {**FALCON, "architectures": ["FalconForCausalLM"], "multi_query": True},
    "chatglm": {"architectures": ["ChatGLMModel"], "num_layers": 28, "padded_vocab_size": 65024, "hidden_size": 4096,
                "ffn_hidden_size": 13696, "kv_channels": 128, "num_attention_heads": 32, "seq_length": 8192,
                "multi_query_attention": True, "multi_query_group_num": 2, "rmsnorm": True, "add_qkv_bias": True, "original_rope": True, "tie_word_embeddings": False},
    "dbrx": {"architectures": ["DbrxForCausalLM"], "d_model": 1024, "n_heads": 16, "n_layers": 3, "max_seq_len": 2048,
             "vocab_size": 1024, "attn_config": {"kv_n_heads": 4, "clip_qkv": 8, "rope_theta": 500000},
             "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v41": {"architectures": ["DeepseekV41ForCausalLM"], "text_config": {**V41, "dtype": "bfloat16"}},
    "deepseek_v41 few": {"architectures": ["DeepseekV41ForCausalLM"],
                         "text_config": {**V41, "dtype": "bfloat16", "num_hidden_layers": 9, "compress_ratios": [0, 0, 2, 2, 2, 1, 1, 2, 2],
                                         "kv_source_layer_ids": [2, 5, 7], "index_source_layer_ids": [2, 3, 5, 7]}},
    "inkling_model": INKLING,
    "inkling_model wide": {**INKLING, "num_key_value_heads": 8, "hidden_size": 6144, "num_hidden_layers": 6, "local_layer_ids": [1, 2, 3, 4],
                           "swa_num_key_value_heads": 16},
    "minimax_m3_vl": {"architectures": ["MiniMaxM3SparseForCausalLM"], "text_config": {**M3, "dtype": "bfloat16"},
                      "vision_config": {"hidden_size": 1280}},
    "minimax_m3_vl untyped": {"architectures": ["MiniMaxM3SparseForCausalLM"], "vision_config": {"hidden_size": 1280},
                              "text_config": {**M3, "model_type": ABSENT, "dtype": "bfloat16"}},
    "step1": {"architectures": ["Step1ForCausalLM"], "hidden_size": 3072, "num_attention_heads": 48, "num_attention_groups": 4,
              "num_hidden_layers": 3, "intermediate_size": 8192, "vocab_size": 74752, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    "moondream3": {"architectures": ["Moondream3ForCausalLM"], "config": {"text": {"n_layers": 5, "moe": {"start_layer": 9}}, "vision": {}}},
    "moondream3 grouped": {"architectures": ["Moondream3ForCausalLM"],
                           "config": {"text": {"n_layers": 3, "n_heads": 24, "n_kv_heads": 8, "dim": 1536, "moe": {"start_layer": 9}}}},
    "solar types": {**PLAIN_FILE, **FOREIGN["solar"], "layer_types": ["sliding_attention", "full_attention"] * 2},
    "bailing_moe compressed": {**PLAIN_FILE, **FOREIGN["bailing_moe"], **COMPRESSED},
    "inkling_model compressed": {**INKLING, **COMPRESSED},
    "sarvam_moe compressed": {**PLAIN_FILE, **FOREIGN["sarvam_moe"], **COMPRESSED},
    "plamo3 compressed": {**PLAIN_FILE, **FOREIGN["plamo3"], **COMPRESSED},
    "step3_text": {"architectures": ["Step3TextForCausalLM"], "hidden_size": 7168, "num_attention_heads": 64,
                   "num_attention_groups": 1, "num_hidden_layers": 3, "head_dim": 256, "share_q_dim": 2048,
                   "vocab_size": 128815, "max_position_embedding": 65536, "moe_layers_enum": "1,2"},
}  # fmt: skip
CASES = (*PLAIN, *CHANGED, *HUB)
DECLARING = tuple(case for case, changes in (*CHANGED.items(), *HUB.items()) if "quantization_config" in changes)
"""Cases whose file declares the dtype of its caches."""
PREDICTING = (
    "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa pattern", "hy_v3", "hy_v4",
    "hy_v4 last full", "longcat_flash", "mimo_v2_flash", "qwen3_5_text", "qwen3_next", "qwen4_exp_text",
)  # fmt: skip
"""Cases with prediction layers of their own, which vLLM makes beside the model while it speculates."""


def read_config(case: str, *, num_predicting: int = 0) -> dict[str, Any]:
    """A file of the family, in bfloat16; with so many prediction layers where it is one of `PREDICTING`."""
    if num_predicting:
        return {**read_config(case), "num_nextn_predict_layers": num_predicting}
    model_type = case.split()[0]
    if case in HUB:
        return _present({"model_type": model_type, "dtype": "bfloat16", **HUB[case]})
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = json.loads(json.dumps(CONFIG_MAPPING[model_type]().to_dict(), default=str))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, "")
    names = [architecture] if isinstance(architecture, str) else list(architecture)
    changed = {**config, "architectures": names, "dtype": "bfloat16", "model_type": model_type, **CHANGED.get(case, {})}
    return _present(changed)


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is absent, here and one level below."""
    return {
        name: _present(value) if name == "text_config" else value for name, value in config.items() if value != ABSENT
    }
