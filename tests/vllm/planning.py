"""vLLM's module that plans cache groups: `v1/core/kv_cache_planning.py` since 0.33, `v1/core/kv_cache_utils.py` before."""

import importlib.util
import inspect
from typing import Any

if importlib.util.find_spec("vllm.v1.core.kv_cache_planning") is not None:
    from vllm.v1.core import kv_cache_planning as planning
else:
    from vllm.v1.core import kv_cache_utils as planning

__all__ = ["blocks_per_request", "planning"]


def blocks_per_request(config: Any, groups: Any) -> int:
    """Blocks that vLLM wants to have for one request of the largest length."""
    of_request, of_block = planning._max_memory_usage_bytes_from_groups, planning._pool_bytes_per_block
    builder = {"builder": _OneSize()} if "builder" in inspect.signature(of_request).parameters else {}
    num_bytes = of_request(vllm_config=config, kv_cache_groups=groups, **builder)
    # Before 0.32 the groups alone tell how large a block is.
    return int(
        num_bytes
        // (of_block(config, groups) if len(inspect.signature(of_block).parameters) == 2 else of_block(groups))
    )


class _OneSize:
    """As much of 0.33's builder as a calculation needs: the size of a block that its groups have together."""

    def _get_pool_bytes_per_block(self, config: Any, groups: Any) -> int:
        return int(planning._pool_bytes_per_block(config, groups))
