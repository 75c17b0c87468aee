"""The caches of a draft model, read from its file for a given target.

1. The place of the fields depends on the form of the file:

| form | where the fields are | source (vLLM 0.32) |
|---|---|---|
| `model_type` `eagle` | under `model`; those around it win | `transformers_utils/configs/eagle.py` |
| `speculators_model_type` | under `transformer_layer_config`, a Llama without a type | `configs/speculators/base.py`, `algos.py` |
| any other | as in the file of a model | `config/speculative.py` |

2. The dtype is the target's; that of the file is ignored (`config/speculative.py:1297`).
3. DFlash and DSpark have windows of their own (`qwen3_dflash.py`, `_resolve_layer_attention`), Laguna's DFlash none (`laguna_dflash.py`).
4. A layer without a window of its own has that of the target, if all layers of the target have the same one
   (`engine/arg_utils.py:2249`, `layers/attention/attention.py:266`).

Refused: drafts without caches, files of which vLLM uses the prediction layers only (the target has them: `spec=`), forms and drafts that are
not described.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvreshard.catalog.config import Config, language_part
from kvreshard.catalog.families import FAMILIES
from kvreshard.catalog.family import Family
from kvreshard.catalog.layer_rules import LAYER_TYPES, OFF, ON, Windows
from kvreshard.catalog.layers import NATIVE, Model, ModelLayer
from kvreshard.catalog.read import read_config
from kvreshard.kinds import Attention
from kvreshard.model import LayoutError

# Their layers are not attention (`medusa.py`), or attend to the target's cache (`gemma4_mtp.py`).
CACHELESS: Mapping[str, str] = {
    "medusa": "Medusa's heads keep no cache",
    "mlp_speculator": "an MLP speculator keeps no cache, and vLLM 0.32 has none of them",
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "its layers read the cache of the target"),
}
# Model types of which `SpeculativeConfig.hf_config_override` uses the prediction layers only.
PREDICTING = frozenset({
    "bailing_hybrid", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots3_note", "ernie4_5_moe", "exaone_moe", "exaone4_5",
    "glm4_moe", "glm4_moe_lite", "glm5_next", "glm_moe_dsa", "glm_ocr", "hy_v3", "hy_v4", "inkling_mm_model", "inkling_model", "intern_s2_preview",
    "interns2_mobius", "kimi_k3", "longcat_flash", "mimo", "mimo_v2", "mimo_v2_flash", "minimax_m3_vl", "pangu_ultra_moe", "qwen3_5",
    "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen4_exp", "qwen4_exp_text", "step3p5", "step3p7",
})  # fmt: skip
NOT_DESCRIBED = ("Gemma4DSparkModel", "K3DSparkModel")
SPECULATORS = ("eagle3", "peagle", "dflash", "dflash2", "dspark")
SHAPE_OF_HEADS = ("num_key_value_heads", "head_dim")
LAGUNA = "DFlashLagunaForCausalLM"


def read_draft(name: str, raw: Mapping[str, Any], target: Model) -> Model:
    """The model of a draft's parsed config.json, as it runs beside `target`. Raises LayoutError."""
    dtype = None if target.dtype == NATIVE else target.dtype
    config = language_part(name, {**_unwrapped(name, raw), "dtype": dtype, "torch_dtype": None})
    _check(config)
    draft = read_config(_with_windows(config))
    window = _window_of_all(target)
    return draft if window is None else replace(draft, layers=tuple(_windowed(one, window) for one in draft.layers))


