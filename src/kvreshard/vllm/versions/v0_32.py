"""vLLM 0.32: ROCm's attention has one order of V for each backend, and keys of an indexer have one scale.

Cache dtypes are vLLM's own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from kvreshard.vllm.versions.newest import Release


class Release32(Release):
    """0.32."""

    minor: ClassVar[tuple[int, int]] = (0, 32)
    can_sleep: ClassVar[bool] = False

    def has_mx_scales(self) -> bool:
        """No device's do."""
        return False

    def find_dtype_handler(self, cache_dtype: str) -> str | None:
        """There are none."""
        return None

    def find_obstacle(self, vllm_config: Any) -> str | None:
        """Nothing is unfit."""
        return None


RELEASE = Release32()
