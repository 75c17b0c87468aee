"""vLLM 0.32: a connector is not told of sleep, and ROCm's attention has one order of V for each backend."""

from __future__ import annotations

from typing import Any, ClassVar

from kvreshard.vllm.versions.release import Release


class Release32(Release):
    """0.32."""

    can_sleep: ClassVar[bool] = False

    def find_obstacle(self, vllm_config: Any) -> str | None:
        """Nothing is unfit."""
        return None


RELEASE = Release32()
