"""Models whose window layers have KV heads of their own: how many, and how wide, in each?

| model types | window layers | source |
|---|---|---|
| `mimo_v2_flash`, `mimo_v2` | `hybrid_layer_pattern` 1; all their fields begin with `swa_`. V is narrower than K. One more predicts | vLLM 0.32 `mimo_v2.py`, `mimo_v2_mtp.py` |
| `inkling_model` | `local_layer_ids`; all their fields begin with `swa_`. Each layer also has windows of `sconv_kernel_size` tokens: inputs of four convolutions | vLLM 0.32 `models/inkling/nvidia/sconv_swa_attn.py` |
| `step3p5` | `layer_types`; those that `attention_other_setting` names have its heads | vLLM 0.32 `step3p5.py` |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvreshard.catalog.config import Config
from kvreshard.catalog.layers import Model, ModelLayer, attention_layer, predicting
from kvreshard.catalog.windows import LAYER_TYPES
from kvreshard.kinds import Attention


def read_mimo_v2(config: Config) -> Model:
    """Full layers by the usual fields, window layers by theirs. Of the layers that predict vLLM takes one."""
    num_layers = config.count("num_hidden_layers")
    has_window = [*(entry == 1 for entry in config.numbers("hybrid_layer_pattern", num_layers)), True]
    name = "sliding_window_size" if config.has("sliding_window_size") else "sliding_window"
    window, dtype = config.count(name) if any(has_window) else None, config.dtype()

    def layer(index: int) -> ModelLayer:
        prefix = "swa_" if has_window[index] else ""
        return attention_layer(
            f"layers.{index}.attn",
            index,
            num_kv_heads=config.count(f"{prefix}num_key_value_heads"),
            head_size=(width := config.count(f"{prefix}head_dim")),
            dtype=dtype,
            window_tokens=window if has_window[index] else None,
            head_size_v=config.count(f"{prefix}v_head_dim", width),
        )

    return _model(config, num_layers, layer, 1)


def read_inkling(config: Config) -> Model:
    """The inputs of a token's convolutions are kept per KV head: K, V and the head's part of two outputs, up to a power of two.

    Prediction layers have both caches too; as many are made as the engine speculates tokens.
    """
    num_layers, dtype = config.count("num_hidden_layers"), config.dtype()
    number = config.count("num_nextn_predict_layers", 0, at_least=0)
    taps = config.count("sconv_kernel_size", config.count("conv_kernel_size", 4))

    def layers(name: str, index: int, *, is_local: bool) -> list[ModelLayer]:
        prefix = "swa_" if is_local else ""
        heads = config.count(f"{prefix}num_key_value_heads", config.count("num_key_value_heads"))
        size = config.count(f"{prefix}head_dim", config.head_size())
        width = 1 << (2 * size + 2 * (config.count("hidden_size") // heads) - 1).bit_length()
        inputs = Attention(heads, width, "bfloat16", 0, taps)
        window = config.count("sliding_window_size") if is_local else None
        return [
            ModelLayer(f"{name}.conv", index, inputs, "window", page_tokens=taps),
            attention_layer(
                f"{name}.attn", index, num_kv_heads=heads, head_size=size, dtype=dtype, window_tokens=window
            ),
        ]

    local = config.positions("local_layer_ids", num_layers, first=0, needed=False)
    found = [one for i in range(num_layers) for one in layers(f"layers.{i}", i, is_local=i in local)]
    local = config.part("mtp_config").positions("local_layer_ids", number, first=0, needed=False)
    for i in range(number):
        found += [
            replace(predicting(one), min_drafts=i + 1) for one in layers(f"mtp.{i}", num_layers, is_local=i in local)
        ]
    return Model(
        config.model,
        config.model_type,
        num_layers,
        tuple(found),
        dtype,
        num_query_heads=config.count("num_attention_heads"),
    )


def read_step3p5(config: Config) -> Model:
    """`num_attention_groups` KV heads, or those of the other setting; prediction layers follow, with types of their own."""
    num_layers, number = config.count("num_hidden_layers"), config.count("num_nextn_predict_layers", 0, at_least=0)
    types = config.entries("layer_types", num_layers + number, LAYER_TYPES)
    other, dtype = config.part("attention_other_setting"), config.dtype()
    special = LAYER_TYPES.get(other.text("attention_type")) if other.fields else None
    window = config.count("sliding_window") if "window" in types else None

    def layer(index: int) -> ModelLayer:
        own = config.with_fields(**other.fields) if types[index] == special else config
        return attention_layer(
            f"layers.{index}.attn",
            index,
            num_kv_heads=own.count("num_attention_groups"),
            head_size=own.head_size(),
            dtype=dtype,
            window_tokens=window if types[index] == "window" else None,
        )

    return _model(config, num_layers, layer, number)


def _model(config: Config, num_layers: int, layer: Callable[[int], ModelLayer], num_predicting: int = 0) -> Model:
    layers = [layer(index) for index in range(num_layers + num_predicting)]
    return Model(
        config.model,
        config.model_type,
        num_layers,
        (*layers[:num_layers], *map(predicting, layers[num_layers:])),
        config.dtype(),
        num_query_heads=config.count("num_attention_heads"),
    )
