"""What each layer of a model caches, and which layers share a block table, from vLLM's own model class.

    python -m tests.vllm.families TP_SIZE TP_RANK NUM_DRAFTS

Reads JSON lines `[name, config]`, or `[name, config, {"method": ..., "config": ...}]` with a separate draft, and writes `[name, answer, error]`, one of the last two null. An answer has the `caches`, in the order in
which vLLM registers them, the `tables` for each of two dimension orders (places of their layers among the caches, tokens per page; null for
an order in which vLLM cannot have the model), and the `fields` of each cache as the connector describes them.

1. The config becomes a directory, and that an engine's configuration.
2. The model is made on torch's meta device: every layer is there, no weight is. Of the other ranks it hears nothing. If it speculates,
   its own prediction layers or the draft are made beside it.
3. Each layer that has a cache gives its specification; vLLM groups them, and makes the tensors that it would register.
4. The connector describes them.

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
from tests.vllm.families.caches import ORDERS, PAGE_TOKENS, Table, fields_of, of_spec
from tests.vllm.families.refusals import join_nobody, learn, take_out
from tests.vllm.planning import planning
from vllm.config import VllmConfig, replace, set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.workspace import init_workspace_manager

from kvreshard.model import EngineLayout
from kvreshard.vllm.describe import describe_rank
from kvreshard.vllm.describe.place import read_place

MAX_TOKENS = 1024
NUM_PAGES = 2
ENOUGH_BYTES = 1 << 40


def ask(
    config: dict[str, Any], draft: dict[str, Any] | None, folder: Path, tp_size: int, tp_rank: int, num_drafts: int
) -> dict[str, Any]:
    """What vLLM says of a model on one rank."""
    (folder / "config.json").write_text(json.dumps(config))
    learn(config)
    speculative = {"method": "mtp", "model": str(folder), "num_speculative_tokens": num_drafts} if num_drafts else None
    if draft is not None:
        (folder / "draft").mkdir()
        (folder / "draft" / "config.json").write_text(json.dumps(draft["config"]))
        if "model_type" in draft["config"]:
            learn(draft["config"])
        speculative = {"model": str(folder / "draft"), "num_speculative_tokens": num_drafts}
        speculative |= {"method": draft["method"]} if draft["method"] else {}
    engine = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        enforce_eager=True,
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS,
        enable_prefix_caching=True,
        block_size=PAGE_TOKENS,
        tensor_parallel_size=tp_size,
        num_gpu_blocks_override=NUM_PAGES,
        speculative_config=speculative,
        engram_config={"cpu_offload": False} if config.get("ple_layer_ids") else None,
    ).create_engine_config()
    with set_current_vllm_config(engine):
        if not model_parallel_is_initialized():
            init_distributed_environment(tp_size, tp_rank, local_rank=tp_rank, backend="fake")
            initialize_model_parallel(tp_size, 1)
            init_workspace_manager(torch.device("cpu"))
        with torch.device("meta"), set_default_torch_dtype(engine.model_config.dtype):
            initialize_model(engine)
            if engine.speculative_config is not None:
                _make_draft(engine)
        engine.cache_config.block_size = PAGE_TOKENS
        if engine.model_config.is_hybrid:
            CpuPlatform._align_hybrid_block_size(engine, FlashAttentionBackend)
        layers = engine.compilation_config.static_forward_context
        found = {
            name: layer.get_kv_cache_spec(engine)
            for name, layer in layers.items()
            if hasattr(layer, "get_kv_cache_spec")
        }
        specs = {name: spec for name, spec in found.items() if spec is not None}
        tables = {order: _tables(engine, specs, order) for order in ORDERS}
        order = next(order for order in ORDERS if tables[order] is not None)
        fields = fields_of(_describe(engine, specs, order), tp_rank, list(specs))
    return {"caches": [of_spec(spec) for spec in specs.values()], "tables": tables, "fields": fields}


def _make_draft(engine: VllmConfig) -> None:
    """Beside the model, as the proposers do (`v1/worker/gpu/spec_decode/`): one that stands alone has a configuration of its own."""
    speculative = engine.speculative_config
    drafts = speculative.draft_model_config
    if speculative.method == "draft_model":
        alone = replace(
            engine, model_config=drafts, quant_config=None, parallel_config=speculative.draft_parallel_config
        )
        with set_current_vllm_config(alone):
            initialize_model(alone, prefix="draft_model")
    else:
        initialize_model(engine, model_config=drafts)


def _groups(engine: VllmConfig, specs: dict[str, Any], order: str) -> list[KVCacheGroupSpec]:
    engine.cache_config.kv_cache_layout = order
    return planning.get_kv_cache_groups(engine, dict(specs))


def _describe(engine: VllmConfig, specs: dict[str, Any], order: str) -> EngineLayout:
    groups = _groups(engine, specs, order)
    config = planning.get_kv_cache_config_from_groups(engine, groups, ENOUGH_BYTES)
    kernel_tokens = [group.kv_cache_spec.block_size for group in groups]
    # Nobody writes there, so it takes no memory.
    tensors = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[order], kernel_tokens)
    return describe_rank(
        engine="engine", vllm_config=engine, kv_cache_config=config, kv_caches=tensors, place=read_place(engine)
    )


def _tables(engine: VllmConfig, specs: dict[str, Any], order: str) -> list[Table] | None:
    places = {name: place for place, name in enumerate(specs)}
    tables: list[Table] = []
    try:
        groups = _groups(engine, specs, order)
    except NotImplementedError:
        return None
    for group in groups:
        spec = group.kv_cache_spec
        inner = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        tokens = None if isinstance(inner, MambaSpec) else spec.block_size
        tables.append((sorted(places[name] for name in group.layer_names), tokens))
    return tables


def main() -> None:
    """Every model of the standard input. What vLLM and its libraries print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    take_out()
    tp_size, tp_rank, num_drafts = map(int, sys.argv[1:])
    join_nobody(tp_size, tp_rank)
    for line in sys.stdin:
        name, config, *more = json.loads(line)
        answer, said = None, None
        with tempfile.TemporaryDirectory() as folder:
            try:
                answer = ask(config, more[0] if more else None, Path(folder), tp_size, tp_rank, num_drafts)
            except Exception as error:  # noqa: BLE001 - whatever a class cannot do is its answer
                said = f"{type(error).__name__}: {error}"
        answers.write(json.dumps((name, answer, said)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
