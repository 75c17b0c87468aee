"""Properties of a layer that its specification and its memory do not show.

`LayerInfo` is data, so that everything after it is a function of arguments. `read_layer` takes it from the layer object that
vLLM keeps in `compilation_config.static_forward_context`, the same one that fills the cache:

| property | read from |
|---|---|
| backend | `layer.get_attn_backend().get_name()` |
| cache dtype | `layer.kv_cache_dtype`; caches that have none follow their specification |
| platform | the current platform; for CPU attention `layer.isa`, else vLLM's own `_get_attn_isa` with the arguments of its builder |
| device | the compute capability, by which kernels may fill a page that is not known in another way |
| scales | `layer._k_scale`, `layer._v_scale`, for fp8 caches with one scale per tensor |
| sharing | `layer.kv_sharing_target_layer_name` |
| state | class of the layer, and the sizes of the whole model that it computes its shapes from |

A layer that vLLM does not know by name gets an unknown backend, so its page is opaque. A cache dtype that the platform has registered a class
for is named with that class, since it may mean anything. Refused: scales per head, group counts of a Mamba-2
layer that contradict one another, attention on a CPU whose cache has another float dtype than the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvreshard.model import LayoutError
from kvreshard.vllm.describe.interiors import FLOATS, FP8, state_form
from kvreshard.vllm.describe.state_forms import FORMS
from kvreshard.vllm.versions import release

Scales = tuple[float, float]

GROUP_NAMES = ("n_groups", "mamba_n_groups", "mamba_ngroups")


@dataclass(frozen=True, slots=True)
class LayerInfo:
    """Properties of one layer. `state_sizes` are of the whole model, named as in vLLM's layer.

    `has_mx_scales`: this device's kernels take keys of an indexer with MX scales.
    """

    backend: str = "unknown"
    cache_dtype: str = ""
    platform: str = "unknown"
    device: str = ""
    has_mx_scales: bool = False
    is_draft: bool = False
    shares_with: str | None = None
    scales: Scales | None = None
    fp8_format: str = "e4m3fn"
    state_form: str | None = None
    state_sizes: Mapping[str, int] = field(default_factory=dict)


def read_layer(vllm_config: Any, name: str, spec: Any, tp_size: int) -> LayerInfo:
    """Properties of layer `name` with specification `spec`. Raises LayoutError."""
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    if layer is None:
        return LayerInfo()
    form = state_form((cls.__name__ for cls in type(layer).__mro__), release().minor)
    sizes = {} if form is None else {key: int(getattr(layer, key)) for key in FORMS[form].sizes}
    if form == "mamba2":
        sizes["n_groups"] = _whole_groups(name, layer, tp_size, vllm_config.model_config)
    backend = layer.get_attn_backend().get_name()
    cache_dtype = getattr(layer, "kv_cache_dtype", None) or getattr(spec, "cache_dtype_str", None) or ""
    if backend == "CPU_ATTN":
        _check_dtype(name, cache_dtype, str(vllm_config.model_config.dtype).removeprefix("torch."))
    handler = release().find_dtype_handler(cache_dtype)
    if handler is not None:
        cache_dtype = f"{cache_dtype}({handler})"
    platform = _platform(vllm_config, backend, layer, spec)
    return LayerInfo(
        backend=backend,
        cache_dtype=cache_dtype,
        platform=platform,
        device=_device(),
        has_mx_scales=platform == "cuda" and release().has_mx_scales(),
        is_draft=bool(getattr(layer, "is_draft_layer", False)),
        shares_with=getattr(layer, "kv_sharing_target_layer_name", None),
        scales=_scales(name, layer) if cache_dtype in FP8 else None,
        fp8_format=_fp8_format(),
        state_form=form,
        state_sizes=sizes,
    )


def _check_dtype(name: str, cache_dtype: str, model_dtype: str) -> None:
    """The CPU operators take the cache's elements for the model's (`cpu_attn_reshape_and_cache`): wider values run past the end
    of the cache, and the texts of a single engine are wrong.
    """
    if cache_dtype in FLOATS and cache_dtype != model_dtype:
        raise LayoutError(
            f"layer '{name}': a cache of {cache_dtype} for a model of {model_dtype}, into which vLLM's attention on a CPU writes "
            f"{model_dtype}; start the engine with --kv-cache-dtype auto"
        )


def _platform(vllm_config: Any, backend: str, layer: Any, spec: Any) -> str:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return str(current_platform.device_type if not current_platform.is_rocm() else "rocm")
    if backend != "CPU_ATTN":
        return "cpu"
    isa = getattr(layer, "isa", None) or _instruction_set(vllm_config, spec)
    return isa if not _packs_fp8_by_hardware(vllm_config) else f"{isa}-fp8"


def _device() -> str:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return "" if capability is None else str(capability.as_version_str())


def _instruction_set(vllm_config: Any, spec: Any) -> str:
    """The instruction set that the metadata builder will choose (`cpu_attn.py`, `CPUAttentionMetadataBuilder`)."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    return str(_get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype))


def _packs_fp8_by_hardware(vllm_config: Any) -> bool:
    """Whether the processor has fp8 tiles: it may pack fp8 pages in an order that was not checked."""
    from vllm import _custom_ops

    return vllm_config.cache_config.cache_dtype in FP8 and bool(_custom_ops.cpu_has_amx_fp8())


def _fp8_format() -> str:
    from vllm.platforms import current_platform

    return "e4m3fnuz" if str(current_platform.fp8_dtype()).endswith("fnuz") else "e4m3fn"


def _scales(name: str, layer: Any) -> Scales | None:
    found = []
    for attribute in ("_k_scale", "_v_scale"):
        scale = getattr(layer, attribute, None)
        if scale is None:
            return None
        if scale.numel() != 1:
            raise LayoutError(
                f"layer '{name}': {scale.numel()} fp8 scales per tensor; only one per tensor can be described, use a cache in "
                "the model's dtype"
            )
        found.append(float(scale.item()))
    return found[0], found[1]


def _whole_groups(name: str, layer: Any, tp_size: int, model_config: Any) -> int:
    """Groups of the whole model: with one group, vLLM's mixer counts a copy per rank (`mamba_mixer2.py`, `MambaMixer2`).

    The mixer then builds its convolution as one column-parallel matrix instead of three merged ones.
    """
    counted = int(layer.n_groups)
    if tp_size == 1 or counted != tp_size:
        return counted
    found = (
        {"layer": 1 if type(layer.conv1d).__name__ == "ColumnParallelLinear" else counted}
        if hasattr(layer, "conv1d")
        else {}
    )
    for config in (model_config.hf_text_config, model_config.hf_config):
        for key in GROUP_NAMES:
            if isinstance(value := getattr(config, key, None), int):
                found.setdefault(f"config's {key}", value)
    if len(set(found.values())) != 1:
        raise LayoutError(
            f"layer '{name}': its {counted} groups on {tp_size} ranks are {found or 'not in the config'} of the whole model; "
            "copies and groups cannot be told apart"
        )
    return next(iter(found.values()))
