"""How many KV heads, and how wide, has a model whose file says neither?

transformers fills in what a file leaves out from the configuration class of the `model_type`, and vLLM 0.32 takes what it finds there.
What that is differs by family, so each of the two fields has one of three answers:

1. a number, the class's own default: `KV_HEADS`, `HEAD_SIZES`;
2. computed by the class, or by vLLM's model where the class has no such field: one KV head per query head, `PER_QUERY_HEAD`, or
   `hidden_size / num_attention_heads`, `DERIVED_HEAD_SIZE`;
3. not known: the family is in neither, and a file without the field is refused (`Config.num_kv_heads`, `Config.head_size`).

Numbers are those of transformers 5.19 (`models/*/configuration_*.py`); `tests/vllm/test_defaults.py` compares each with its class. A field that is
null is another thing than an absent one, and most classes then compute what they otherwise know: so a null is refused where a number is known.
"""

from __future__ import annotations

from collections.abc import Mapping

KV_HEADS: Mapping[str, int] = {
    "ernie4_5_moe": 4,
    "exaone4": 32,
    "exaone_moe": 32,
    "falcon_h1": 8,
    "gemma": 16,
    "gemma2": 4,
    **dict.fromkeys(("gemma3", "gemma3_text"), 4),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), 2),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), 4),
    "glm4": 2,
    "glm4_moe": 8,
    "gpt_oss": 8,
    "hy_v3": 8,
    "inkling_model": 4,
    "jamba": 8,
    "laguna": 8,
    **dict.fromkeys(("lfm2", "lfm2_moe"), 8),
    **dict.fromkeys(("llama4", "llama4_text"), 8),
    "mimo_v2_flash": 4,
    "minimax_m2": 8,
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), 4),
    **dict.fromkeys(("mistral", "mixtral"), 8),
    "muse_glimmer_text": 2,
    "nemotron_h": 8,
    **dict.fromkeys(("qwen2", "qwen3"), 32),
    "qwen2_moe": 16,
    "qwen3_moe": 4,
    "qwen3_next": 2,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), 4),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), 2),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), 2),
    "smollm3": 4,
    "starcoder2": 2,
}
# The last six have no such field.
PER_QUERY_HEAD = (
    "llama", "phi3", "granite", "granitemoe", "granitemoehybrid", "olmo", "olmo2", "olmo_hybrid", "afmoe", "cohere2", "cohere2_moe",
    "exaone", "telechat", "gpt2", "gptj", "bloom", "opt", "gpt_neox",
)  # fmt: skip
HEAD_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("afmoe", "cohere2_moe", "glm4", "hy_v3", "laguna", "llama4", "llama4_text", "minimax_m2", "qwen3"), 128),
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text", "nemotron_h"), 128),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text"), 256),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), 256),
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp", "qwen4_exp_text"), 256),
    "gpt_oss": 64,
    "mimo_v2_flash": 192,
    "muse_glimmer_text": 128,
    "step3_text": 256,
    # Families that have no reader of their own.
    **dict.fromkeys(("cwm", "ernie4_5", "glm", "helium", "higgs_audio_v2", "mellum", "ministral3", "paddleocr_vl_text"), 128),
    **dict.fromkeys(("qwen2_5_omni_talker", "qwen3_omni_moe_talker_code_predictor", "qwen3_vl_text", "seed_oss", "solar_open"), 128),
    "vaultgemma": 256,
}  # fmt: skip
DERIVED_HEAD_SIZE = frozenset({
    "bailing_hybrid", "bailing_moe", "bailing_moe_v2", "bloom", "chatglm", "cohere2", "dbrx", "ernie4_5_moe", "exaone", "exaone4",
    "exaone_moe", "falcon", "RefinedWeb", "RefinedWebModel", "falcon_h1", "glm4_moe", "gpt2", "gptj", "granite", "granitemoe",
    "gpt_bigcode", "gpt_neox", "granitemoehybrid", "hunyuan_vl_text", "inkling_model", "jamba", "lfm2", "lfm2_moe", "llama", "mimo", "mistral", "mixtral", "moondream3", "nemotron", "nemotron-nas",
    "olmo", "olmo2", "olmo_hybrid", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3_moe", "smollm3", "starcoder2", "step1", "step3p5",
    # Families that have no reader of their own.
    "apertus", "arcee", "aria_text", "bitnet", "cohere", "csm", "diffllama", "doge", "dots1", "emu3_text_model", "ernie4_5_vl_moe_text",
    "flex_olmo", "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "granite_swa", "granitemoe_swa", "granitemoeshared",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hyperclovax", "jais2", "ministral", "moshi", "nanochat", "olmo3", "olmoe", "phi",
    "phi4_multimodal", "phimoe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text", "qwen3_vl_moe_text",
    "stablelm", "voxtral_realtime_text",
    # The same without a class in transformers (vLLM 0.32, the file of the name; Qwen's in `dots_ocr` and `kimi_audio`, Llama's in `phi3_v` and `phi4mm`).
    "deepseek", "dots_ocr", "internlm2", "iquestloopcoder", "kimi_audio", "minicpm", "minicpmo", "minicpmv", "molmo", "orion", "phi3_v", "phi4mm",
    "PanguEmbedded", "TeleFLM", "telechat",
})  # fmt: skip
# The window of a file that says nothing; null says that there is none.
WINDOW_TOKENS: Mapping[str, int] = {"mistral": 4096, "exaone4": 4096, "exaone_moe": 4096, "muse_glimmer_text": 2048}
