"""The dtype of caches that the engine leaves to the model (`dtype=auto`).

As vLLM 0.32 resolves it, from `quantization_config` (or `hf_quant_config.json`, see `entries`):

1. ModelOpt has `kv_cache_scheme` or `kv_cache_quant_algo`: fp8 is `fp8_e4m3`, for every cache that can store it; vLLM ignores unknown
   values (`utils/torch_utils.py`, `get_kv_cache_quant_algo_string`; `transformers_utils/model_arch_config_convertor.py` for the older form).
2. `kv_cache_scheme` of compressed-tensors is fp8 for K and V per head (`layers/attention/attention.py`); latents keep the model's dtype, and so does
   the attention of `UNQUANTISED`.
3. Else the dtype of the model. A family with a form of its own (DeepSeek-V4) keeps that.
4. A file without a dtype: vLLM reads the weights, which are not here, so the engine must give `dtype=`. States have no such option, so a
   model with states needs a dtype in the file.

An engine's own dtype wins. With `auto`, schemes that are not described are refused. By itself vLLM also chooses fp8 for GLM-5 on a GPU of
SM100, and packs the fp8 latents of sparse attention where FlashMLA reads them; here both are options of the engine (`dtype=fp8`,
`dtype=fp8_ds_mla`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kvreshard.catalog.config import Config
from kvreshard.catalog.layers import CACHE_DTYPES, NATIVE, Model, ModelLayer
from kvreshard.kinds import Attention

FP8 = "fp8_e4m3"
# Two dtypes that a model may have. A cache that differs between them depends on the dtype that the file lacks.
ASSUMED = ("bfloat16", "float16")
# Model types whose class in vLLM 0.32 makes attention without `quant_config`, and so does not see a scheme of compressed-tensors.
UNQUANTISED = (
    "bailing_moe", "bailing_moe_v2", "inkling_model", "jamba", "lfm2", "lfm2_moe", "plamo3", "sarvam_moe", "step3_text", "zamba2",
)  # fmt: skip
SCHEMES: Mapping[str, str] = {"fp8": FP8, "nvfp4": "nvfp4"}


def read_with_dtype(read: Callable[[Config], Model], config: Config) -> Model:
    """The model with the cache dtypes that its file declares. Raises LayoutError."""
    model = _read_with_dtype(read, config) if config.dtype_field() else _read_without_dtype(read, config)
    outer = Config(config.model, config.outer if config.outer is not None else config.fields)
    of_modelopt = _of_modelopt(outer)
    if of_modelopt is None and config.model_type in UNQUANTISED:
        return model
    dtype = _of_compressed_tensors(config, outer) if of_modelopt is None else of_modelopt
    if dtype == NATIVE:
        return model
    declaring = config if config.has("quantization_config") else outer
    layers = tuple(_in_dtype(declaring, layer, dtype, for_latents=of_modelopt is not None) for layer in model.layers)
    return replace(model, layers=layers, declared=dtype)


def _read_with_dtype(read: Callable[[Config], Model], config: Config) -> Model:
    model, declared = read(config), config.declared_dtype()
    return model if declared == config.dtype() else replace(model, cast_from=declared)


def _read_without_dtype(read: Callable[[Config], Model], config: Config) -> Model:
    """The model of a file without a dtype: caches that depend on the dtype are undecided until the engine gives one."""
    model, other = (read(config.with_fields(dtype=dtype)) for dtype in ASSUMED)
    remedy = "give the engine dtype=bfloat16 (or what the weights have), or add it to a copy of the file"
    undecided = str(config.missing_dtype(remedy))
    layers = []
    for layer, twin in zip(model.layers, other.layers, strict=True):
        if layer.kind != twin.kind and not layer.kinds:
            raise config.missing_dtype(
                "layers with a state have it; add it to a copy of the file, as the model was made"
            )
        layers.append(layer if layer.kind == twin.kind else replace(layer, undecided=undecided))
    return replace(model, layers=tuple(layers), dtype=NATIVE)


def _in_dtype(config: Config, layer: ModelLayer, dtype: str, *, for_latents: bool) -> ModelLayer:
    is_ignored = for_latents and layer.ignores_fp8  # ModelOpt's becomes the engine's, the other the layer's own
    if not layer.kinds or is_ignored or not (for_latents or isinstance(layer.kind, Attention)):
        return layer
    if dtype not in CACHE_DTYPES:
        error = config.error(
            "quantization_config",
            f"declares a cache in {dtype}, which is not described",
            "give the engine a dtype, as in dtype=fp8, if it runs with that (--kv-cache-dtype)",
        )
        return replace(layer, undecided=str(error))
    return layer.in_dtype(dtype)


def _of_modelopt(outer: Config) -> str | None:
    """The dtype that ModelOpt declares, which holds for latents too. None if another tool wrote the file."""
    quantised = outer.part("quantization_config")
    inner = quantised.part("quantization") if isinstance(quantised.fields.get("quantization"), Mapping) else quantised
    method = str(quantised.fields.get("quant_method") or "").lower()
    if inner is not quantised and inner.has("quant_algo") and _is_older(quantised, inner):
        method = "modelopt"
    if not method.startswith("modelopt"):
        return None
    names = ("kv_cache_scheme", "kv_cache_quant_algo")
    scheme = next((part.fields[name] for name in names for part in (inner, quantised) if part.fields.get(name)), None)
    if isinstance(scheme, Mapping):
        scheme = _scheme_name(scheme)
    return SCHEMES.get(scheme.lower(), NATIVE) if isinstance(scheme, str) else NATIVE


def _is_older(quantised: Config, inner: Config) -> bool:
    producer = quantised.fields.get("producer")
    return (
        isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    ) or "modelopt_quant_config" in inner.fields


def _scheme_name(scheme: Mapping[str, Any]) -> str:
    if scheme.get("type") != "float":
        return ""
    if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
        return "fp8"
    return "nvfp4" if scheme.get("num_bits") == 4 else ""


def _of_compressed_tensors(config: Config, outer: Config) -> str:
    """The dtype that compressed-tensors declares. Refused later: scales per head, whose bytes mean something else than those per tensor."""
    for name in ("quantization_config", "compression_config"):
        for part in (outer.part(name), config.part(name)):
            method = str(part.fields.get("quant_method") or "").lower().replace("_", "-")
            if method != "compressed-tensors" or not part.has("kv_cache_scheme"):
                continue
            scheme = part.part("kv_cache_scheme").fields
            if (scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy")) == ("float", 8, "tensor"):
                return FP8
            return f"{scheme.get('num_bits')} bits ({scheme.get('type')}, per {scheme.get('strategy')})"[:80]
    return NATIVE
