"""Which facts of an engine must be equal at its peer, because its layout does not show them?

| fact | why |
|---|---|
| `vllm_version` | kernels of two versions may fill equal shapes differently |
| `model`, `revision` | other weights give another cache of the same shape |
| `model_config` | a digest of the model's configuration: rope, scaling, layer types |
| `dtype`, `cache_dtype`, `quantization` | what is computed, and how it is stored |

Tensor, pipeline and context parallel sizes, page sizes, layouts and backends are in the layout, and may differ.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

# Keys of a config.json that say where it came from, not what the model is.
_PROVENANCE = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "dtype", "torch_dtype"}
)


def read_facts(vllm_config: Any) -> dict[str, str]:
    """The facts of this engine, by name."""
    from vllm import __version__

    model, cache = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    return {
        "vllm_version": __version__,
        "model": str(model.model),
        "revision": str(model.revision),
        "model_config": digest_config(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "cache_dtype": str(model.dtype if cache == "auto" else cache),
        "quantization": str(model.quantization),
    }


def digest_config(config: dict[str, Any]) -> str:
    """A digest of a config.json's content, without where it came from."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): cleaned(v) for k, v in value.items() if k not in _PROVENANCE}
        return [cleaned(v) for v in value] if isinstance(value, list | tuple) else value

    text = json.dumps(cleaned(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
