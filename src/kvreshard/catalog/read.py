"""Reads the caches of a model from its parsed config.json, by the row of its family.

1. Take the language model's part of the file (`config.language_part`). Its `model_type` names the row; a multimodal model has the type of its text
   part, or its own where that part has none.
2. Fill in what the row knows of fields that the file names differently or leaves out.
3. The row's rule gives the words of each layer, each word a cache.
4. A type without a row is read as plain attention, if the file has its heads and the width of one, and no field that may shape the cache
   otherwise (`SHAPING`).
5. The dtype of the caches is the model's, unless the file declares another (`declared`).

Raises LayoutError naming the field, its value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvreshard.catalog.caches import USUAL
from kvreshard.catalog.config import PER_LAYER, Config, language_part
from kvreshard.catalog.declared import read_with_dtype
from kvreshard.catalog.families import FAMILIES, WINDOWS_BY_DEFAULT
from kvreshard.catalog.family import Family
from kvreshard.catalog.layer_rules import ON, Windows
from kvreshard.catalog.layers import Model, ModelLayer
from kvreshard.model.text import escaped

WINDOW = "sliding_window"
QUERY_HEADS = "num_attention_heads"
# Fields that may differ between layers without shaping a cache.
HARMLESS_PER_LAYER = (QUERY_HEADS, "intermediate_size", "num_experts", "num_local_experts")
UNKNOWN_LAYERS = Windows(switch=ON)
# Words of a field name that may mean a cache other than K and V per head: another model type may mean anything by them.
SHAPING = re.compile(
    r"lora_rank|mamba|ssm|conv|linear_|window|layer_types|pattern|hybrid|index_|compress|kv_shared|cross|attn_layer|"
    r"state|chunk|global|block_type|recurr|rwkv|v_head|value_head|latent|multi_query|new_decoder|text_config|encoder|"
    r"nextn|mtp|rope_head|nope_head|_interval|kv_channel|v_channels|param_sink|num_kv_heads|attn_type|attention_type|layer_group|time_mix|"
    r"retention|sparse_att|no_rope_layer|per_layer|cycles|loop_|block_configs|attention_groups|share_q|"
    r"attention_head_dim|attn_head_dim|qk_head_dim|key_head_dim|head_size|kv_(heads|groups|dim|size|layers)|d_kv|n_kv|head_kv|query_group|"
    r"(^|_)(cla|mla|mqa|gqa|swa|nsa|kda|dsa|yoco|gla)(_|$)|share_kv|kv_shar|shared_kv|reuse_|indexer|mixer|local_(att|layer)|rnn|delta_"
)
HARMLESS = re.compile(r"^rope_|^quantization|initializer|^output_|^mlp_|moe|_coef$")
WINDOW_FIELDS = ("sliding_window", "max_window_layers")
CROSS_LAYER_FIELDS = ("cla_share_factor",)
# Other names of the width, harmless with the same value.
WIDTH_FIELDS = ("attention_head_dim", "attn_head_dim", "qk_head_dim", "v_head_dim", "head_size")
# Types that vLLM 0.32 runs with `Qwen2Model`, which asserts that all layers have a window or none (`qwen2.py:351`).
ONE_WINDOW = ("qwen2", "qwen2_vl_text", "qwen2_5_vl_text")
TYPES_REMEDY = "`kvreshard models --types` lists the known ones"
_ROLE = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)\Z")


def read_model(name: str, raw: Mapping[str, Any]) -> Model:
    """The model of a parsed config.json."""
    return read_config(language_part(name, raw))


def read_config(config: Config) -> Model:
    """The model of the fields of its language part."""
    family = FAMILIES.get(config.model_type, Family())
    config = replace(config, usual_kv_heads=family.kv_heads, usual_head_size=family.head_size)
    if config.fields.get(WINDOW) == 0:  # none, as `config/model.py` has it
        config = config.with_fields(**{WINDOW: None})
    if not family.reads_per_layer:
        _check_per_layer(config)
    model = read_with_dtype(partial(_read, family), config)
    return replace(model, doubts=(*_doubts(family, config), *_mixed_windows(model, config)))


def _read(family: Family, config: Config) -> Model:
    if family.layers is None:
        _check_unknown(config)
    config = _filled(family, config)
    num_layers = config.count("num_hidden_layers")
    words = (family.layers or UNKNOWN_LAYERS)(config, num_layers)
    layers = [
        one for index in range(num_layers) for one in _caches(family, config, f"layers.{index}", index, words[index])
    ]
    for number, predicted in enumerate(family.predicts(config, words)):
        name, index = (
            (f"layers.{num_layers + number}", num_layers + number)
            if family.numbered_on
            else (f"mtp.{number}", num_layers)
        )
        min_drafts = number + 1 if family.one_per_draft else 1
        for one in _caches(family, config, name, index, predicted):
            layers.append(replace(one, optional=True, predicts=True, min_drafts=min_drafts))
    has_heads = any(not layer.kind.is_state for layer in layers)
    layers = list(family.arrange(config, layers))
    heads = config.count(QUERY_HEADS) if has_heads else None
    return Model(
        config.model,
        config.model_type,
        num_layers,
        tuple(layers),
        config.dtype(),
        family.page_tokens,
        family.order,
        heads,
        shared_from=_shared_from(config, words),
        reserved=tuple(one.kind for one in _caches(family, config, "reserved", 0, family.reserves)),
    )


def _shared_from(config: Config, words: Sequence[str]) -> int | None:
    """The first layer whose cache a later one reads: each of the last `num_kv_shared_layers` reads that of the last layer of its type before them."""
    num_own = len(words) - (
        config.count("num_kv_shared_layers", 0, at_least=0) if config.has("num_kv_shared_layers") else 0
    )
    if num_own >= len(words) or any(words[num_own:]):
        return None
    last = {word: index for index, word in enumerate(words[:num_own]) if word}
    return min(last.values(), default=None)


def _filled(family: Family, config: Config) -> Config:
    """The fields under their usual names, with those that the row knows without the file."""
    if_null = {name: value for name, value in family.if_null.items() if not config.has(name)}
    if_absent = {**(family.if_partial if config.path else {}), **family.if_absent}
    config = config.with_fields(**{**if_absent, **config.fields, **if_null}).renamed(family.names)
    config = family.prepare(config)
    computed = {name: None if source is None else config.number(source) for name, source in family.sets.items()}
    for name, allowed in family.expects.items():
        config.must_be(name, *allowed)
    return config.with_fields(**computed)


def _caches(family: Family, config: Config, name: str, index: int, words: str) -> Iterator[ModelLayer]:
    """The caches of one layer in the order in which vLLM registers them."""
    for word in words.split():
        yield (family.caches.get(word) or USUAL[word])(config, name, index)


def _doubts(family: Family, config: Config) -> Iterator[str]:
    """A type that is not known, and architectures of another type than `model_type`, unless both types have the same rules."""
    if config.model_type not in FAMILIES:
        yield f"model type '{escaped(config.model_type, 60)}' is not known, and was read as plain attention; {TYPES_REMEDY}"
    around = config.fields if config.outer is None else config.outer
    listed = around.get("architectures")
    own = {_bare(str(kind)) for fields in (config.fields, around) if (kind := fields.get("model_type"))}
    for name in listed if isinstance(listed, list) else ():
        base = _bare(_ROLE.sub("", name)) if isinstance(name, str) else ""
        other = next(
            (known for known, row in FAMILIES.items() if row.layers is not None and _bare(known) == base), None
        )
        if other is not None and base not in own and not _are_kin(family, FAMILIES[other]):
            yield (
                f"the file's architectures say {escaped(name, 60)}, which is of model type '{other}', and its model_type says "
                f"'{escaped(config.model_type, 60)}', by which it was read; vLLM goes by architectures"
            )


def _mixed_windows(model: Model, config: Config) -> Iterator[str]:
    """A window in some layers only, where vLLM has a class that starts with all or none."""
    families = [layer.family for layer in model.layers if not layer.optional]
    last = config.fields.get("max_window_layers", 28)
    if config.model_type in ONE_WINDOW and {"full", "window"} <= {*families} and last != model.num_layers:
        yield (
            f"{families.count('window')} of {model.num_layers} layers have a window (use_sliding_window, max_window_layers {escaped(last, 20)}); "
            "vLLM 0.32 does not start with a window in some layers of this model type"
        )


def _are_kin(family: Family, other: Family) -> bool:
    """Whether both rows have the same rules, more than those of plain attention, which many unlike families have."""
    return family == other and family != Family(layers=family.layers)


def _bare(name: str) -> str:
    """A type or an architecture without the differences of their spellings."""
    return name.lower().replace("_", "").replace("-", "").removesuffix("text")


def _check_per_layer(config: Config) -> None:
    """Refuse layers that differ from the others in a field that shapes a cache."""
    for layer, fields in config.part(PER_LAYER).fields.items():
        for name in fields if isinstance(fields, Mapping) else ():
            if name not in HARMLESS_PER_LAYER or (name == QUERY_HEADS and not config.has("num_key_value_heads")):
                raise config.error(
                    f"{PER_LAYER}.{layer}.{name}",
                    "differs from the other layers'",
                    f"caches that differ so are not described for model type '{config.model_type}'",
                )


def _check_unknown(config: Config) -> None:
    """Raises LayoutError unless the file names its heads and nothing in it can shape the cache otherwise."""
    has_width = config.has("head_dim") or config.usual_head_size is not None
    understood = _understood(config, config.head_size() if has_width else None)
    for name, value in config.fields.items():
        if value in (None, False, 0, []) or name in understood or HARMLESS.search(name) or not SHAPING.search(name):
            continue
        raise config.error(
            name,
            f"is set, and model type '{config.model_type}' is not known",
            f"the field may shape the cache, so this is not read as plain attention; {TYPES_REMEDY}",
        )
    if config.model_type in WINDOWS_BY_DEFAULT and not config.has("layer_types") and WINDOW not in config.fields:
        raise config.error(
            "layer_types",
            f"is missing, and model type '{config.model_type}' has windows by default",
            "add it to a copy of the file, as the model was made, or sliding_window: null where no layer has a window",
        )
    # Families have different defaults for these.
    for name, is_known in (("num_key_value_heads", config.has("num_key_value_heads")), ("head_dim", has_width)):
        if not is_known:
            raise config.error(
                name,
                f"is missing, and model type '{config.model_type}' is not known",
                f"it shapes the cache; add it to a copy of the file, as the model was made; {TYPES_REMEDY}",
            )


def _understood(config: Config, width: int | None) -> set[str]:
    """Fields that may be set, though in another model they would shape the cache."""
    found = {"num_key_value_heads", "layer_types"}
    if config.has("layer_types"):
        found |= {"sliding_window"}
    if not config.flag("use_sliding_window", True):
        found |= set(WINDOW_FIELDS)
    if not config.flag("use_cla", True):
        found |= set(CROSS_LAYER_FIELDS)
    return found | {name for name in WIDTH_FIELDS if config.fields.get(name) == width}
