"""Which reader knows a model type?

1. Take the language model's part of the file (`config.language_part`).
2. Its `model_type` names the reader; a multimodal model has the type of its text part, or its own where that says none.
3. A type that is in no list is read as plain attention only if nothing in it can shape the cache otherwise.
4. A `sliding_window` of 0 says that there is none.
5. The dtype of its caches is the model's, unless the file declares another (`declared`).

Raises LayoutError naming the field, its value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvreshard.catalog import (
    read_attention,
    read_hybrid,
    read_indexed,
    read_latent,
    read_renamed,
    read_unequal,
    read_unknown,
)
from kvreshard.catalog.config import PER_LAYER, Config, language_part
from kvreshard.catalog.declared import read_with_dtype
from kvreshard.catalog.layers import Model
from kvreshard.model.text import escaped

Reader = Callable[[Config], Model]

READERS: Mapping[str, Reader] = {
    **dict.fromkeys(read_attention.PLAIN_TYPES, read_attention.read_plain),
    **dict.fromkeys(read_attention.PREDICTING_TYPES, read_attention.read_predicting),
    "gpt_oss": read_attention.read_alternating,
    "gemma2": read_attention.read_alternating,
    "afmoe": read_attention.read_afmoe,
    "cohere2": read_attention.read_cohere2,
    "cohere2_moe": read_attention.read_cohere2_moe,
    "exaone4": read_attention.read_exaone4,
    "exaone_moe": read_attention.read_exaone_moe,
    "llama4": read_attention.read_llama4,
    "llama4_text": read_attention.read_llama4,
    "minicpm3": read_attention.read_minicpm3,
    "minimax_m2": read_attention.read_minimax_m2,
    "muse_glimmer_text": read_attention.read_muse_glimmer,
    "plamo3": read_attention.read_plamo3,
    "iquestloopcoder": read_attention.read_loop_coder,
    "smollm3": read_attention.read_smollm3,
    "gemma3": read_attention.read_gemma3,
    "gemma3_text": read_attention.read_gemma3,
    "gemma3n": read_attention.read_gemma3n,
    "gemma3n_text": read_attention.read_gemma3n,
    "gemma4": read_attention.read_gemma4,
    "gemma4_text": read_attention.read_gemma4,
    "gemma4_unified": read_attention.read_gemma4,
    "gemma4_unified_text": read_attention.read_gemma4,
    **dict.fromkeys(read_renamed.NAMES, read_renamed.read_renamed),
    **dict.fromkeys(("voxtral_realtime", "voxtral_realtime_text"), read_unknown.refuse_listening),
    **dict.fromkeys(("falcon", *read_renamed.REFINED_WEB), read_renamed.read_falcon),
    "gpt_bigcode": read_renamed.read_bigcode,
    "chatglm": read_renamed.read_chatglm,
    "dbrx": read_renamed.read_dbrx,
    "nemotron-nas": read_renamed.read_nas,
    "step1": read_renamed.read_step1,
    "step3_text": read_renamed.read_step3_text,
    **dict.fromkeys(("moondream3", "moondream3_text"), read_renamed.read_moondream3),
    "inkling_model": read_unequal.read_inkling,
    **dict.fromkeys(("mimo_v2_flash", "mimo_v2"), read_unequal.read_mimo_v2),
    "step3p5": read_unequal.read_step3p5,
    **dict.fromkeys(("minimax_m3_text", "minimax_m3_vl", "minimax_m3_vl_text"), read_indexed.read_minimax_m3),
    **dict.fromkeys(("glm5_next", "glm5_next_text"), read_indexed.read_glm5_next),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), read_indexed.read_qwen4_exp),
    "axk1": read_latent.read_latent,
    "deepseek_v2": read_latent.read_deepseek,
    "deepseek_v3": read_latent.read_deepseek,
    "glm4_moe_lite": read_latent.read_latent,
    **dict.fromkeys(("pangu_ultra_moe", "sarvam_mla"), read_latent.read_latent),
    "kimi_k2": read_latent.read_deepseek,
    "kimi_k25": read_latent.read_deepseek,
    "longcat_flash": read_latent.read_longcat,
    "deepseek_v32": read_latent.read_sparse,
    "glm_moe_dsa": read_latent.read_sparse,
    "hy_v4": read_indexed.read_hy_v4,
    "deepseek_v4": read_latent.read_deepseek_v4,
    **dict.fromkeys(("deepseek_v41", "deepseek_v41_text"), read_latent.read_deepseek_v41),
    "nemotron_h": read_hybrid.read_nemotron_h,
    "granitemoehybrid": read_hybrid.read_granite,
    "falcon_h1": read_hybrid.read_falcon_h1,
    "jamba": read_hybrid.read_jamba,
    **dict.fromkeys(("kimi_linear", "kimi_k3"), read_hybrid.read_kimi_linear),
    "bailing_hybrid": read_hybrid.read_bailing_hybrid,
    "lfm2": read_hybrid.read_lfm2,
    "lfm2_moe": read_hybrid.read_lfm2,
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"),
        read_hybrid.read_gated_delta,
    ),
    "zamba2": read_hybrid.read_zamba2,
    "mamba2": read_hybrid.read_mamba2,
    "mamba": read_hybrid.read_mamba1,
    "falcon_mamba": read_hybrid.read_mamba1,
}


# What these files list per layer is read; other families' may list what cannot shape a cache.
READ_PER_LAYER = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
WINDOW = "sliding_window"
QUERY_HEADS = "num_attention_heads"
_ROLE = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)\Z")
HARMLESS_PER_LAYER = (QUERY_HEADS, "intermediate_size", "num_experts", "num_local_experts")


def read_model(name: str, raw: Mapping[str, Any]) -> Model:
    """The model of a parsed config.json."""
    return read_config(language_part(name, raw))


def read_config(config: Config) -> Model:
    """The model of the fields of its language part."""
    if config.fields.get(WINDOW) == 0:  # as `config/model.py` has it
        config = config.with_fields(**{WINDOW: None})
    if config.model_type not in READ_PER_LAYER:
        _check_per_layer(config)
    model = read_with_dtype(READERS.get(config.model_type, read_unknown.read_unknown), config)
    return replace(model, doubts=tuple(_doubts(config)))


def _doubts(config: Config) -> Iterator[str]:
    """Architectures of another type than the one that was read. Two types with one reader that is theirs alone have equal caches."""
    around = config.fields if config.outer is None else config.outer
    listed = around.get("architectures")
    own = {_bare(str(said)) for fields in (config.fields, around) if (said := fields.get("model_type"))}
    mine = READERS.get(config.model_type)
    for name in listed if isinstance(listed, list) else ():
        base = _bare(_ROLE.sub("", name)) if isinstance(name, str) else ""
        other = next((known for known in READERS if _bare(known) == base), None)
        is_family = other is not None and READERS[other] is mine and mine is not read_attention.read_plain
        if other is not None and base not in own and not is_family:
            yield (
                f"the file's architectures say {escaped(name, 60)}, which is of model type '{other}', and its model_type says "
                f"'{escaped(config.model_type, 60)}', by which it was read; vLLM goes by architectures"
            )


def _bare(name: str) -> str:
    """A type or an architecture without what tells their spellings apart."""
    return name.lower().replace("_", "").replace("-", "").removesuffix("text")


def _check_per_layer(config: Config) -> None:
    """Refuse layers that differ from the others in what shapes a cache."""
    for layer, fields in config.part(PER_LAYER).fields.items():
        for name in fields if isinstance(fields, Mapping) else ():
            if name not in HARMLESS_PER_LAYER or (name == QUERY_HEADS and not config.has("num_key_value_heads")):
                raise config.error(
                    f"{PER_LAYER}.{layer}.{name}",
                    "differs from the other layers'",
                    f"caches that differ so are not described for model type '{config.model_type}'",
                )
