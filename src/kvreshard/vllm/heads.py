"""How many KV heads has the whole model in a layer of which one rank shows some?

A rank's view shows the heads that it holds. vLLM 0.32 starts only where heads divide by ranks, or ranks by heads
(`layers/linear.py:1052`), so

1. more than one head on a rank: as many times as there are parts of the model;
2. one head: the model's configuration decides, in the first of these that this layer has and that leaves one head per part:
   heads of window layers (`swa_num_key_value_heads`, MiMo; `attention_other_setting`, Step-3.5) or of the layer's block
   (`block_configs`, Nemotron-NAS), else `model_arch_config[layer]`, which vLLM resolves per layer (Gemma-4).

Refused: a configuration that says nothing which fits what the rank holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvreshard.kinds.place import size
from kvreshard.model import LayoutError, split_evenly
from kvreshard.vllm.draft import layer_index

Configured = tuple[str, int]
"""Where a number of heads is said, and the number."""


def total_kv_heads(layer: str, held: int, parts: int, configured: Sequence[Configured]) -> int:
    """KV heads of the whole model. `held`: heads on this rank, one of `parts` parts. Raises LayoutError."""
    if held > 1 or parts == 1:
        return held * parts
    for _, number in configured:
        if number > 0 and size(split_evenly(number, parts, 0)) == held and _divides(number, parts):
            return number
    said = ", ".join(f"{name} = {number}" for name, number in configured) or "nothing"
    raise LayoutError(
        f"layer '{layer}': a rank holds {held} KV head of {parts} parts, but the model's config says {said}; cannot tell how "
        "many heads the model has"
    )


def _divides(number: int, parts: int) -> bool:
    return parts % number == 0 or number % parts == 0


def configured_heads(vllm_config: Any, layer: str, *, is_window: bool, is_draft: bool) -> list[Configured]:
    """What the configuration of the layer's model says, the most specific first."""
    model = vllm_config.model_config
    index = layer_index(layer)
    if is_draft:
        speculative = getattr(vllm_config, "speculative_config", None)
        model = getattr(speculative, "draft_model_config", None) or model
    text = getattr(model, "hf_text_config", None)
    found = []
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
    arch = getattr(model, "model_arch_config", None)
    if arch is not None:
        found.append(("total_num_kv_heads", int(_of_layer(arch, index).total_num_kv_heads)))
    return found


def _of_layer(arch: Any, index: int | None) -> Any:
    """The layer's own architecture where vLLM has one, else the model's (a draft's numbers go on behind the target's)."""
    overrides = getattr(arch, "per_layer_overrides", None)
    if overrides is None or index is None or index >= len(overrides):
        return arch
    return arch[index]
