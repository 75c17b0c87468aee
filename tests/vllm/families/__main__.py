"""What does each layer of a model say about its cache, asked of vLLM's own model class?

Reads JSON lines `[name, config]` and writes `[name, caches, error]`, one of the last two null.

1. The config becomes a directory, and that an engine's configuration.
2. The model is made on torch's meta device: every layer is there, no weight is.
3. Each layer that has a cache gives its specification.

A process of its own, since it changes what vLLM refuses (`refusals`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.ports import free_ports
from tests.vllm.families.caches import Cache, of_spec
from tests.vllm.families.refusals import take_out
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.workspace import init_workspace_manager

MAX_TOKENS = 1024


def read_caches(config: dict[str, Any], folder: Path) -> list[Cache]:
    """The caches of a model, in the order in which vLLM registers them."""
    (folder / "config.json").write_text(json.dumps(config))
    engine = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        enable_prefix_caching=True,
    ).create_engine_config()
    with set_current_vllm_config(engine):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_ports(1)}", 0, "gloo")
            initialize_model_parallel(1, 1)
            init_workspace_manager(torch.device("cpu"))
        with torch.device("meta"), set_default_torch_dtype(engine.model_config.dtype):
            initialize_model(engine)
    layers = engine.compilation_config.static_forward_context.values()
    specs = (layer.get_kv_cache_spec(engine) for layer in layers if hasattr(layer, "get_kv_cache_spec"))
    return [of_spec(spec) for spec in specs if spec is not None]


def main() -> None:
    """Every model of the standard input. What vLLM and its libraries print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    take_out()
    for line in sys.stdin:
        name, config = json.loads(line)
        caches, said = None, None
        with tempfile.TemporaryDirectory() as folder:
            try:
                caches = read_caches(config, Path(folder))
            except Exception as error:  # noqa: BLE001 - whatever a class cannot do is its answer
                said = f"{type(error).__name__}: {error}"
        answers.write(json.dumps((name, caches, said)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
