"""Refuses a file of a type that is not known if any of its fields may shape the cache.

Others are read as plain attention if they name their heads and the width of one.
"""

from __future__ import annotations

import re

from kvreshard.catalog.config import Config

# Words of a field name that tell of a cache other than K and V per head: another model type may mean anything by them.
SHAPING = re.compile(
    r"lora_rank|mamba|ssm|conv|linear_|window|layer_types|pattern|hybrid|index_|compress|kv_shared|cross|attn_layer|"
    r"state|chunk|global|block_type|recurr|rwkv|v_head|value_head|latent|multi_query|new_decoder|text_config|encoder|"
    r"nextn|mtp|rope_head|nope_head|_interval|kv_channel|v_channels|param_sink|num_kv_heads|attn_type|attention_type|layer_group|time_mix|"
    r"retention|sparse_att|no_rope_layer|per_layer|cycles|loop_|block_configs|attention_groups|share_q|"
    r"attention_head_dim|attn_head_dim|qk_head_dim|key_head_dim|head_size|kv_(heads|groups|dim|size|layers)|d_kv|n_kv|head_kv|query_group|"
    r"(^|_)(cla|mla|mqa|gqa|swa|nsa|kda|dsa|yoco|gla)(_|$)|share_kv|kv_shar|shared_kv|reuse_|indexer|mixer|local_(att|layer)|rnn|delta_"
)
HARMLESS = re.compile(r"^rope_|^quantization|initializer|^output_|^mlp_|moe|_coef$")
WINDOW_FIELDS = ("sliding_window", "max_window_layers")
CROSS_LAYER_FIELDS = ("cla_share_factor",)
# Other names of the width, which say nothing new where they say the same.
WIDTH_FIELDS = ("attention_head_dim", "attn_head_dim", "qk_head_dim", "v_head_dim", "head_size")


def check_unknown(config: Config) -> None:
    """Raises LayoutError unless the file names its heads and nothing in it can shape the cache otherwise."""
    has_width = config.has("head_dim") or config.family.head_size is not None
    understood = _understood(config, config.head_size() if has_width else None)
    for name, value in config.fields.items():
        if value in (None, False, 0, []) or name in understood or HARMLESS.search(name) or not SHAPING.search(name):
            continue
        raise config.error(
            name,
            f"is set, and model type '{config.model_type}' is not known",
            "the field may shape the cache, so this is not read as plain attention; use a model of a known type",
        )
    # Families differ in what they have where these are absent.
    for name, is_known in (("num_key_value_heads", config.has("num_key_value_heads")), ("head_dim", has_width)):
        if not is_known:
            raise config.error(
                name,
                f"is missing, and model type '{config.model_type}' is not known",
                "it shapes the cache; add it to a copy of the file, as the model was made",
            )


def _understood(config: Config, width: int | None) -> set[str]:
    """Fields that may be set, though in another model they would shape the cache."""
    found = {"num_key_value_heads", "layer_types"}
    if config.has("layer_types"):
        found |= {"sliding_window"}
    if not config.flag("use_sliding_window", True):
        found |= set(WINDOW_FIELDS)
    if not config.flag("use_cla", True):
        found |= set(CROSS_LAYER_FIELDS)
    return found | {name for name in WIDTH_FIELDS if config.fields.get(name) == width}
