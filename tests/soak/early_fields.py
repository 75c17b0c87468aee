"""Which fields of a soak's engine may be read before their prefill has ended, and which layers tell their end?"""

from __future__ import annotations

import random

from kvreshard.model import EngineLayout
from kvreshard.session.engine_metadata import NOT_TOLD

# A layer whose end is not told is final with its step.
UNTOLD_SHARE = 0.2


def choose_early_fields(layout: EngineLayout, rng: random.Random) -> dict[str, int]:
    """Field -> number of its layer, or `NOT_TOLD`: all fields of groups that keep every token as it was written."""
    groups = {
        group.name for group in layout.groups if group.tokens_per_page is not None and group.window_tokens is None
    }
    fields = {shard.field for rank in layout.ranks for shard in rank.shards if shard.geometry.group in groups}
    layers = {layer_of(name) for name in fields}
    told = {layer for layer in sorted(layers) if rng.random() >= UNTOLD_SHARE}
    return {name: layer_of(name) if layer_of(name) in told else NOT_TOLD for name in sorted(fields)}


def layer_of(field: str) -> int:
    """The number of a field's layer."""
    return int(field.split(".")[1])
