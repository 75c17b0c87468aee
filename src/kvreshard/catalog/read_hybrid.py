"""Models with recurrent layers: which layers keep a state, of what sizes, and which keep K and V?

| model types | which layer is what | state | source |
|---|---|---|---|
| `nemotron_h` | `layers_block_type` or `hybrid_override_pattern` (M state, * attention, others none), whose length is the number of layers | Mamba-2 | `NemotronHConfig` |
| `granitemoehybrid` | `layer_types` | Mamba-2 | `GraniteMoeHybridConfig` |
| `falcon_h1` | each layer is both | Mamba-2 | `FalconH1Config` |
| `jamba` | attention at `attn_layer_offset` of every `attn_layer_period` | Mamba-1 | `JambaConfig` |
| `qwen3_next`, `qwen3_5*` | `layer_types`, else attention last of every `full_attention_interval` | gated delta | `Qwen3NextConfig` |
| `olmo_hybrid` | `layer_types`, else attention last of every four | gated delta | `OlmoHybridConfig` |
| `zamba2` | `layers_block_type`: a state, or a state and attention | Mamba-2 | `Zamba2Config`, vLLM 0.32 `zamba2.py` |
| `kimi_linear` | `layer_types`, or `kda_layers` of `linear_attn_config`, counted from 1; the others latents | KDA, recurrent in float32 | `KimiLinearConfig`, vLLM 0.32 `kda_state_dtype` |
| `bailing_hybrid` | latents last of every `layer_group_size` layers, with `short_conv_kernel_size` (Ling 3) also those after the last whole group | linear attention, in Ling 3 KDA | vLLM 0.32 `bailing_moe_linear.py`, `bailing_moe_v3.py` |
| `lfm2`, `lfm2_moe` | `layer_types`, or attention in `full_attn_idxs` | short convolution | `Lfm2Config`, vLLM 0.32 `lfm2.py`, `lfm2_moe.py` |
| `mamba2`, `mamba`, `falcon_mamba` | all states | Mamba-2, Mamba-1 | `Mamba2Config`, `MambaConfig` |

A convolution state has the model's dtype, a recurrent state the same unless the model says otherwise (vLLM 0.32
`mamba_utils.py`): Nemotron-H `mamba_ssm_cache_dtype`, else float32; Qwen3.5 `mamba_ssm_dtype`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvreshard.catalog.config import Config
from kvreshard.catalog.layers import Model, ModelLayer, attention_layer, latent_layer, predicting
from kvreshard.catalog.read_latent import latent
from kvreshard.kinds import GatedDelta, Kind, LinearState, Mamba1, Mamba2, ShortConv

BLOCKS = {
    "mamba": "state",
    "linear_attention": "state",
    "attention": "full",
    "full_attention": "full",
    "mlp": "none",
    "moe": "none",
}
PATTERN: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}


def read_nemotron_h(config: Config) -> Model:
    """Layers of one block each, as many as are listed. The inner size is heads x head size, not `expand` x hidden size.

    Older files have the width as `attention_head_dim` too, which transformers does not read.
    """
    filled = _with_pattern(config, "hybrid_override_pattern", "layers_block_type")
    listed = filled.fields.get("layers_block_type")
    number = len(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else 0
    num_layers = config.count("num_hidden_layers", number or None)
    types = filled.entries("layers_block_type", num_layers, BLOCKS)
    config.must_be("attention_head_dim", config.head_size())
    state = Mamba2(
        config.count("mamba_num_heads"),
        config.count("mamba_head_dim"),
        config.count("n_groups"),
        config.count("ssm_state_size"),
        config.count("conv_kernel"),
        config.dtype(),
        config.state_dtype("mamba_ssm_cache_dtype", "float32"),
    )
    return _model(config, types, state, "mamba", _nemotron_predictions(config))


def _nemotron_predictions(config: Config) -> int:
    """Attention layers that predict: those of one prediction block, as often as there are blocks."""
    blocks = config.count("num_nextn_predict_layers", 0, at_least=0)
    if not blocks:
        return 0
    filled = _with_pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    listed = filled.fields.get("mtp_layers_block_type")
    types = filled.entries("mtp_layers_block_type", len(listed) if isinstance(listed, Sequence) else 1, BLOCKS)
    if "state" in types:
        raise config.error("mtp_layers_block_type", "has a Mamba layer", "predicting states are not described")
    return blocks * types.count("full")


def _with_pattern(config: Config, pattern: str, listed: str) -> Config:
    """The config with the list of block types that a pattern of letters stands for."""
    if config.has(listed) or not config.has(pattern):
        return config
    letters = config.text(pattern)
    for position, letter in enumerate(letters):
        if letter not in PATTERN:
            raise config.error(
                f"{pattern}[{position}]", f"is {letter!r}", f"known here are {', '.join(map(repr, PATTERN))}"
            )
    return config.with_fields(**{listed: [PATTERN[letter] for letter in letters]})


def read_granite(config: Config) -> Model:
    """`mamba_d_head` auto: the inner size `mamba_expand` x hidden size over the heads."""
    types = config.entries("layer_types", config.count("num_hidden_layers"), BLOCKS)
    state = None
    if "state" in types:
        inner = config.count("mamba_expand", 2) * config.count("hidden_size")
        state = _mamba2(config, inner)
    return _model(config, types, state, "mamba")


def read_falcon_h1(config: Config) -> Model:
    """Each layer is attention and Mamba-2 side by side, attention registered first."""
    config.must_be("attn_layer_indices")
    if config.has("mamba_d_ssm"):
        inner = config.count("mamba_d_ssm")
    else:
        inner = config.count("mamba_expand") * config.count("hidden_size")
    return _model(config, ("both",) * config.count("num_hidden_layers"), _mamba2(config, inner), "mamba")


def _mamba2(config: Config, inner: int) -> Mamba2:
    heads = config.count("mamba_n_heads")
    width = inner // heads if config.fields.get("mamba_d_head") == "auto" else config.count("mamba_d_head")
    if heads * width != inner:
        raise config.error(
            "mamba_d_head", f"is {width} for {heads} heads, but the inner size is {inner}", "their product must be it"
        )
    return Mamba2(
        heads,
        width,
        config.count("mamba_n_groups"),
        config.count("mamba_d_state"),
        config.count("mamba_d_conv"),
        config.dtype(),
        config.dtype(),
    )


def read_jamba(config: Config) -> Model:
    """Attention where the layer's number leaves `attn_layer_offset` when divided by `attn_layer_period`."""
    period, offset = config.count("attn_layer_period"), config.count("attn_layer_offset", at_least=0)
    if offset >= period:
        raise config.error("attn_layer_offset", f"is {offset}", f"it must be below attn_layer_period {period}")
    types = ["full" if index % period == offset else "state" for index in range(config.count("num_hidden_layers"))]
    inner = config.count("mamba_expand") * config.count("hidden_size")
    state = Mamba1(inner, config.count("mamba_d_state"), config.count("mamba_d_conv"), config.dtype(), config.dtype())
    return _model(config, types, state, "mamba")


