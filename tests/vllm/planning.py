"""vLLM's module that plans cache groups: `v1/core/kv_cache_planning.py` since 0.33, `v1/core/kv_cache_utils.py` before."""

import importlib.util
import inspect
from typing import Any

if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is not None:
    from vllm.v1.core import kv_cache_planning as planning
else:
    from vllm.v1.core import kv_cache_utils as planning

__all__ = ["planning", "pool_bytes_per_block"]


def pool_bytes_per_block(config: Any, groups: Any) -> int:
    """Bytes of a block in every cache together. Before 0.32 vLLM needs no configuration to tell."""
    of = planning._pool_bytes_per_block
    return int(of(config, groups) if len(inspect.signature(of).parameters) == 2 else of(groups))
