"""What the model's configuration determines about a layer: whether it belongs to a draft, and how many KV heads the whole model has.

Drafts are registered beside the target's layers, on the last pipeline stage only. vLLM's newer runner marks them
(`is_draft_layer`, `v1/worker/gpu/spec_decode/speculator.py`, `load_model`); the older one does not, so names decide too:

| draft | name |
|---|---|
| Eagle, Eagle-3, DeepSeek MTP | `model.layers.<n + i>...`, with n layers of the target (`llama_eagle3.py`) |
| Qwen3-Next and MiMo-V2 MTP | `mtp.layers.<i>...`, `model.mtp.layers.<i>...` |
| standalone draft model | `draft_model....` |

A draft that shares the target's cache (Gemma-4 MTP) has none of its own.

A rank's view shows the KV heads that this rank holds. vLLM starts only where heads divide by ranks, or ranks by heads
(`layers/linear.py`, `QKVParallelLinear`), so

1. more than one head on a rank: as many times as there are parts of the model;
2. one head: the model's configuration decides, by the first of these that this layer has and that leaves one head per part:
   heads of window layers (`swa_num_key_value_heads`, MiMo; `attention_other_setting`, Step-3.5) or of the layer's block
   (`block_configs`, Nemotron-NAS), else `model_arch_config[layer]`, which vLLM resolves per layer (Gemma-4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvreshard.kinds import Place
from kvreshard.kinds.place import size
from kvreshard.model import LayoutError, split_evenly
from kvreshard.vllm.describe.place import RankPlace

DRAFT_PARTS = ("mtp", "draft_model")
# Methods of speculation without a model, which look at texts only (`config/speculative.py`).
WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")

Configured = tuple[str, int]
"""The name of a configuration entry, and its number of heads."""


def layer_index(name: str) -> int | None:
    """The first number among the parts of a layer's name.

    >>> layer_index("model.layers.12.self_attn.attn"), layer_index("mtp.fc")
    (12, None)
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def is_draft(name: str, num_target_layers: int | None, marked: bool) -> bool:
    """Whether the layer belongs to a draft. `num_target_layers`: None where it is not known. `marked`: vLLM marks the layer."""
    index = layer_index(name)
    beyond = num_target_layers is not None and index is not None and index >= num_target_layers
    return marked or any(part in DRAFT_PARTS for part in name.split(".")) or beyond


def num_target_layers(vllm_config: Any) -> int | None:
    """Decoder layers of the target; None without a draft."""
    if vllm_config.speculative_config is None:
        return None
    count = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    return int(count) if isinstance(count, int) else None


def has_draft(vllm_config: Any) -> bool:
    """Whether the engine has a draft model, which may write a cache."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in WITHOUT_MODEL


def draft_place(vllm_config: Any, place: RankPlace) -> Place:
    """The place of a draft's caches. A draft with a tensor-parallel size of 1 is whole on every rank.

    Drafts keep the whole sequence where DCP does not shard them (`gpu/model_runner.py`, `get_kv_cache_spec`).
    """
    parallel = getattr(vllm_config.speculative_config, "draft_parallel_config", None)
    tp_size = int(getattr(parallel, "tensor_parallel_size", place.tp_size))
    return Place() if tp_size == 1 else place.whole_sequence()


def total_kv_heads(layer: str, held: int, parts: int, configured: Sequence[Configured]) -> int:
    """KV heads of the whole model. `held`: heads on this rank, one of `parts` parts. Raises LayoutError."""
    if held > 1 or parts == 1:
        return held * parts
    for _, number in configured:
        is_even = number > 0 and (parts % number == 0 or number % parts == 0)
        if is_even and size(split_evenly(number, parts, 0)) == held:
            return number
    entries = ", ".join(f"{name} = {number}" for name, number in configured) or "nothing"
    raise LayoutError(
        f"layer '{layer}': a rank holds {held} KV head of {parts} parts, but the model's config says {entries}; the number of heads of the "
        "whole model is not known"
    )


def configured_heads(vllm_config: Any, layer: str, *, is_window: bool, is_draft: bool) -> list[Configured]:
    """Numbers of KV heads in the configuration of the layer's model, the most specific first."""
    model = vllm_config.model_config
    index = layer_index(layer)
    if is_draft:
        model = getattr(vllm_config.speculative_config, "draft_model_config", None) or model
    text, arch, found = model.hf_text_config, model.model_arch_config, []
    window = getattr(text, "swa_num_key_value_heads", None)
    if is_window and isinstance(window, int):
        found.append(("swa_num_key_value_heads", window))
    other = getattr(text, "attention_other_setting", None)
    types = list(getattr(text, "layer_types", None) or ())
    if isinstance(other, dict) and index is not None and types[index : index + 1] == [other.get("attention_type")]:
        found.append(("attention_other_setting.num_attention_groups", int(other["num_attention_groups"])))
    blocks, query_heads = getattr(text, "block_configs", None) or (), getattr(text, "num_attention_heads", 0)
    if index is not None and index < len(blocks):
        shared = getattr(blocks[index].attention, "n_heads_in_group", None)
        if isinstance(shared, int) and shared > 0:
            found.append(("block_configs.attention.n_heads_in_group", int(query_heads) // shared))
    # The layer's own architecture where vLLM has one. A draft's layers count on from the target's, and have none.
    overrides = arch.per_layer_overrides
    own = arch if overrides is None or index is None or index >= len(overrides) else arch[index]
    found.append(("total_num_kv_heads", int(own.total_num_kv_heads)))
    return found
