"""vLLM 0.33: the release that the connector is written for."""

from kvreshard.vllm.versions.release import Release

RELEASE = Release()
