"""The table of model families: one row per `model_type`, in the form that `family.Family` describes.

To add a model, add its row (`docs/howto/add-a-model.md`). Numbers of `kv_heads` and `head_size` are the defaults of transformers 5.19's
configuration classes (`models/*/configuration_*.py`), or of vLLM 0.32's model where the class has no such field; `tests/vllm/test_defaults.py`
compares each with its class. The comment above a row names the class, or the file of vLLM 0.32, that the other columns follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from kvreshard.catalog import caches as cache
from kvreshard.catalog import deepseek_v4 as v4
from kvreshard.catalog import layer_rules as rules
from kvreshard.catalog.caches import attention, heads, latent, state, tokens
from kvreshard.catalog.config import DERIVED, PER_QUERY_HEAD, Config
from kvreshard.catalog.family import Family
from kvreshard.catalog.layer_rules import (
    ALL_OR_NONE,
    ALTERNATING,
    BY_TYPE,
    LAYER_TYPES,
    OFF,
    ON,
    SWITCHED,
    Windows,
    decided,
    every,
    listed,
    mtp,
    mtp_behind,
    mtp_like_first,
    numbered,
    one,
    sharing,
    uniform,
)
from kvreshard.kinds import LinearState, Mamba1, Mamba2, ShortConv

mamba1 = partial(state, "mamba", Mamba1, recurrent=Config.dtype)
mamba2 = partial(state, "mamba", Mamba2, recurrent=Config.dtype)
# fmt: off
GPT_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}
# Of `LlamaConfig`, `MistralConfig` and `Qwen2Config`.
SIZES_7B = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
# For `sets`: classes that compute the head size, whatever `head_dim` is, and those that have K and V per query head.
COMPUTED_SIZE: Mapping[str, str | None] = {"head_dim": None}
COMPUTED_HEADS: Mapping[str, str | None] = {**COMPUTED_SIZE, "num_key_value_heads": "num_attention_heads"}
UNWINDOWED = attention(window=cache.unwindowed)
ALL_FULL = uniform("full")
# `falcon.py` makes its attention without the engine's cache options.
FALCON_CACHES = {"full": attention(ignores_fp8=True)}
DELTA_LAYERS = listed(rules.STATE_TYPES, every("full_attention_interval", others="state"))
DELTA_CACHES = {"full": UNWINDOWED, "state": cache.gated_delta}
QWEN3_5 = Family(layers=DELTA_LAYERS, caches=DELTA_CACHES, predicts=mtp("full", "mtp_num_hidden_layers", 1), kv_heads=4, head_size=256)
MINIMAX_M3 = Family(
    layers=rules.minimax_m3, predicts=mtp("indexer full", "num_mtp_modules", 1), expects={"sliding_window": ()}, page_tokens=128,
    caches={"indexer": cache.fixed("indexer", cache.plain_keys(("index_head_dim", "sparse_attention_config.sparse_index_dim")))})
# Of classes that have a layer that predicts unless the file has a number.
ONE_PREDICTS = {"num_nextn_predict_layers": 1}
DEEPSEEK = Family(
    layers=rules.deepseek, predicts=mtp_like_first, caches={"full": attention(window=cache.unwindowed, heads=heads(Config.num_kv_heads, cache.deepseek_head_size))})
SPARSE = Family(layers=rules.sparse, predicts=mtp("indexer latent"), page_tokens=64)
CONV_LAYERS = listed({"conv": "state", "full_attention": "full"}, rules.lfm2)

ATTENTION: Mapping[str, Family] = {
    # By `layer_types`, else one window for all layers.
    "llama": Family(layers=BY_TYPE, if_partial=SIZES_7B, kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    "mistral": Family(layers=BY_TYPE, kv_heads=8, head_size=DERIVED, if_partial=SIZES_7B, if_absent={"sliding_window": 4096}),
    "starcoder2": Family(layers=BY_TYPE, kv_heads=2, head_size=DERIVED),
    **dict.fromkeys(("phi3", "granite", "olmo", "olmo2"), Family(layers=BY_TYPE, kv_heads=PER_QUERY_HEAD, head_size=DERIVED)),
    "granitemoe": Family(layers=BY_TYPE, sets=COMPUTED_SIZE, kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    "granitemoeshared": Family(layers=BY_TYPE, sets=COMPUTED_SIZE, head_size=DERIVED),
    **dict.fromkeys(("phi3_v", "phi4mm", "phimoe"), Family(layers=BY_TYPE, head_size=DERIVED)),
    **dict.fromkeys(("ernie4_5", "ministral3"), Family(layers=BY_TYPE, head_size=128)),
    "solar": Family(layers=ALL_OR_NONE),
    "laguna": Family(layers=Windows(for_all=False), kv_heads=8, head_size=128),
    # One window for all layers or none.
    "mixtral": Family(layers=ALL_OR_NONE, kv_heads=8, head_size=DERIVED),
    "gemma": Family(layers=ALL_OR_NONE, kv_heads=16, head_size=256),
    "glm4": Family(layers=ALL_OR_NONE, kv_heads=2, head_size=128),
    **dict.fromkeys(("nemotron", "cohere", "hyperclovax"), Family(layers=ALL_OR_NONE, head_size=DERIVED)),
    **dict.fromkeys(("olmoe", "stablelm"), Family(layers=ALL_OR_NONE, sets=COMPUTED_SIZE, head_size=DERIVED)),
    # Windows that must be switched on. Layers of Qwen2-MoE without types are of both, of which its class makes full ones.
    "qwen2": Family(layers=SWITCHED, sets=COMPUTED_SIZE, if_partial=SIZES_7B, if_absent={"sliding_window": 4096}, kv_heads=32, head_size=DERIVED),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), Family(layers=Windows(switch=OFF, first=80), sets=COMPUTED_SIZE, if_absent={"sliding_window": 4096}, kv_heads=8, head_size=DERIVED)),
    "qwen3": Family(layers=SWITCHED, if_absent={"sliding_window": 4096}, kv_heads=32, head_size=128),
    "qwen2_moe": Family(layers=Windows(by_type=False, for_all=False, switch=OFF), sets=COMPUTED_SIZE, kv_heads=16, head_size=DERIVED),
    "qwen3_moe": Family(layers=Windows(by_type=False, switch=OFF), if_absent={"sliding_window": 4096}, kv_heads=4, head_size=DERIVED),
    # The same, with layers that predict: `glm4_moe_mtp.py`, `ernie_mtp.py`, `bailing_moe_mtp.py`, `hy_v3_mtp.py`, `mimo_mtp.py`.
    "glm4_moe": Family(layers=ALL_OR_NONE, predicts=mtp_like_first, if_absent=ONE_PREDICTS, kv_heads=8, head_size=DERIVED),
    "ernie4_5_moe": Family(layers=ALL_OR_NONE, predicts=mtp_like_first, kv_heads=4, head_size=DERIVED),
    **dict.fromkeys(("bailing_moe", "bailing_moe_v2"), Family(layers=ALL_OR_NONE, predicts=mtp_like_first, head_size=DERIVED)),
    "hy_v3": Family(layers=ALL_OR_NONE, predicts=mtp_like_first, kv_heads=8, head_size=128),
    "mimo": Family(layers=SWITCHED, predicts=mtp_like_first, head_size=DERIVED),
    # `GptOssConfig`, `Gemma2Config`.
    "gpt_oss": Family(layers=decided(rules.gpt_oss, LAYER_TYPES, "vLLM's class, which gives every other layer a window, from the first on"), kv_heads=8, head_size=64),
    "gemma2": Family(layers=ALTERNATING, kv_heads=4, head_size=256),
    # `AfmoeConfig`.
    "afmoe": Family(layers=listed(LAYER_TYPES, every("global_attn_every_n_layers", 4, others="window")), kv_heads=PER_QUERY_HEAD, head_size=128),
    # `Cohere2Config`, `commandr.py`, `cohere2_moe.py`: a token sees `sliding_window` tokens beside itself.
    "cohere2": Family(layers=listed(LAYER_TYPES, every("sliding_window_pattern", 4, others="window")), if_absent={"sliding_window": 4096},
                      caches={"window": attention(window=cache.cohere_window)}, kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    "cohere2_moe": Family(layers=listed(LAYER_TYPES, rules.cohere2_moe), if_absent={"sliding_window": 4096},
                          caches={"window": attention(window=cache.cohere_window)}, kv_heads=PER_QUERY_HEAD, head_size=128),
    # `Exaone4Config`, `exaone_moe.py`.
    "exaone4": Family(layers=rules.exaone4, if_absent={"sliding_window": 4096}, kv_heads=32, head_size=DERIVED),
    "exaone_moe": Family(layers=rules.exaone4, predicts=mtp_like_first, expects={"sliding_windows": (), "mtp_layer_types": ()},
                         if_absent={"sliding_window": 4096, **ONE_PREDICTS}, kv_heads=32, head_size=DERIVED),
    # `Llama4TextConfig`, `llama4.py`.
    **dict.fromkeys(("llama4", "llama4_text"), Family(
        layers=decided(rules.llama4, {"full_attention": "full", "chunked_attention": "chunk"}, "no_rope_layers"),
        caches={"chunk": attention(window=cache.chunk, family="chunk")}, if_absent={"attention_chunk_size": 8192}, kv_heads=8, head_size=128)),
    # `minicpm3.py`: K and V are cached as they come out of the latent, V as wide as K.
    "minicpm3": Family(layers=ALL_OR_NONE, sets={"num_key_value_heads": "num_attention_heads", "head_dim": cache.minicpm3_head_size}),
    # `minimax_m2.py`, which drops the `num_mtp_modules`.
    "minimax_m2": Family(layers=rules.minimax_m2, expects={"sliding_window": ()}, kv_heads=8, head_size=128),
    # `configs/muse_glimmer.py`.
    "muse_glimmer_text": Family(layers=decided(rules.muse_glimmer, LAYER_TYPES, "no_rope_layers"), if_absent={"sliding_window": 2048}, kv_heads=2, head_size=128),
    # `plamo3.py`.
    "plamo3": Family(layers=numbered("interleaved_sliding_window", lambda tokens: "window" if tokens else "full", null=0),
                     caches={"window": attention(window=cache.listed_tokens("interleaved_sliding_window"))}),
    # `iquest_loopcoder.py`: all layers run `loop_num` times.
    "iquestloopcoder": Family(layers=Windows(switch=ON), arrange=cache.with_loops, if_null={"loop_num": 2, "loop_window_size": 64}, head_size=DERIVED),
    # `SmolLM3Config`.
    "smollm3": Family(layers=rules.smollm3, kv_heads=4, head_size=DERIVED),
    # `Gemma3TextConfig`, `Gemma3nTextConfig`, `Gemma4TextConfig`, `gemma4.py`.
    **dict.fromkeys(("gemma3", "gemma3_text"), Family(
        layers=listed(LAYER_TYPES, every("sliding_window_pattern", 6, others="window")), if_null={"num_attention_heads": 8}, if_absent={"sliding_window": 4096},
        expects={"use_bidirectional_attention": (False,)}, kv_heads=4, head_size=256)),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), Family(layers=sharing(listed(LAYER_TYPES)), kv_heads=2, head_size=256)),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), Family(
        layers=sharing(rules.gemma4), expects={"use_bidirectional_attention": (False, "vision")}, reads_per_layer=True,
        caches={"full": attention(heads=cache.gemma4_heads), "window": attention(window=cache.plain_window, heads=cache.listed_heads)},
        kv_heads=4, head_size=256)),
    # Other names for the usual fields: `GPT2Config`, `GPTJConfig`, `BloomConfig`, `OPTConfig`, `GPTNeoXConfig`, `telechat2.py`, `exaone.py`.
    **dict.fromkeys(("gpt2", "gptj"), Family(layers=ALL_OR_NONE, names=GPT_NAMES, sets=COMPUTED_HEADS, head_size=DERIVED)),
    "bloom": Family(layers=ALL_OR_NONE, names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
                    kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    "opt": Family(layers=ALL_OR_NONE, sets=COMPUTED_HEADS, head_size=DERIVED),
    "gpt_neox": Family(layers=BY_TYPE, kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    "telechat": Family(layers=BY_TYPE, names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
                       kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    "exaone": Family(layers=ALL_OR_NONE, names={"num_hidden_layers": "num_layers"}, kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    # KV heads in a way of their own: `falcon.py`, `configs/falcon.py`, `GPTBigCodeConfig`, `chatglm.py`, `DbrxConfig`, `step1.py`, `step3_text.py`.
    "falcon": Family(layers=ALL_FULL, caches=FALCON_CACHES, sets={"num_key_value_heads": cache.falcon_kv_heads}, head_size=DERIVED),
    **dict.fromkeys(("RefinedWeb", "RefinedWebModel"), Family(
        layers=ALL_FULL, caches=FALCON_CACHES, names={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"},
        sets={"num_key_value_heads": cache.falcon_kv_heads}, head_size=DERIVED)),
    "gpt_bigcode": Family(layers=BY_TYPE, names=GPT_NAMES, sets={"num_key_value_heads": cache.bigcode_kv_heads}, head_size=DERIVED),
    "chatglm": Family(layers=ALL_OR_NONE, names={"num_hidden_layers": "num_layers"},
                      sets={**COMPUTED_SIZE, "num_key_value_heads": cache.chatglm_kv_heads}, head_size=DERIVED),
    "dbrx": Family(layers=ALL_OR_NONE, names={"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"},
                   sets={**COMPUTED_SIZE, "num_key_value_heads": "attn_config.kv_n_heads"}, head_size=DERIVED),
    # `nemotron_nas.py`: layers found by a search.
    "nemotron-nas": Family(layers=rules.nas, caches={"full": attention(heads=cache.block_heads)}, head_size=DERIVED),
    "step1": Family(layers=ALL_OR_NONE, sets={**COMPUTED_SIZE, "num_key_value_heads": cache.step1_kv_heads}, head_size=DERIVED),
    "step3_text": Family(layers=ALL_OR_NONE, sets={"num_key_value_heads": 1}, head_size=256),
    # `configs/moondream3.py`, which has defaults for absent fields.
    **dict.fromkeys(("moondream3", "moondream3_text"), Family(
        layers=ALL_FULL, sets={"head_dim": None}, head_size=DERIVED,
        names={"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads", "hidden_size": "dim"},
        if_null={"n_layers": 24, "n_heads": 32, "n_kv_heads": 32, "dim": 2048})),
    # Windows with KV heads of their own: `mimo_v2.py`, `mimo_v2_mtp.py` (one layer predicts), `models/inkling/nvidia/`, `step3p5.py`.
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), Family(
        layers=numbered("hybrid_layer_pattern", lambda entry: "window" if entry == 1 else "full"), predicts=one("window"), numbered_on=True,
        caches={"full": attention(heads=heads("num_key_value_heads", "head_dim", ("v_head_dim", "head_dim"))),
                "window": attention(window=tokens(("sliding_window_size", "sliding_window")),
                                    heads=heads("swa_num_key_value_heads", "swa_head_dim", ("swa_v_head_dim", "swa_head_dim")))})),
    "inkling_model": Family(
        layers=rules.inkling, predicts=rules.mtp_inkling, one_per_draft=True, head_size=DERIVED,
        caches={"inputs": cache.inkling_inputs(cache.inkling_heads), "full": attention(heads=cache.inkling_heads),
                "window_inputs": cache.inkling_inputs(cache.inkling_window_heads),
                "window": attention(window=tokens("sliding_window_size"), heads=cache.inkling_window_heads)}),
    "step3p5": Family(
        layers=rules.step3p5, predicts=mtp_behind, numbered_on=True, head_size=DERIVED,
        caches={"full": attention(heads=cache.step_heads), "window": attention(window=cache.plain_window, heads=cache.step_heads),
                "other_full": attention(heads=cache.other_heads),
                "other_window": attention(window=cache.plain_window, heads=cache.other_heads)}),
    # `whisper_causal.py`
    **dict.fromkeys(("voxtral_realtime", "voxtral_realtime_text"), Family(layers=ALL_FULL, prepare=cache.refuse_listening)),
}
"""K and V of heads in every layer, all of them or the last ones."""

LATENTS: Mapping[str, Family] = {
    # `deepseek_v2.py`.
    **dict.fromkeys(("deepseek_v2", "kimi_k2", "kimi_k25"), DEEPSEEK),
    "deepseek_v3": replace(DEEPSEEK, if_absent=ONE_PREDICTS),
    # `AXK1.py`, `glm4_moe_lite.py`, `openpangu.py`, `sarvam.py`.
    **dict.fromkeys(("axk1", "glm4_moe_lite", "pangu_ultra_moe", "sarvam_mla"), Family(layers=uniform("latent"), predicts=mtp("latent"))),
    # `longcat_flash.py`: two attentions in a layer. `longcat_flash_mtp.py`: one layer predicts, with one attention.
    "longcat_flash": Family(layers=uniform("first second"), predicts=one("latent"), names={"num_hidden_layers": "num_layers"},
                            caches={"first": latent("attn.0"), "second": latent("attn.1")}),
    # `deepseek_v32/attention.py`.
    "glm_moe_dsa": SPARSE,
    "deepseek_v32": replace(SPARSE, if_absent=ONE_PREDICTS),
    # `models/hy_v4/nvidia/attention.py`, `transformers_utils/configs/hy_v4.py`.
    "hy_v4": Family(layers=rules.hy_v4, predicts=rules.mtp_like_last, page_tokens=64),
    "deepseek_v4": Family(layers=v4.v4_layers, predicts=mtp("window"), caches=v4.V4_CACHES, page_tokens=256, order="BLHNC"),
    **dict.fromkeys(("deepseek_v41", "deepseek_v41_text"), Family(
        layers=v4.v41_layers, predicts=v4.v41_drafting, caches=v4.V41_CACHES, page_tokens=128, order="BLHNC")),
    # `models/minimax_m3/nvidia/model.py`, `common/indexer.py`: attention with an indexer.
    "minimax_m3_text": MINIMAX_M3,
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), replace(MINIMAX_M3, kv_heads=4, head_size=128)),
}
"""A vector per token, or what an indexer looks at."""

STATES: Mapping[str, Family] = {
    # `models/glm5next/common/attention.py`. Older files keep the sizes of delta attention in an object.
    **dict.fromkeys(("glm5_next", "glm5_next_text"), Family(
        layers=listed(rules.sparse_types("indexer tail latent"), every(4, others="state", last="indexer tail latent")),
        predicts=mtp("indexer tail latent"), page_tokens=128, order="BLHNC",
        caches={"state": cache.kda("kda", ("linear_attn_config.num_heads", "linear_num_heads"), ("linear_attn_config.head_dim", "linear_head_dim"),
                                   ("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim")),
                "indexer": cache.fixed("indexer", cache.pooled_keys), "tail": cache.ring("tail", cache.pool_ring), "latent": latent(packs=False, least_rotated=0)})),
    # `models/qwen4_exp/common/qsa_cache.py`; `get_mamba_specs_from_config` in `nvidia/model.py`.
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), Family(
        layers=rules.qwen4_exp, predicts=rules.mtp_qwen4_exp, order="BLHNC", kv_heads=2, head_size=256, reserves="ple",
        caches={"state": cache.gated_delta, "ple": cache.position_conv, "open_keys": cache.ring("open_keys", cache.group_ring),
                "indexer": cache.fixed("indexer", cache.group_keys)})),
    # `NemotronHConfig`. The inner size is heads x head size, not `expand` x hidden size.
    "nemotron_h": Family(
        prepare=cache.nemotron_blocks, layers=listed(rules.BLOCKS, field="layers_block_type"), predicts=rules.mtp_nemotron, kv_heads=8, head_size=128,
        caches={"full": UNWINDOWED, "state": state(
            "mamba", Mamba2, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
            recurrent=cache.saved_dtype("mamba_ssm_cache_dtype", "float32"))}),
    # `GraniteMoeHybridConfig`.
    "granitemoehybrid": Family(
        layers=listed(rules.BLOCKS), if_null={"mamba_expand": 2}, kv_heads=PER_QUERY_HEAD, head_size=DERIVED,
        caches={"full": UNWINDOWED, "state": mamba2(
            "mamba_n_heads", cache.ssm_head_size(cache.hidden_times("mamba_expand")), "mamba_n_groups", "mamba_d_state", "mamba_d_conv")}),
    # `FalconH1Config`: each layer is both, attention registered first.
    "falcon_h1": Family(
        layers=uniform("full state"), expects={"attn_layer_indices": ()}, kv_heads=8, head_size=DERIVED,
        caches={"full": UNWINDOWED, "state": mamba2(
            "mamba_n_heads", cache.ssm_head_size(cache.hidden_times("mamba_expand", unless="mamba_d_ssm")), "mamba_n_groups", "mamba_d_state", "mamba_d_conv")}),
    # `JambaConfig`.
    "jamba": Family(
        layers=rules.jamba, sets=COMPUTED_SIZE, kv_heads=8, head_size=DERIVED,
        caches={"full": UNWINDOWED, "state": mamba1(cache.hidden_times("mamba_expand"), "mamba_d_state", "mamba_d_conv")}),
    # `Zamba2Config`, `zamba2.py`: a state in every layer; attention has K and V per query head, and is registered before all states.
    "zamba2": Family(
        layers=listed({"mamba": "state", "linear_attention": "state", "hybrid": "full state"}, field="layers_block_type"), arrange=cache.attention_first,
        sets={"num_key_value_heads": "num_attention_heads", "head_dim": cache.zamba2_head_size},
        if_null={"n_mamba_heads": 8, "mamba_expand": 2, "mamba_ngroups": 1, "mamba_d_state": 64, "mamba_d_conv": 4},
        caches={"state": mamba2("n_mamba_heads", cache.zamba2_ssm_head_size, "mamba_ngroups", "mamba_d_state", "mamba_d_conv")}),
    # `Qwen3NextConfig`, `OlmoHybridConfig`. vLLM takes one layer that predicts for a Qwen file without their number.
    "qwen3_next": Family(layers=DELTA_LAYERS, caches=DELTA_CACHES, predicts=mtp("full", default=1), kv_heads=2, head_size=256),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text"), QWEN3_5),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), replace(QWEN3_5, kv_heads=2)),
    "olmo_hybrid": Family(layers=DELTA_LAYERS, caches=DELTA_CACHES, predicts=mtp("full", "mtp_num_hidden_layers"),
                          kv_heads=PER_QUERY_HEAD, head_size=DERIVED),
    # `KimiLinearConfig`. Older files keep the sizes of delta attention in an object, which wins.
    **dict.fromkeys(("kimi_linear", "kimi_k3"), Family(
        layers=listed({"linear_attention": "state", "full_attention": "latent"}, rules.kimi_linear), predicts=mtp("latent"),
        caches={"state": cache.kda(
            "kda", ("linear_attn_config.num_heads", "linear_num_heads"), ("linear_attn_config.head_dim", "linear_head_dim"),
            ("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"))})),
    # `bailing_moe_linear.py`, `bailing_moe_v3.py`.
    "bailing_hybrid": Family(
        layers=rules.bailing, predicts=mtp("latent"), if_null={"kv_lora_rank": 512, "qk_rope_head_dim": 64}, head_size=DERIVED,
        caches={"linear": state("linear", LinearState, "num_attention_heads", Config.head_size), "latent": latent(packs=False),
                "delta": cache.kda("linear", "num_attention_heads", Config.head_size, "short_conv_kernel_size")}),
    # `Lfm2Config`, `lfm2.py`, `lfm2_moe.py`.
    "lfm2": Family(layers=CONV_LAYERS, sets=COMPUTED_SIZE, kv_heads=8, head_size=DERIVED,
                   caches={"full": UNWINDOWED, "state": state("short_conv", ShortConv, ("conv_dim", "hidden_size"), "conv_L_cache")}),
    "lfm2_moe": Family(layers=CONV_LAYERS, sets=COMPUTED_SIZE, kv_heads=8, head_size=DERIVED,
                       caches={"full": UNWINDOWED, "state": state("short_conv", ShortConv, "hidden_size", "conv_L_cache")}),
    # `Mamba2Config`: the inner size is heads x head size. `MambaConfig`.
    "mamba2": Family(layers=uniform("state"), caches={"state": mamba2(
        "num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")}),
    **dict.fromkeys(("mamba", "falcon_mamba"), Family(layers=uniform("state"), caches={"state": mamba1(
        cache.hidden_times("expand", unless="intermediate_size"), "state_size", "conv_kernel")})),
}
"""States, alone or beside attention."""

# Types of which only the default head size is known. Their files are read as plain attention, where nothing speaks against it (`read`).
HEAD_SIZES: Mapping[int | str, tuple[str, ...]] = {
    128: ("cwm", "glm", "helium", "higgs_audio_v2", "mellum", "paddleocr_vl_text", "qwen2_5_omni_talker", "qwen3_omni_moe_talker_code_predictor",
          "qwen3_vl_text", "seed_oss", "solar_open"),
    256: ("vaultgemma",),
    DERIVED: (
        "apertus", "arcee", "aria_text", "bitnet", "csm", "diffllama", "doge", "dots1", "emu3_text_model", "ernie4_5_vl_moe_text", "flex_olmo",
        "glm4v_text", "glm4v_moe_text", "glm_ocr_text", "granite_swa", "granitemoe_swa", "hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text",
        "jais2", "ministral", "moshi", "nanochat", "olmo3", "phi", "phi4_multimodal", "qwen2_5_omni_text",
        "qwen3_omni_moe_text", "qwen3_vl_moe_text",
        # Without a class in transformers (vLLM 0.32, the file of the name; Qwen's in `dots_ocr` and `kimi_audio`).
        "deepseek", "dots_ocr", "internlm2", "kimi_audio", "minicpm", "minicpmo", "minicpmv", "molmo", "orion", "PanguEmbedded", "TeleFLM"),
}
# fmt: on

# Of these, those whose class has windows where the file has neither `layer_types` nor `sliding_window`: such a file is refused.
WINDOWS_BY_DEFAULT = frozenset({"cwm", "granite_swa", "granitemoe_swa", "ministral", "olmo3", "vaultgemma"})

FAMILIES: Mapping[str, Family] = {
    **ATTENTION,
    **LATENTS,
    **STATES,
    **{name: Family(head_size=size) for size, names in HEAD_SIZES.items() for name in names},
}
"""Every known model type."""
