"""Which layers of plain attention have a window, by the fields that say so in any family?

1. A family that drops its window, or never looks at it, has none.
2. `layer_types` say which layers have it, if the family's class in vLLM 0.32 looks at them.
3. Else all layers have the one of `sliding_window` (`engine/arg_utils.py:2249`).

Refused: types without a window to go with them, and what `Config` refuses.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvreshard.catalog.config import Config
from kvreshard.catalog.defaults import WINDOW_TOKENS

LAYER_TYPES = {"full_attention": "full", "sliding_attention": "window"}
# Of these vLLM 0.32 has classes that give no layer a window of its own: all have one, or, where `layer_types` differ, none.
WITHOUT_TYPES = (
    "bailing_moe", "bailing_moe_v2", "bloom", "chatglm", "cohere", "dbrx", "ernie4_5_moe", "exaone", "gemma", "glm4", "glm4_moe", "gpt2", "gptj",
    "hy_v3", "hyperclovax", "minicpm3", "mixtral", "nemotron", "olmoe", "opt", "qwen2_moe", "qwen3_moe", "stablelm", "step3_text",
)  # fmt: skip
# Qwen's configuration classes, and those made from them, drop a window that is not switched on.
SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "mimo")
# Layers without types: full ones, or in Qwen2-MoE of both types, of which its class makes full ones.
TYPED = ("laguna", "qwen2_moe")
WITHOUT_WINDOW = ("falcon", "RefinedWeb", "RefinedWebModel")


def plain_windows(config: Config, num_layers: int, *, is_known: bool) -> list[int | None]:
    """Window of each layer: by type, or one for all layers. Qwen's classes drop it unless `use_sliding_window` says otherwise, and so is a
    family read that is not known; others do not look at that.
    """
    family = config.model_type
    none: list[int | None] = [None] * num_layers
    if "sliding_window" not in config.fields and family in WINDOW_TOKENS:
        config = config.with_fields(sliding_window=WINDOW_TOKENS[family])
    is_on = config.flag("use_sliding_window", family not in SWITCHED)
    if family in WITHOUT_WINDOW or (family in SWITCHED and not is_on):
        return none
    if config.has("layer_types"):
        windows = windows_by_type(config, config.entries("layer_types", num_layers, LAYER_TYPES))
        return none if family in WITHOUT_TYPES and None in windows else windows
    if not config.has("sliding_window") or family in TYPED or (not is_on and not is_known):
        return none
    window = config.count("sliding_window")
    first = config.count("max_window_layers", 28, at_least=0) if family in SWITCHED and family != "qwen3_moe" else 0
    return [window if index >= first else None for index in range(num_layers)]


def windows_by_type(config: Config, types: Sequence[str], default: int | None = None) -> list[int | None]:
    """The file's window, else `default`, in layers of type `window`."""
    window = config.count("sliding_window", default) if "window" in types else None
    return [window if entry == "window" else None for entry in types]
