"""`Release`: what differs between releases of vLLM, as the newest one has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class Release:
    """vLLM 0.33. A class of another release overrides what differs there.

    `minor`: its number. `can_sleep`: whether vLLM tells a connector when the memory of the caches goes and comes. `replays_loads`: whether vLLM
    computes the last window of a load again, as that of a prefix hit, where it replays one. `refused_specs`: cache specifications that cannot
    be moved with this release, and why.
    """

    minor: ClassVar[tuple[int, int]] = (0, 33)
    can_sleep: ClassVar[bool] = True
    replays_loads: ClassVar[bool] = False
    refused_specs: ClassVar[Mapping[str, str]] = {}

    def hit_source(self) -> Any:
        """What vLLM's statistics of prefix hits call tokens that were loaded; None where they do not tell sources apart."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return CacheHitSource.P2P

    def is_dcp_sharded(self, spec: Any) -> bool:
        """Whether ranks of a decode context parallel group share the sequence of this cache."""
        return bool(spec.dcp_sharded)

    def is_tp_replica(self, spec: Any) -> bool:
        """Whether every rank of a tensor parallel group holds all of this cache."""
        return getattr(spec, "max_tp_shards", None) == 1 or bool(getattr(spec, "tp_replicated", False))

    def is_replayed(self, spec: Any) -> bool:
        """Whether some layers of this cache are computed for the last window of a prompt only."""
        return bool(spec.prefix_replay_tokens > 0)

    def num_lookahead_tokens(self, vllm_config: Any) -> int:
        """Prompt tokens behind the computed ones that a draft model reads."""
        return int(vllm_config.num_prefill_lookahead_tokens)

    def returns_routed_experts(self, vllm_config: Any) -> bool:
        """Whether the engine returns which experts were chosen for each token."""
        return bool(vllm_config.aux_output_config.enabled)

    def has_mx_scales(self) -> bool:
        """Whether this device's kernels take keys of a sparse indexer with four MX scales each instead of a float32."""
        from vllm.utils.deep_gemm import mqa_logits_use_mx_scales

        return bool(mqa_logits_use_mx_scales())

    def find_dtype_handler(self, cache_dtype: str) -> str | None:
        """The class that a platform has registered for a cache dtype, which may fill pages in its own way under any name; None if none."""
        from vllm.config.cache import get_kv_cache_dtype_handler

        handler = get_kv_cache_dtype_handler(cache_dtype)
        return None if handler is None else f"{type(handler).__module__}.{type(handler).__qualname__}"

    def find_obstacle(self, vllm_config: Any) -> str | None:
        """What makes an engine's caches unfit to be moved with this release, and the remedy; None if nothing."""
        if vllm_config.compilation_config.pass_config.fuse_qk_norm_rope_kvcache:
            return (
                "the pass fuse_qk_norm_rope_kvcache is on, with which ROCm's attention interleaves V, and a layer does not show whether "
                'it does; start it with --compilation-config \'{"pass_config": {"fuse_qk_norm_rope_kvcache": false}}\''
            )
        return None
