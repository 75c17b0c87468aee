"""Models in which an indexer chooses what a token attends to: what does it keep, and what of tokens that are not compressed yet?

| model types | caches of a layer that has an indexer, in order | source (vLLM 0.32) |
|---|---|---|
| `minimax_m3_vl`, `minimax_m3_text`, `minimax_m3_vl_text` | one key per token; K and V | `models/minimax_m3/nvidia/model.py`, `common/indexer.py` |
| `glm5_next`, `glm5_next_text` | one quantised key per pool of `index_kpool` tokens; the ring of the open pool; the latent | `models/glm5next/common/attention.py` |
| `qwen4_exp`, `qwen4_exp_text` | the ring of the open group; one key per `indexer_compress_ratio` tokens; K and V | `models/qwen4_exp/common/qsa_cache.py` |
| `hy_v4` | one quantised key per token; the latent. No indexer where `indexer_types` has it shared, nor in layers of `full_attention`, nor where the file has no `layer_types` | `models/hy_v4/nvidia/attention.py`, `transformers_utils/configs/hy_v4.py` |

Layers without: K and V in MiniMax-M3, a latent in HY-V4, delta states in the others. Qwen4-Exp's `ple_layer_ids` also have the state of a convolution, whole on
every rank, registered first. Keys have the dtype of the model, whatever that of the cache. A ring has whole pools or groups.

Layers that predict (`num_mtp_modules`, `num_nextn_predict_layers`, `mtp_num_hidden_layers`) have an indexer.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvreshard.catalog.config import Config
from kvreshard.catalog.layers import Model, ModelLayer, attention_layer, latent_layer, predicting
from kvreshard.catalog.read_hybrid import gated_delta
from kvreshard.catalog.read_latent import finish, index_row, sparse_latent
from kvreshard.kinds import GatedDelta, Latent, Ring, ShortConv, indexer

# Of MiniMax-M3 and GLM-5-Next.
PAGE_TOKENS = 128
# Pools of a kernel block (`v1/attention/backends/mla/indexer.py`).
GLM_KERNEL_POOLS = 64
# A bfloat16 row with three positions of 64 bits behind it (`QSAKeyStateCache`).
POSITION_CHANNELS = 12
# Words of HY-V4 for a layer that chooses.
CHOOSING = ("sparse_attention", "sparse", "indexed_attention", "deepseek_sparse_attention")
SPARSE, PLAIN = ("full_attention", "indexed_attention", "qwen_sparse_attention"), ("linear_attention",)
TYPES: Mapping[str, str] = {**dict.fromkeys(SPARSE, "sparse"), **dict.fromkeys(PLAIN, "state")}


def read_minimax_m3(config: Config) -> Model:
    """Layers of `sparse_attention_freq` that are not 0 have an indexer; transformers writes `layer_types` instead."""
    num_layers = config.count("num_hidden_layers")
    config.must_be("sliding_window")
    sparse = config.part("sparse_attention_config")
    if sparse.has("sparse_attention_freq"):
        is_sparse = [entry != 0 for entry in sparse.numbers("sparse_attention_freq", num_layers)]
    else:
        types = {"minimax_m3_sparse": "sparse", "full_attention": "full"}
        is_sparse = [entry == "sparse" for entry in config.entries("layer_types", num_layers, types)]

    def layer(name: str, index: int, *, has_indexer: bool) -> list[ModelLayer]:
        found = [_attention(config, f"{name}.attn", index)]
        if has_indexer:
            size = config.count("index_head_dim") if config.has("index_head_dim") else sparse.count("sparse_index_dim")
            found.insert(0, ModelLayer(f"{name}.indexer", index, Latent(size, "bfloat16"), "latent"))
        return found

    layers = [
        one for index in range(num_layers) for one in layer(f"layers.{index}", index, has_indexer=is_sparse[index])
    ]
    for index in range(config.count("num_mtp_modules", 1, at_least=0)):
        layers += map(predicting, layer(f"mtp.{index}", num_layers, has_indexer=True))
    return finish(config, num_layers, layers, PAGE_TOKENS)


def read_glm5_next(config: Config) -> Model:
    """Delta attention, whose sizes older files keep in `linear_attn_config`, and latents with an indexer in every fourth layer unless
    `layer_types` says otherwise.
    """
    num_layers = config.count("num_hidden_layers")
    types = _types(config, num_layers, interval=4)
    inner = config.part("linear_attn_config")
    names = {
        "linear_num_heads": "num_heads",
        "linear_head_dim": "head_dim",
        "linear_conv_kernel_dim": "short_conv_kernel_size",
    }
    heads, width, taps = (
        inner.count(short) if inner.has(short) else config.count(name) for name, short in names.items()
    )
    state = GatedDelta(heads, heads, width, width, taps, config.dtype(), "float32")
    pool, channels = config.count("index_kpool"), config.count("index_head_dim")
    keys = indexer(*index_row(config), tokens_per_state=pool, kernel_tokens=pool * GLM_KERNEL_POOLS)
    ring = Ring(pool, channels, "bfloat16", ("k", "gate"), lap_entries=pool, is_doubled=True)

    def sparse(name: str, index: int) -> list[ModelLayer]:
        latents = config.count("kv_lora_rank") + config.count("qk_rope_head_dim", at_least=0)
        return [
            ModelLayer(f"{name}.indexer", index, keys, "latent"),
            ModelLayer(f"{name}.tail", index, ring, "ring"),
            latent_layer(f"{name}.attn", index, channels=latents, dtype=config.dtype()),
        ]

    layers: list[ModelLayer] = []
    for index, entry in enumerate(types):
        if entry == "sparse":
            layers += sparse(f"layers.{index}", index)
        else:
            layers.append(ModelLayer(f"layers.{index}.kda", index, state, "state"))
    for index in range(config.count("num_nextn_predict_layers", 0, at_least=0)):
        layers += map(predicting, sparse(f"mtp.{index}", num_layers))
    return finish(config, num_layers, layers, PAGE_TOKENS, order="BLHNC")


def read_qwen4_exp(config: Config) -> Model:
    """Gated delta, and attention in every fourth layer unless `layer_types` says otherwise; without indexer if its heads are not said."""
    num_layers = config.count("num_hidden_layers")
    types = _types(config, num_layers, interval=config.count("full_attention_interval", 4))
    state = gated_delta(config)
    positions = config.positions("ple_layer_ids", num_layers, needed=False)
    has_indexer = config.has("indexer_n_heads")
    layers: list[ModelLayer] = []
    for index, entry in enumerate(types):
        if index + 1 in positions:
            layers.append(ModelLayer(f"layers.{index}.ple", index, _position_conv(config), "state"))
        if entry == "state":
            layers.append(ModelLayer(f"layers.{index}.delta", index, state, "state"))
        else:
            layers += _qsa(config, f"layers.{index}", index) if has_indexer else []
            layers.append(_attention(config, f"layers.{index}.attn", index))
    for index in range(config.count("mtp_num_hidden_layers", 1, at_least=0)):
        own = [
            *(_qsa(config, f"mtp.{index}", num_layers) if has_indexer else ()),
            _attention(config, f"mtp.{index}.attn", num_layers),
        ]
        layers += map(predicting, own)
    return finish(config, num_layers, layers, 16, order="BLHNC")


def read_hy_v4(config: Config) -> Model:
    """A file without `layer_types` has no indexer; without `indexer_types` the first and every fourth behind it has one (`HYV4Config`).

    Layers that predict are as the last one, with an indexer of their own.
    """
    num_layers = config.count("num_hidden_layers")
    known = {**dict.fromkeys(CHOOSING, "sparse"), "full_attention": "full"}
    types = config.entries("layer_types", num_layers, known) if config.has("layer_types") else ("full",) * num_layers
    shared = tuple("full" if index == 0 or (index - 1) % 4 == 0 else "shared" for index in range(num_layers))
    if config.has("indexer_types"):
        shared = config.entries("indexer_types", num_layers, {"full": "full", "shared": "shared"})
    layers = []
    for index, (entry, choice) in enumerate(zip(types, shared, strict=True)):
        is_alone = entry == "full" or choice == "shared"
        layers += sparse_latent(config, f"layers.{index}", index)[is_alone:]
    for index in range(config.count("num_nextn_predict_layers", 1, at_least=0)):
        own = sparse_latent(config, f"mtp.{index}", num_layers)
        layers += map(predicting, own[types[-1] == "full" :])
    return finish(config, num_layers, layers, 64)


def _types(config: Config, num_layers: int, interval: int) -> tuple[str, ...]:
    if config.has("layer_types"):
        return config.entries("layer_types", num_layers, TYPES)
    return tuple("state" if (index + 1) % interval else "sparse" for index in range(num_layers))


def _position_conv(config: Config) -> ShortConv:
    """`ple_conv_kernel_size` taps, each `ngram_size` tokens apart, of `hc_count` streams."""
    taps = (config.count("ple_conv_kernel_size", 4) - 1) * config.count("ngram_size", 3)
    channels = config.count("hidden_size") * config.count("hc_count", 4)
    return ShortConv(channels, taps + 1, config.dtype(), is_replicated=True)


def _qsa(config: Config, name: str, index: int) -> list[ModelLayer]:
    """The ring of the open group and a key per group. In a multimodal model positions of several axes stand behind the ring's keys; of a
    text model's own file vLLM takes them out (`model_executor/models/config.py:890`).
    """
    group, channels = config.count("indexer_compress_ratio"), config.count("indexer_head_dim")
    stored = channels
    if config.outer is not None and config.part("rope_parameters").has("mrope_section"):
        stored = -(-channels // 4) * 4 + POSITION_CHANNELS
    ring = Ring(group, stored, "bfloat16", ("partial",), lap_entries=group)
    keys = Latent(channels, "bfloat16", tokens_per_state=group)
    return [ModelLayer(f"{name}.open_keys", index, ring, "ring"), ModelLayer(f"{name}.indexer", index, keys, "latent")]


def _attention(config: Config, name: str, index: int) -> ModelLayer:
    return attention_layer(
        name, index, num_kv_heads=config.num_kv_heads(), head_size=config.head_size(), dtype=config.dtype()
    )
