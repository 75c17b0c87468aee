"""vLLM 0.31: prefix hits have no sources, Mamba has a third cache mode, and GLM's tail ring is a window by its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvreshard.vllm.versions.v0_32 import Release32


class Release31(Release32):
    """0.31."""

    minor: ClassVar[tuple[int, int]] = (0, 31)
    replays_loads: ClassVar[bool] = True
    refused_specs: ClassVar[Mapping[str, str]] = {
        "KpoolTailSpec": "it is a ring that vLLM describes as a sliding window; vLLM 0.32 describes it as a ring"
    }

    def hit_source(self) -> Any:
        """Not told apart."""
        return None

    def find_obstacle(self, vllm_config: Any) -> str | None:
        """The cache mode that keeps a state for every block, which 0.32 no longer has."""
        if vllm_config.cache_config.mamba_cache_mode == "all":
            return (
                "mamba_cache_mode is all: which of a request's states is the one after its last token is not known; start it with "
                "--mamba-cache-mode align, or none"
            )
        return None


RELEASE = Release31()
