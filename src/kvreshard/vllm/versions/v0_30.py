"""vLLM 0.30: specifications do not say whether they are split by tokens or replayed, nor the configuration what a draft reads ahead.

Which experts were chosen is an option of the model.
"""

from __future__ import annotations

from typing import Any

from kvreshard.vllm.versions.v0_31 import Release31


class Release30(Release31):
    """0.30."""

    def is_dcp_sharded(self, spec: Any) -> bool:
        """Full attention is (0.30.0, `v1/core/kv_cache_utils.py`, `dcp_world_size_for_kv_cache_spec`)."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        return isinstance(spec, FullAttentionSpec)

    def is_replayed(self, spec: Any) -> bool:
        """No layer is."""
        return False

    def num_lookahead_tokens(self, vllm_config: Any) -> int:
        """As 0.32 counts them (`config/vllm.py`, `num_prefill_lookahead_tokens`)."""
        draft = vllm_config.speculative_config
        if draft is None or not draft.use_eagle():
            return 0
        return int(vllm_config.num_speculative_tokens) if draft.use_multi_module_mtp() else 1

    def returns_routed_experts(self, vllm_config: Any) -> bool:
        """An option of the model."""
        return bool(vllm_config.model_config.enable_return_routed_experts)


RELEASE = Release30()
