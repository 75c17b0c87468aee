"""vLLM 0.33: the release that the connector is written for."""

from kvreshard.vllm.versions.newest import Release

RELEASE = Release()
