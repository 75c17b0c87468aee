"""An engine on a CPU that can be put to sleep, as one on a GPU.

vLLM's CPU worker ignores the order. Here it does what the GPU's does to its connector (0.33.0, `v1/worker/gpu_worker.py`, `sleep`, `wake_up`), and
what lay in its caches is something else afterwards, at the same addresses.
"""

from __future__ import annotations

from typing import Any

GARBAGE = 0x5A


def install() -> None:
    """In the process from which the workers are forked."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


def _sleep(self: Any, level: int = 1) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        get_kv_transfer_group().unregister_kv_caches()
    for cache in self.model_runner.kv_caches:
        for tensor in cache if isinstance(cache, list | tuple) else [cache]:
            tensor.untyped_storage().fill_(GARBAGE)


def _wake_up(self: Any, tags: list[str] | None = None) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group() and (tags is None or "kv_cache" in tags):
        get_kv_transfer_group().restore_kv_caches()