def read_zamba2(config: Config) -> Model:
    """A state in every layer; those of `hybrid_layer_ids` are also attention, of K and V per query head, registered first."""
    num_layers = config.count("num_hidden_layers")
    types = config.entries(
        "layers_block_type", num_layers, {**dict.fromkeys(("mamba", "linear_attention"), "state"), "hybrid": "both"}
    )
    heads, inner = config.count("n_mamba_heads", 8), config.count("mamba_expand", 2) * config.count("hidden_size")
    width = config.count("mamba_headdim", inner // heads)
    sizes = config.count("mamba_ngroups", 1), config.count("mamba_d_state", 64), config.count("mamba_d_conv", 4)
    state = Mamba2(heads, width, *sizes, config.dtype(), config.dtype())
    num_heads = config.count("num_attention_heads")
    size = config.count("attention_head_dim", 2 * config.count("hidden_size") // num_heads)
    attention = [
        attention_layer(f"layers.{index}.attn", index, num_kv_heads=num_heads, head_size=size, dtype=config.dtype())
        for index, entry in enumerate(types)
        if entry == "both"
    ]
    states = [ModelLayer(f"layers.{index}.mamba", index, state, "state") for index in range(num_layers)]
    return Model(
        config.model,
        config.model_type,
        num_layers,
        (*attention, *states),
        config.dtype(),
        num_query_heads=num_heads if attention else None,
    )


def read_gated_delta(config: Config) -> Model:
    """Prediction layers are full attention: `mtp_num_hidden_layers`, or in Qwen3-Next `num_nextn_predict_layers`.

    vLLM 0.32 takes one such layer where a Qwen file does not say.
    """
    num_layers = config.count("num_hidden_layers")
    if config.has("layer_types"):
        types = config.entries("layer_types", num_layers, {k: v for k, v in BLOCKS.items() if k.endswith("_attention")})
    else:
        interval = config.count("full_attention_interval")
        types = tuple("state" if (index + 1) % interval else "full" for index in range(num_layers))
    state = gated_delta(config)
    if config.model_type.startswith("qwen3_next"):
        num_predicting = config.count("num_nextn_predict_layers", 1, at_least=0)
    else:
        num_predicting = config.count("mtp_num_hidden_layers", int(config.model_type != "olmo_hybrid"), at_least=0)
    return _model(config, types, state, "delta", num_predicting)


def gated_delta(config: Config) -> GatedDelta:
    """The state of a gated delta layer, by the fields that Qwen's files have for it."""
    return GatedDelta(
        config.count("linear_num_key_heads"),
        config.count("linear_num_value_heads"),
        config.count("linear_key_head_dim"),
        config.count("linear_value_head_dim"),
        config.count("linear_conv_kernel_dim"),
        config.dtype(),
        config.state_dtype("mamba_ssm_dtype", config.dtype()),
    )


def read_kimi_linear(config: Config) -> Model:
    """Delta attention with as many key as value heads, and latents; prediction layers are latents."""
    num_layers = config.count("num_hidden_layers")
    inner = config.part("linear_attn_config")
    if config.has("layer_types"):
        types = config.entries("layer_types", num_layers, {"linear_attention": "state", "full_attention": "latent"})
    else:
        types = _kimi_types(inner, num_layers)
    known = {
        "linear_num_heads": ("num_heads", inner),
        "linear_head_dim": ("head_dim", inner),
        "linear_conv_kernel_dim": ("short_conv_kernel_size", inner),
    }
    heads, width, taps = (
        config.count(name) if config.has(name) else there.count(short) for name, (short, there) in known.items()
    )
    state = GatedDelta(heads, heads, width, width, taps, config.dtype(), "float32")
    layers = [
        ModelLayer(f"layers.{index}.kda", index, state, "state")
        if entry == "state"
        else latent(config, f"layers.{index}.attn", index)
        for index, entry in enumerate(types)
    ]
    for index in range(config.count("num_nextn_predict_layers", 0, at_least=0)):
        layers.append(predicting(latent(config, f"mtp.{index}.attn", num_layers)))
    query_heads = config.count("num_attention_heads")
    return Model(
        config.model, config.model_type, num_layers, tuple(layers), config.dtype(), num_query_heads=query_heads
    )


def _kimi_types(inner: Config, num_layers: int) -> tuple[str, ...]:
    """Every layer is in one of two lists, which count from 1."""
    states, latents = inner.positions("kda_layers", num_layers), inner.positions("full_attn_layers", num_layers)
    if sorted((*states, *latents)) != list(range(1, num_layers + 1)):
        raise inner.error(
            "kda_layers",
            f"and full_attn_layers name {len(states)} and {len(latents)} of {num_layers} layers",
            "name each once",
        )
    return tuple("state" if index + 1 in states else "latent" for index in range(num_layers))


def read_bailing_hybrid(config: Config) -> Model:
    """Latents with vLLM's sizes where the file says none; prediction layers are latents."""
    num_layers, group = config.count("num_hidden_layers"), config.count("layer_group_size", 1)
    heads, width, dtype = config.count("num_attention_heads"), config.head_size(), config.dtype()
    is_delta = config.has("short_conv_kernel_size")
    num_grouped = num_layers // group * group if is_delta else num_layers
    state: Kind = LinearState(heads, width, dtype)
    if is_delta:
        state = GatedDelta(heads, heads, width, width, config.count("short_conv_kernel_size"), dtype, "float32")
    channels = config.count("kv_lora_rank", 512) + config.count("qk_rope_head_dim", 64)
    layers = [
        ModelLayer(f"layers.{index}.linear", index, state, "state")
        if (index + 1) % group and index < num_grouped
        else latent_layer(f"layers.{index}.attn", index, channels=channels, dtype=dtype)
        for index in range(num_layers)
    ]
    for index in range(config.count("num_nextn_predict_layers", 0, at_least=0)):
        layers.append(predicting(latent_layer(f"mtp.{index}.attn", num_layers, channels=channels, dtype=dtype)))
    return Model(config.model, config.model_type, num_layers, tuple(layers), dtype, num_query_heads=heads)


def read_lfm2(config: Config) -> Model:
    """Convolutions of `conv_dim` channels, in `lfm2_moe` of the hidden size, and full attention."""
    num_layers = config.count("num_hidden_layers")
    if config.has("layer_types"):
        types = config.entries("layer_types", num_layers, {"conv": "state", "full_attention": "full"})
    else:
        full = config.positions("full_attn_idxs", num_layers, first=0)
        types = tuple("full" if index in full else "state" for index in range(num_layers))
    channels = config.count("hidden_size")
    if config.model_type == "lfm2":
        channels = config.count("conv_dim", channels)
    state = ShortConv(channels, config.count("conv_L_cache"), config.dtype())
    return _model(config, types, state, "short_conv")


def read_mamba2(config: Config) -> Model:
    """States only. The inner size is heads x head size."""
    state = Mamba2(
        config.count("num_heads"),
        config.count("head_dim"),
        config.count("n_groups"),
        config.count("state_size"),
        config.count("conv_kernel"),
        config.dtype(),
        config.dtype(),
    )
    return _model(config, ("state",) * config.count("num_hidden_layers"), state, "mamba")


def read_mamba1(config: Config) -> Model:
    """States only. `intermediate_size`, else `expand` x hidden size channels."""
    if config.has("intermediate_size"):
        inner = config.count("intermediate_size")
    else:
        inner = config.count("expand") * config.count("hidden_size")
    state = Mamba1(inner, config.count("state_size"), config.count("conv_kernel"), config.dtype(), config.dtype())
    return _model(config, ("state",) * config.count("num_hidden_layers"), state, "mamba")


def _model(config: Config, types: Sequence[str], state: Kind | None, state_name: str, num_predicting: int = 0) -> Model:
    layers: list[ModelLayer] = []
    for index, entry in enumerate(types):
        if entry in ("full", "both"):
            layers.append(_attention(config, f"layers.{index}.attn", index))
        if entry in ("state", "both") and state is not None:
            layers.append(ModelLayer(f"layers.{index}.{state_name}", index, state, "state"))
    for index in range(num_predicting):
        layers.append(predicting(_attention(config, f"mtp.{index}.attn", len(types))))
    heads = config.count("num_attention_heads") if any(layer.family == "full" for layer in layers) else None
    return Model(config.model, config.model_type, len(types), tuple(layers), config.dtype(), num_query_heads=heads)


def _attention(config: Config, name: str, index: int) -> ModelLayer:
    config.must_be("sliding_window")
    return attention_layer(
        name, index, num_kv_heads=config.num_kv_heads(), head_size=config.head_size(), dtype=config.dtype()
    )
