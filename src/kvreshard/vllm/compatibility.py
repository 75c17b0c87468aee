"""Properties of an engine that must be equal at its peer and that its layout does not show.

| property | why |
|---|---|
| `vllm_version` | kernels of two versions may fill equal shapes differently; versions that were run against each other (`versions.TESTED`) are accepted |
| `model`, `revision` | other weights give another cache of the same shape |
| `model_config` | a digest of the model's configuration: rope, scaling, layer types |
| `dtype`, `cache_dtype`, `quantization` | how values are computed and stored |
| `rope_factors` | LongRoPE turns keys by its long factors where `max_model_len` is above the original length, else by its short ones (`phi3_long_rope_scaled_rope.py`) |
| `mm_processor_kwargs`, `video_pruning` | they shape what an image or a video becomes, and vLLM's hash of it has only those that came with its request (`multimodal/processing/inputs.py`, `get_mm_hashes`) |

The model must have been loaded in this process: the digest is of the configuration as the model leaves it, for example with Llama-4's
temperature tuning, which also depends on `max_model_len` (`llama4.py`). Tensor, pipeline and context parallel sizes, page sizes, layouts
and backends are in the layout, and may differ.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvreshard.vllm.versions import public_version

# What `allow_mismatch` may name.
PROPERTIES = (
    "vllm_version", "model", "revision", "model_config", "dtype", "cache_dtype", "quantization", "rope_factors", "mm_processor_kwargs",
    "video_pruning",
)  # fmt: skip
# Keys of a config.json that record its origin, not the model. MiniMax-M2 keeps `max_model_len` there, to size a table of angles
# (`minimax_m2.py`, `MiniMaxM2ForCausalLM`).
_PROVENANCE = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype", "max_model_len"}
)


def read_compatibility(vllm_config: Any) -> dict[str, str]:
    """The properties of this engine, by name."""
    model, cache = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    config = model.hf_config.to_dict()
    return {
        "vllm_version": public_version(),
        "model": str(model.model),
        "revision": str(model.revision),
        "model_config": digest_config(config),
        "dtype": str(model.dtype),
        "cache_dtype": str(model.dtype if cache == "auto" else cache),
        "quantization": str(model.quantization),
        **read_rope(config, _built_length(model)),
        **read_media(model.multimodal_config),
    }


def _built_length(model: Any) -> int:
    """`max_model_len` when the model was built. With `--max-model-len -1` vLLM fits it to memory afterwards (`v1/engine/core.py`, `_initialize_kv_caches`)."""
    return int(model.get_and_verify_max_len(-1) if model.original_max_model_len == -1 else model.max_model_len)


def read_rope(config: dict[str, Any], max_model_len: int) -> dict[str, str]:
    """`rope_factors` of a model with LongRoPE; empty for others."""
    lengths = sorted(_original_lengths(config))
    return {"rope_factors": ", ".join("long" if max_model_len > n else "short" for n in lengths)} if lengths else {}


def _original_lengths(config: Any) -> set[int]:
    """Lengths that LongRoPE was trained for, in the nested parts of a configuration."""
    if not isinstance(config, dict):
        return set()
    found = {length for value in config.values() for length in _original_lengths(value)}
    length = config.get("original_max_position_embeddings")
    return found | {length} if config.get("rope_type") == "longrope" and isinstance(length, int) else found


def read_media(multimodal_config: Any) -> dict[str, str]:
    """How the engine processes images and videos; empty for a model without them."""
    if multimodal_config is None:
        return {}
    kwargs, pruning = multimodal_config.mm_processor_kwargs, multimodal_config.get_video_pruning_spec()
    return {
        "mm_processor_kwargs": json.dumps(kwargs or {}, sort_keys=True, default=str),
        "video_pruning": "none" if pruning is None else f"{pruning[0]} {pruning[1]:g}",
    }


def digest_config(config: dict[str, Any]) -> str:
    """A digest of a config.json's content, without its origin."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): cleaned(v) for k, v in value.items() if k not in _PROVENANCE}
        return [cleaned(v) for v in value] if isinstance(value, list | tuple) else value

    text = json.dumps(cleaned(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
