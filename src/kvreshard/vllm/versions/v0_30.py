"""vLLM 0.30: specifications do not say whether they are split by tokens or replayed, nor the configuration what a draft reads ahead.

Which experts were chosen is an option of the model.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvreshard.vllm.versions.v0_31 import Release31


class Release30(Release31):
    """0.30."""

    minor: ClassVar[tuple[int, int]] = (0, 30)

    def is_dcp_sharded(self, spec: Any) -> bool:
        """Full attention is (0.30.0, `v1/core/kv_cache_utils.py`, `dcp_world_size_for_kv_cache_spec`)."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        return isinstance(spec, FullAttentionSpec)

    def is_tp_replica(self, spec: Any) -> bool:
        """Latents are, and states that say so."""
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

        return isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec) or super().is_tp_replica(spec)

    def is_replayed(self, spec: Any) -> bool:
        """No layer is."""
        return False

    def num_lookahead_tokens(self, vllm_config: Any) -> int:
        """As 0.32 counts them (`config/vllm.py`, `num_prefill_lookahead_tokens`)."""
        draft = vllm_config.speculative_config
        if draft is None or not draft.use_eagle():
            return 0
        return int(vllm_config.num_speculative_tokens) if draft.use_multi_module_mtp() else 1

    def find_obstacle(self, vllm_config: Any) -> str | None:
        """Scheduling by priority, beside what 0.31 has.

        A request that holds loaded blocks may stand behind a more important one that finds none, for ever. 0.31 looks at those that hold
        blocks first (`v1/core/sched/scheduler.py`, `kv_holding_waiting`).
        """
        if vllm_config.scheduler_config.policy == "priority" and vllm_config.kv_transfer_config.is_kv_consumer:
            return (
                "--scheduling-policy priority with a kv_role that loads: vLLM 0.30 may let a loaded request wait for ever behind one that "
                "finds no blocks; use fcfs, or vLLM 0.31"
            )
        return super().find_obstacle(vllm_config)

    def returns_routed_experts(self, vllm_config: Any) -> bool:
        """An option of the model."""
        return bool(vllm_config.model_config.enable_return_routed_experts)


RELEASE = Release30()
