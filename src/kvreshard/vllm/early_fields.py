"""Which fields of a rank may be read before their prefill has ended, and whose layers tell their end.

A field may be read early if its group keeps every token as it was written (`CacheGroup.is_append_only`) and it is not that of a draft model,
which computes a step after the target model has ended it. vLLM calls a connector after attention layers (0.32.0, `maybe_transfer_kv_layer`),
not after other layers with pages, nor in full CUDA graphs. Where a step is cut into micro-batches, the end of a layer in one says nothing
of the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvreshard.model import EngineLayout
from kvreshard.session.engine_metadata import NOT_TOLD
from kvreshard.vllm.groups import CacheGroup

# Layers of one number that are told apart.
LAYERS_PER_NUMBER = 64


def find_early_fields(
    part: EngineLayout, groups: Sequence[CacheGroup], vllm_config: Any
) -> tuple[dict[str, int], dict[str, int]]:
    """(place of each early field's layer among those of the engine, `NOT_TOLD` without; place of each layer among those of this rank that tell
    their end, by its name), of a rank's layout.
    """
    append_only = {group.name for group in groups if group.is_append_only}
    held = {shard.field for shard in part.ranks[0].shards if shard.geometry.group in append_only}
    fields = {
        field.name: field.name.rpartition(".")[0] for field in part.fields if field.name in held and not field.optional
    }
    layers = _told_layers(set(fields.values()), vllm_config)
    places = {layer: place for place, layer in enumerate(sorted(layers, key=lambda layer: layers[layer]))}
    return {name: layers.get(layer, NOT_TOLD) for name, layer in fields.items()}, places


def _told_layers(names: set[str], vllm_config: Any) -> Mapping[str, int]:
    """The layers of these that tell their end, each with its place among those of the engine."""
    parallel = vllm_config.parallel_config
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        return {}
    from vllm.model_executor.layers.attention import Attention, MLAAttention

    found: dict[int, list[str]] = {}
    context = vllm_config.compilation_config.static_forward_context
    for name in sorted(names):
        number = re.search(r"\.(\d+)\.", f".{name}.")
        if number is not None and isinstance(context.get(name), Attention | MLAAttention):
            found.setdefault(int(number[1]), []).append(name)
    return {
        name: number * LAYERS_PER_NUMBER + place
        for number, same in found.items()
        for place, name in enumerate(same[:LAYERS_PER_NUMBER])
    }
