"""Models of attention layers only: which layers have a window, how many KV heads of what width, and who shares?

| model types | windows | source |
|---|---|---|
| `llama`, `qwen2`, `qwen3`, `mistral`, `mixtral`, `phi3` and relatives | none, all, or by `layer_types` | transformers' configuration classes |
| `qwen2`, `qwen3` with `use_sliding_window` | from layer `max_window_layers` on | `Qwen2Config` |
| `mixtral`, `glm4` and others of `WITHOUT_TYPES` | one for all layers, none where `layer_types` differ | vLLM 0.32 `engine/arg_utils.py:2249`, their classes |
| `gpt_oss` | every even layer, or `layer_types` | `GptOssConfig` |
| `gemma2` | every even layer, or `layer_types` | `Gemma2Config` |
| `gemma3*` | all but every sixth (`sliding_window_pattern`), or `layer_types` | `Gemma3TextConfig` |
| `gemma4*` | `layer_types`; full layers have their own heads and width | `Gemma4TextConfig`, vLLM 0.32 `gemma4.py` |
| `exaone4`, `exaone_moe` | `layer_types`, else all but every `sliding_window_pattern`th | `Exaone4Config`, vLLM 0.32 `exaone_moe.py` |
| `cohere2`, `cohere2_moe` | the same; a token sees `sliding_window` tokens beside itself | `Cohere2Config`, vLLM 0.32 `commandr.py`, `cohere2_moe.py` |
| `minicpm3` | none; K and V of every query head | vLLM 0.32 `minicpm3.py` |
| `muse_glimmer_text` | where `no_rope_layers` is 1, by default all but every fourth, counted from the last | vLLM 0.32 `configs/muse_glimmer.py` |
| `plamo3` | as `interleaved_sliding_window` lists them | vLLM 0.32 `plamo3.py` |
| `iquestloopcoder` | none, and of every further loop one of `loop_window_size` | vLLM 0.32 `iquest_loopcoder.py` |
| `afmoe` | `layer_types`, else all but every `global_attn_every_n_layers`th | `AfmoeConfig` |
| `llama4*` | chunks where `no_rope_layers` is not 0, by default all but every fourth | `Llama4TextConfig`, vLLM 0.32 `llama4.py` |
| `glm4_moe`, `ernie4_5_moe`, `mimo`, `bailing_moe`, `bailing_moe_v2`, `hy_v3` | none; `num_nextn_predict_layers` more layers predict | vLLM 0.32 `glm4_moe_mtp.py`, `ernie_mtp.py`, `mimo_mtp.py`, `bailing_moe_mtp.py`, `hy_v3_mtp.py` |
| `minimax_m2` | none; every `attn_type_list` entry is 1 | vLLM 0.32 `minimax_m2.py`, which drops the `num_mtp_modules` |
| `smollm3` | none, unless `layer_types` says otherwise | `SmolLM3Config` |

A chunk (`attention_chunk_size`) keeps at most its own tokens, so it is described as a window of that size. The last `num_kv_shared_layers` read the cache of an earlier layer and have none (vLLM 0.32, `gemma4.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvreshard.catalog.config import PER_LAYER, Config
from kvreshard.catalog.defaults import WINDOW_TOKENS
from kvreshard.catalog.layers import Model, ModelLayer, attention_layer, predicting
from kvreshard.catalog.windows import LAYER_TYPES, WITHOUT_TYPES, plain_windows, windows_by_type

PLAIN_TYPES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "phi3",
    "gemma",
    "granite",
    "granitemoe",
    "olmo",
    "olmo2",
    "glm4",
    "starcoder2",
    "nemotron",
    "laguna",
    "cohere",
    "ernie4_5",
    "granitemoeshared",
    "hyperclovax",
    "ministral3",
    "olmoe",
    "phi3_v",
    "phi4mm",
    "phimoe",
    "solar",
    "stablelm",
)
PREDICTING_TYPES = ("glm4_moe", "ernie4_5_moe", "mimo", "bailing_moe", "bailing_moe_v2", "hy_v3")
KNOWN = (*PLAIN_TYPES, *PREDICTING_TYPES, *WITHOUT_TYPES)
GEMMA_3_DEFAULTS = {"num_attention_heads": 8, "sliding_window": 4096}


def read_plain(config: Config) -> Model:
    """A model whose windows, if any, come from its layer types or hold for all layers."""
    num_layers = config.count("num_hidden_layers")
    return _model(config, num_layers, plain_windows(config, num_layers, is_known=config.model_type in KNOWN))


def read_alternating(config: Config) -> Model:
    """Every even layer has the window, unless `layer_types` says otherwise."""
    num_layers = config.count("num_hidden_layers")
    if config.has("layer_types"):
        types = config.entries("layer_types", num_layers, LAYER_TYPES)
    else:
        types = tuple("full" if index % 2 else "window" for index in range(num_layers))
    return _model(config, num_layers, windows_by_type(config, types))


def read_exaone4(config: Config) -> Model:
    """Without a window all layers are full; a file that does not say has the one of its family."""
    num_layers = config.count("num_hidden_layers")
    if "sliding_window" not in config.fields:
        config = config.with_fields(sliding_window=WINDOW_TOKENS[config.model_type])
    if not config.has("sliding_window") and not config.has("layer_types"):
        return _model(config, num_layers, [None] * num_layers)
    return _model(config, num_layers, windows_by_type(config, _periodic(config, num_layers, "sliding_window_pattern")))


def read_exaone_moe(config: Config) -> Model:
    """One window for all layers that have one; prediction layers are like the first layers."""
    config.must_be("sliding_windows")
    config.must_be("mtp_layer_types")
    return _with_predicting(config, read_exaone4(config))


def read_cohere2(config: Config) -> Model:
    """`sliding_window` does not count the token itself."""
    num_layers = config.count("num_hidden_layers")
    windows = windows_by_type(config, _periodic(config, num_layers, "sliding_window_pattern"), 4096)
    return _model(config, num_layers, [None if window is None else window + 1 for window in windows])


def read_cohere2_moe(config: Config) -> Model:
    """The first `first_k_dense_replace` layers have a period of their own, by default of full layers only."""
    num_layers = config.count("num_hidden_layers")
    first = config.count("first_k_dense_replace", 0, at_least=0)
    if config.has("layer_types") or not first:
        return read_cohere2(config)
    inner, outer = config.count("prefix_dense_sliding_window_pattern", 1), config.count("sliding_window_pattern", 4)
    every = [inner] * first + [outer] * (num_layers - first)
    types = [
        "sliding_attention" if (n + 1 - first * (n >= first)) % p else "full_attention" for n, p in enumerate(every)
    ]
    return read_cohere2(config.with_fields(layer_types=types))


def read_minicpm3(config: Config) -> Model:
    """K and V are cached as they come out of the latent, V as wide as K (vLLM 0.32 `minicpm3.py`)."""
    width = config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim")
    heads = config.count("num_attention_heads")
    return read_plain(config.with_fields(num_key_value_heads=heads, head_dim=width))


def read_muse_glimmer(config: Config) -> Model:
    """vLLM asks `no_rope_layers`; layer types that say otherwise are refused."""
    num_layers = config.count("num_hidden_layers")
    rotated = [(num_layers - 1 - index) % 4 != 0 for index in range(num_layers)]
    if config.has("no_rope_layers"):
        rotated = [entry == 1 for entry in config.numbers("no_rope_layers", num_layers)]
    types = tuple("window" if entry else "full" for entry in rotated)
    if config.has("layer_types") and config.entries("layer_types", num_layers, LAYER_TYPES) != types:
        raise config.error("layer_types", "is not what no_rope_layers say", "make them agree in a copy of the file")
    return _model(config, num_layers, windows_by_type(config, types, WINDOW_TOKENS[config.model_type]))


def read_plamo3(config: Config) -> Model:
    """One window per layer, null for none."""
    num_layers, name = config.count("num_hidden_layers"), "interleaved_sliding_window"
    listed = config.fields.get(name)
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise config.error(name, "is no list", "give one window per layer, or null")
    config = config.with_fields(**{name: [0 if window is None else window for window in listed]})
    return _model(config, num_layers, [window or None for window in config.numbers(name, num_layers)])


def read_loop_coder(config: Config) -> Model:
    """All layers run `loop_num` times; each time but the first they keep a window of their own."""
    once = read_plain(config)
    loops, tokens = config.count("loop_num", 2), config.count("loop_window_size", 64)
    layers: list[ModelLayer] = []
    for layer in once.layers:
        again = attention_layer(
            "", layer.index, num_kv_heads=config.num_kv_heads(), head_size=config.head_size(), dtype=config.dtype(), window_tokens=tokens
        )  # fmt: skip
        layers += [layer, *(replace(again, name=f"layers.{layer.index}.loop.{loop}") for loop in range(1, loops))]
    return replace(once, layers=tuple(layers))


def read_afmoe(config: Config) -> Model:
    """Window layers with a full one every few."""
    num_layers = config.count("num_hidden_layers")
    return _model(
        config, num_layers, windows_by_type(config, _periodic(config, num_layers, "global_attn_every_n_layers"))
    )


def _periodic(config: Config, num_layers: int, name: str) -> tuple[str, ...]:
    """Types of the layers, as listed or one full layer after some window layers: every `name`th, by default every fourth."""
    if config.has("layer_types"):
        return config.entries("layer_types", num_layers, LAYER_TYPES)
    every = config.count(name, 4)
    return tuple("window" if (index + 1) % every else "full" for index in range(num_layers))


def read_llama4(config: Config) -> Model:
    """Layers with rotary embedding attend within chunks of `attention_chunk_size`, the others to everything."""
    num_layers = config.count("num_hidden_layers")
    if config.has("layer_types"):
        types = config.entries("layer_types", num_layers, {"full_attention": "full", "chunked_attention": "chunk"})
    else:
        interval = config.count("no_rope_layer_interval", 4)
        rotated = [(index + 1) % interval for index in range(num_layers)]
        if config.fields.get("no_rope_layers"):  # an empty list stands for the default
            rotated = list(config.numbers("no_rope_layers", num_layers))
        types = tuple("chunk" if entry else "full" for entry in rotated)
    chunk = config.count("attention_chunk_size") if config.has("attention_chunk_size") else None
    return _model(config, num_layers, [chunk if entry == "chunk" else None for entry in types])


def read_predicting(config: Config) -> Model:
    """Plain attention, and layers of it that predict."""
    return _with_predicting(config, read_plain(config))


def _with_predicting(config: Config, model: Model) -> Model:
    """The model, and `num_nextn_predict_layers` more that are like its first ones."""
    added = (
        replace(model.layers[index % model.num_layers], name=f"mtp.{index}.attn", index=model.num_layers)
        for index in range(config.count("num_nextn_predict_layers", 0, at_least=0))
    )
    return replace(model, layers=(*model.layers, *map(predicting, added)))


def read_minimax_m2(config: Config) -> Model:
    """Plain attention in all layers. The older MiniMax types, with linear attention, are not known."""
    num_layers = config.count("num_hidden_layers")
    if config.has("attn_type_list"):
        for index, entry in enumerate(config.numbers("attn_type_list", num_layers)):
            if entry != 1:
                raise config.error(f"attn_type_list[{index}]", f"is {entry}", "only 1, full attention, is known")
    config.must_be("sliding_window")
    return _model(config, num_layers, [None] * num_layers)


def read_smollm3(config: Config) -> Model:
    """Layers without rotary embedding cache like the others."""
    if config.has("layer_types"):
        return read_plain(config)
    config.must_be("use_sliding_window", False)
    num_layers = config.count("num_hidden_layers")
    return _model(config, num_layers, [None] * num_layers)


def read_gemma3(config: Config) -> Model:
    """Fields that hub files leave out have the values of transformers 5.19 `Gemma3TextConfig`."""
    num_layers = config.count("num_hidden_layers")
    pattern = config.count("sliding_window_pattern", 6)
    if config.has("layer_types"):
        types = config.entries("layer_types", num_layers, LAYER_TYPES)
    else:
        types = tuple("window" if (index + 1) % pattern else "full" for index in range(num_layers))
    known = {**GEMMA_3_DEFAULTS, **{name: value for name, value in config.fields.items() if value is not None}}
    filled = config.with_fields(**known)
    filled.must_be("use_bidirectional_attention", False)
    return _model(filled, num_layers, windows_by_type(filled, types))


def read_gemma3n(config: Config) -> Model:
    """`Gemma3nTextConfig`: four windows, then a full layer; the last layers share."""
    num_layers = config.count("num_hidden_layers")
    types = config.entries("layer_types", num_layers, LAYER_TYPES)
    return _model(config, num_layers, windows_by_type(config, types), _num_shared(config, num_layers))


def read_gemma4(config: Config) -> Model:
    """Full layers are `global_head_dim` wide and, with `attention_k_eq_v`, have `num_global_key_value_heads` KV heads."""
    num_layers = config.count("num_hidden_layers")
    types = config.entries("layer_types", num_layers, LAYER_TYPES)
    if types[-1] != "full":
        raise config.error(
            f"layer_types[{num_layers - 1}]", "is a sliding layer", "transformers makes the last layer a full one"
        )
    config.must_be("use_bidirectional_attention", False, "vision")
    dtype, windows = config.dtype(), windows_by_type(config, types)
    layers = tuple(
        attention_layer(
            f"layers.{index}.attn",
            index,
            num_kv_heads=own.num_kv_heads(),
            head_size=own.head_size(),
            dtype=dtype,
            window_tokens=windows[index],
        )
        for index, own in enumerate(_gemma4_layers(config, types))
    )
    return _finish(config, num_layers, layers[: num_layers - _num_shared(config, num_layers)])


def _gemma4_layers(config: Config, types: Sequence[str]) -> list[Config]:
    """What differs in some layers is listed per layer, as transformers 5.19 saves it, or said for all full ones."""
    if config.has(PER_LAYER):
        return [config.of_layer(index) for index in range(len(types))]
    full = config.with_fields(head_dim=config.count("global_head_dim"))
    if config.flag("attention_k_eq_v", False) and config.has("num_global_key_value_heads"):
        full = full.with_fields(num_key_value_heads=config.count("num_global_key_value_heads"))
    return [full if entry == "full" else config for entry in types]


def _num_shared(config: Config, num_layers: int) -> int:
    shared = config.count("num_kv_shared_layers", at_least=0)
    if shared >= num_layers:
        raise config.error("num_kv_shared_layers", f"is {shared} of {num_layers} layers", "one layer needs a cache")
    return shared


def _model(config: Config, num_layers: int, windows: Sequence[int | None], num_shared: int = 0) -> Model:
    heads, width, dtype = config.num_kv_heads(), config.head_size(), config.dtype()
    layers = tuple(
        attention_layer(
            f"layers.{index}.attn", index, num_kv_heads=heads, head_size=width, dtype=dtype, window_tokens=window
        )
        for index, window in enumerate(windows[: num_layers - num_shared])
    )
    return _finish(config, num_layers, layers)


def _finish(config: Config, num_layers: int, layers: tuple[ModelLayer, ...]) -> Model:
    return Model(
        config.model,
        config.model_type,
        num_layers,
        layers,
        config.dtype(),
        num_query_heads=config.count("num_attention_heads"),
    )