def _unwrapped(name: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of the draft itself."""
    outer = Config(name, raw)
    if raw.get("model_type") is None and any(str(field).startswith("medusa_num_") for field in raw):
        return {**raw, "model_type": "medusa"}
    if raw.get("model_type") == "eagle":
        inner = outer.part("model").fields
        if not inner:
            raise outer.error(
                "model", "is missing", "give the file of the Eagle head, which has the layer's fields there"
            )
        around = {field: value for field, value in raw.items() if field not in ("model", "model_type", "architectures")}
        return {"architectures": _eagle(inner), **{k: v for k, v in inner.items() if k != "architectures"}, **around}
    form = raw.get("speculators_model_type")
    if form is None:
        return raw
    if form not in SPECULATORS:
        raise outer.error("speculators_model_type", f"is {form!r}", f"known here are {', '.join(SPECULATORS)}")
    inner = {"model_type": "llama", **outer.part("transformer_layer_config").fields}
    dflash = {"dflash_config": raw["dflash_config"]} if "dflash_config" in raw else {}
    # No class of transformers reads such a file, so nothing fills in fields that it lacks.
    part = Config(name, inner, "transformer_layer_config.")
    if part.model_type != "llama":
        for field in SHAPE_OF_HEADS:
            part.count(field)
    kind = "Eagle" if "eagle" in form else "DFlash"
    has_types = part.has("layer_types")
    return {**inner, "use_sliding_window": has_types, **dflash, "architectures": [f"{kind}Speculator"]}


def _eagle(inner: Mapping[str, Any]) -> list[str]:
    return [f"Eagle{one}" for one in _architectures(inner)] or ["Eagle"]


def _architectures(fields: Mapping[str, Any]) -> list[str]:
    listed = fields.get("architectures")
    return [one for one in listed if isinstance(one, str)] if isinstance(listed, list) else []


def _check(config: Config) -> None:
    """Refuse drafts without caches of their own, and files of a target."""
    whole = config.fields if config.outer is None else config.outer
    family, names = str(whole.get("model_type") or config.fields.get("model_type")), _architectures(whole)
    if family in CACHELESS:
        raise LayoutError(f"draft '{config.model}', model type '{family}': {CACHELESS[family]}; leave --draft out")
    for name in names:
        if name in NOT_DESCRIBED:
            raise config.error("architectures", f"has '{name}'", "drafts of that kind are not described")
    is_eagle = any("eagle" in name.casefold() for name in names)
    if family.endswith("_mtp") or (family in PREDICTING and not is_eagle):
        raise LayoutError(
            f"draft '{config.model}', model type '{family}': of such a file vLLM 0.32 takes only the layers that predict (MTP), which the target's "
            "file lists; leave --draft out and say spec=1 in the engine. For an Eagle head, have its `architectures` begin with Eagle in a copy"
        )


def _with_windows(config: Config) -> Config:
    """The fields with the windows of the draft's class."""
    names = _architectures(config.fields)
    if LAGUNA in names:
        return config.with_fields(sliding_window=None, layer_types=None)
    if config.has("dflash_config") or any("DFlash" in name or "DSpark" in name for name in names):
        return _with_dflash_windows(config)
    rule = _window_rule(config)
    if rule is None or rule.switch == ON:
        return config
    by_type = config.has("layer_types") and rule.by_type
    is_switched = rule.switch == OFF and config.flag("use_sliding_window", False)
    return config if by_type or is_switched else config.with_fields(sliding_window=None, layer_types=None)


def _window_rule(config: Config) -> Windows | None:
    """The rule of a family of plain attention, None of others."""
    rule = FAMILIES.get(config.model_type, Family()).layers
    return rule if isinstance(rule, Windows) else None


def _with_dflash_windows(config: Config) -> Config:
    own, number, rule = config.part("dflash_config"), config.count("num_hidden_layers"), _window_rule(config)
    is_switched = rule is not None and rule.switch == OFF
    types: Sequence[str] = ["full"] * number
    if config.has("layer_types"):
        types = config.entries("layer_types", number, LAYER_TYPES)
    elif rule is not None and is_switched:  # their configuration classes list the types
        types = rule(config, number)
    if own.flag("use_swa", False) and "window" not in types:
        types = ("window",) * number
    if "window" not in types:
        return config.with_fields(sliding_window=None, layer_types=None)
    is_on = config.flag("use_sliding_window", not is_switched)
    window = own.count("swa_window_size", config.count("sliding_window") if is_on else None)
    names = {short: name for name, short in LAYER_TYPES.items()}
    return config.with_fields(
        sliding_window=window, use_sliding_window=True, layer_types=[names[one] for one in types], max_window_layers=0
    )


def _window_of_all(target: Model) -> int | None:
    """The window of a target whose layers all have the same plain window."""
    own = [layer.kind for layer in target.layers if not layer.optional]
    found = {kind.window_tokens if isinstance(kind, Attention) and kind.value_size else None for kind in own}
    return found.pop() if len(found) == 1 else None


def _windowed(layer: ModelLayer, window: int) -> ModelLayer:
    kind = layer.kind
    if not isinstance(kind, Attention) or kind.window_tokens is not None:
        return layer
    kinds = {
        dtype: replace(one, window_tokens=window) if isinstance(one, Attention) else one
        for dtype, one in layer.kinds.items()
    }
    return replace(layer, kind=replace(kind, window_tokens=window), kinds=kinds, family="window")
