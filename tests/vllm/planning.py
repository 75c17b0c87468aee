"""vLLM's module that plans cache groups: `v1/core/kv_cache_planning.py` since 0.33, `v1/core/kv_cache_utils.py` before."""

import importlib.util

if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is not None:
    from vllm.v1.core import kv_cache_planning as planning
else:
    from vllm.v1.core import kv_cache_utils as planning

__all__ = ["planning"]
