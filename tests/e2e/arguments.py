"""What is an engine of a given `EngineSpec` started with: `AsyncEngineArgs`, and its environment?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.e2e import drafts, models

if TYPE_CHECKING:
    from tests.e2e.engine import EngineSpec

MODULES = {
    "ReshardConnector": "kvreshard.vllm",
    "ShadowConnector": "kvreshard.vllm",
    "RecordConnector": "tests.e2e.recorder",
    "PacedReshardConnector": "bench.paced",
    "PacedPushConnector": "bench.paced",
}
MAX_TOKENS = 1024
CACHE_BYTES = 64 << 20


def transfer_config(spec: EngineSpec) -> dict[str, Any] | None:
    """`--kv-transfer-config` of the engine; None for an ordinary one."""
    if spec.connector is None:
        return None
    module = MODULES.get(spec.connector)
    return {
        "kv_connector": spec.connector,
        "kv_role": spec.role,
        "kv_buffer_device": "cpu",
        **({"kv_load_failure_policy": "recompute"} if spec.recompute else {}),
        **({"kv_connector_module_path": module} if module else {}),
        **({"kv_connector_extra_config": dict(spec.extra)} if spec.extra else {}),
    }


def plain_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Fields of `AsyncEngineArgs`, which are the server's options too, without the connector."""
    model, folder = models.MODELS[spec.model], models.folder(spec.model)
    return {
        "model": str(folder),
        "tensor_parallel_size": spec.tp,
        "pipeline_parallel_size": spec.pp,
        "data_parallel_size": spec.dp,
        "dtype": model.dtype,
        "max_model_len": MAX_TOKENS,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": CACHE_BYTES,
        "enforce_eager": not spec.compiles,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": spec.prefix_caching,
        **({"block_size": spec.block_size} if spec.block_size else {}),
        **({"speculative_config": drafts.speculative_config(model.draft, folder)} if model.draft else {}),
        **model.engine_args,
        **dict(spec.arguments),
    }


def arguments_of(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """Everything that `hosted.main` wants."""
    arguments = plain_arguments(spec)
    config = transfer_config(spec)
    if config is not None:
        arguments["kv_transfer_config"] = config
    if spec.sleeps:
        arguments["sleeps"] = True
    if spec.record:
        arguments["record"] = str(folder / "snapshots")
    return arguments


def environment_of(spec: EngineSpec, folder: Path, port: int) -> dict[str, str]:
    """Variables that differ from engine to engine. Everything that vLLM writes goes below `folder`."""
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    return {
        "TMPDIR": str(temporary),
        "VLLM_CACHE_ROOT": str(models.home() / "vllm-cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        **{name: str(value) for name, value in spec.environment},
    }
