"""Rules that make one cache of a decoder layer, by the fields of a file: what the words of `layers` mean.

`USUAL` has the words that every family may use: `full`, `window`, `latent`, `indexer`. The others are made in the rows of `families` from
`attention`, `latent`, `keys`, `ring` and `state`, with the fields that hold their sizes. A state has the model's dtype, its recurrent part
the one that the row says (vLLM 0.32 `mamba_utils.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvreshard.catalog.config import PER_LAYER, Config
from kvreshard.catalog.family import CacheRule, Source
from kvreshard.catalog.layers import PACKED, ModelLayer, attention_layer, latent_layer
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, LinearState, Mamba1, Mamba2, Ring, ShortConv, indexer

# vLLM 0.32 `mla/indexer.py`: fp8 keys, one float32 scale for each 128 of them.
SCALED_CHANNELS = 128
# `mla/flashmla_sparse.py`: 512 e4m3, 4 float32 scales, 64 bfloat16 of 576 channels.
PACKED_CHANNELS, PACKED_ROW_BYTES = 576, 656
# Pools of a kernel block (`v1/attention/backends/mla/indexer.py`).
GLM_KERNEL_POOLS = 64
# A bfloat16 row with three positions of 64 bits behind it (`QSAKeyStateCache`).
POSITION_CHANNELS = 12

WindowRule = Callable[[Config, int], int | None]
"""Config and number of a layer -> tokens of its window."""
Heads = tuple[int, int, int | None]
"""KV heads, channels of K, channels of V (None: as many)."""
HeadRule = Callable[[Config, int], Heads]
"""Config and number of a layer -> its heads."""


def no_window(_config: Config, _index: int) -> int | None:
    """All tokens, whatever `sliding_window` says."""
    return None


def unwindowed(config: Config, _index: int) -> int | None:
    """All tokens; a file with a window is refused."""
    config.must_be("sliding_window")
    return None


def tokens(source: Source, plus: int = 0) -> WindowRule:
    """As many as a field says."""
    return lambda config, _index: config.number(source) + plus


def listed_tokens(field: str) -> WindowRule:
    """What the field lists for the layer."""
    return lambda config, index: int(config.fields[field][index])


def chunk(config: Config, _index: int) -> int | None:
    """A chunk keeps at most its own tokens, so it is a window of that size; a file without one has none."""
    return config.count("attention_chunk_size") if config.has("attention_chunk_size") else None


def heads(number: Source, size: Source, size_v: Source | None = None) -> HeadRule:
    """The same in all layers: KV heads, channels of K, and of V if they differ."""
    return lambda config, _index: (
        config.number(number),
        config.number(size),
        None if size_v is None else config.number(size_v),
    )


usual_heads = heads(Config.num_kv_heads, Config.head_size)
"""`num_key_value_heads` x `head_dim`, or what the family has without them."""


def attention(name: str = "attn", window: WindowRule = no_window, heads: HeadRule = usual_heads) -> CacheRule:
    """K and V."""

    def cache(config: Config, layer: str, index: int) -> ModelLayer:
        window_tokens = window(config, index)
        number, size, size_v = heads(config, index)
        return attention_layer(
            f"{layer}.{name}",
            index,
            num_kv_heads=number,
            head_size=size,
            dtype=config.dtype(),
            window_tokens=window_tokens,
            head_size_v=size_v,
        )

    return cache


def listed_heads(config: Config, index: int) -> Heads:
    """What differs in a layer is listed for it, as transformers 5.19 saves it (`per_layer_config`)."""
    return usual_heads(config.of_layer(index), index)


def gemma4_heads(config: Config, index: int) -> Heads:
    """Full layers are `global_head_dim` wide and, with `attention_k_eq_v`, have `num_global_key_value_heads` KV heads."""
    if config.has(PER_LAYER):
        return listed_heads(config, index)
    full = config.with_fields(head_dim=config.count("global_head_dim"))
    if config.flag("attention_k_eq_v", False) and config.has("num_global_key_value_heads"):
        full = full.with_fields(num_key_value_heads=config.count("num_global_key_value_heads"))
    return usual_heads(full, index)


def other_heads(config: Config, index: int) -> Heads:
    """Step-3.5: the usual fields as `attention_other_setting` has them."""
    return step_heads(config.with_fields(**config.part("attention_other_setting").fields), index)


step_heads = heads("num_attention_groups", Config.head_size)
inkling_heads = heads("num_key_value_heads", Config.head_size)
inkling_window_heads = heads(
    ("swa_num_key_value_heads", "num_key_value_heads"), lambda config: config.count("swa_head_dim", config.head_size())
)


def inkling_inputs(heads: HeadRule) -> CacheRule:
    """The inputs of a token's four convolutions, per KV head: K, V and the head's part of two outputs, up to a power of two.

    A window of as many tokens as the convolutions have taps (vLLM 0.32 `models/inkling/nvidia/sconv_swa_attn.py`).
    """

    def cache(config: Config, layer: str, index: int) -> ModelLayer:
        taps = config.count("sconv_kernel_size", config.count("conv_kernel_size", 4))
        number, size, _ = heads(config, index)
        width = 1 << (2 * size + 2 * (config.count("hidden_size") // number) - 1).bit_length()
        inputs = Attention(number, width, "bfloat16", 0, taps)
        return ModelLayer(f"{layer}.conv", index, inputs, "window", page_tokens=taps)

    return cache


def block_heads(config: Config, index: int) -> Heads:
    """Nemotron-NAS: query heads over `block_configs[].attention.n_heads_in_group`."""
    own, num_heads = config.element("block_configs", index).part("attention"), config.count("num_attention_heads")
    shared = own.count("n_heads_in_group")
    if num_heads % shared:
        raise own.error("n_heads_in_group", f"is {shared}", f"it must divide {num_heads} heads")
    return num_heads // shared, config.head_size(), None


def latent(name: str = "attn", *, packs: bool = True, least_rotated: int = 1) -> CacheRule:
    """A vector of `kv_lora_rank + qk_rope_head_dim` per token. `packs`: sparse kernels have a packed form of it."""

    def cache(config: Config, layer: str, index: int) -> ModelLayer:
        channels = config.count("kv_lora_rank") + config.count("qk_rope_head_dim", at_least=least_rotated)
        has_packed = packs and channels == PACKED_CHANNELS
        packed = Latent(channels, "uint8", PACKED, PACKED_ROW_BYTES) if has_packed else None
        return latent_layer(f"{layer}.{name}", index, channels=channels, dtype=config.dtype(), packed=packed)

    return cache


def index_row(config: Config) -> tuple[int, int]:
    """Bytes of an indexer's key, and of its scales."""
    channels = config.count("index_head_dim")
    if channels % SCALED_CHANNELS:
        raise config.error(
            "index_head_dim", f"is {channels}", f"scales belong to {SCALED_CHANNELS} channels each; give a multiple"
        )
    return channels, channels // SCALED_CHANNELS * 4


def fixed(name: str, kind: Callable[[Config], Kind], family: str = "latent") -> CacheRule:
    """A cache that has one kind, whatever dtype the engine asks for."""
    return lambda config, layer, index: ModelLayer(f"{layer}.{name}", index, kind(config), family)


def state(name: str, kind: Callable[[Config], Kind]) -> CacheRule:
    """A state per request."""
    return fixed(name, kind, "state")


def ring(name: str, kind: Callable[[Config], Kind]) -> CacheRule:
    """The last tokens, in one page per request."""
    return fixed(name, kind, "ring")


def scaled_keys(config: Config) -> Kind:
    """An indexer's quantised key per token. Its kernel blocks are of 64."""
    return indexer(*index_row(config))


def pooled_keys(config: Config) -> Kind:
    """GLM-5-Next: a quantised key per pool of tokens."""
    pool = config.count("index_kpool")
    return indexer(*index_row(config), tokens_per_state=pool, kernel_tokens=pool * GLM_KERNEL_POOLS)


def pool_ring(config: Config) -> Kind:
    """GLM-5-Next: keys and gates of the open pool. A ring has whole pools."""
    pool = config.count("index_kpool")
    return Ring(pool, config.count("index_head_dim"), "bfloat16", ("k", "gate"), lap_entries=pool, is_doubled=True)


def plain_keys(source: Source) -> Callable[[Config], Kind]:
    """An indexer's key per token, in the dtype of the model, whatever that of the cache."""
    return lambda config: Latent(config.number(source), "bfloat16")


def group_keys(config: Config) -> Kind:
    """Qwen4-Exp: a key per group of tokens."""
    return Latent(config.count("indexer_head_dim"), "bfloat16", tokens_per_state=config.count("indexer_compress_ratio"))


def group_ring(config: Config) -> Kind:
    """Qwen4-Exp: keys of the open group. In a multimodal model positions of several axes stand behind them; of a text model's own file
    vLLM takes them out (`model_executor/models/config.py:890`).
    """
    group, channels = config.count("indexer_compress_ratio"), config.count("indexer_head_dim")
    if config.outer is not None and config.part("rope_parameters").has("mrope_section"):
        channels = -(-channels // 4) * 4 + POSITION_CHANNELS
    return Ring(group, channels, "bfloat16", ("partial",), lap_entries=group)


def position_conv(config: Config) -> Kind:
    """Qwen4-Exp: `ple_conv_kernel_size` taps, each `ngram_size` tokens apart, of `hc_count` streams, whole on every rank."""
    taps = (config.count("ple_conv_kernel_size", 4) - 1) * config.count("ngram_size", 3)
    channels = config.count("hidden_size") * config.count("hc_count", 4)
    return ShortConv(channels, taps + 1, config.dtype(), is_replicated=True)


def mamba2(
    heads: Source,
    head_size: Source,
    groups: Source,
    state_size: Source,
    conv: Source,
    *,
    recurrent: tuple[str, str] | None = None,
) -> Callable[[Config], Kind]:
    """`recurrent`: the field with the dtype of the recurrent part, and its default; None for the model's."""

    def kind(config: Config) -> Kind:
        number, dtype = config.number, config.dtype()
        recurrent_dtype = config.state_dtype(*recurrent) if recurrent else dtype
        return Mamba2(
            number(heads), number(head_size), number(groups), number(state_size), number(conv), dtype, recurrent_dtype
        )

    return kind


def mamba1(channels: Source, state_size: Source, conv: Source) -> Callable[[Config], Kind]:
    """All of it in the model's dtype."""

    def kind(config: Config) -> Kind:
        number, dtype = config.number, config.dtype()
        return Mamba1(number(channels), number(state_size), number(conv), dtype, dtype)

    return kind


def gated_delta(config: Config) -> Kind:
    """Gated delta attention, by the fields that Qwen's files have for it."""
    return GatedDelta(
        config.count("linear_num_key_heads"),
        config.count("linear_num_value_heads"),
        config.count("linear_key_head_dim"),
        config.count("linear_value_head_dim"),
        config.count("linear_conv_kernel_dim"),
        config.dtype(),
        config.state_dtype("mamba_ssm_dtype", config.dtype()),
    )


def kda(heads: Source, width: Source, conv: Source) -> Callable[[Config], Kind]:
    """Delta attention with as many key as value heads, recurrent in float32 (vLLM 0.32 `kda_state_dtype`)."""

    def kind(config: Config) -> Kind:
        number, size, taps = (config.number(source) for source in (heads, width, conv))
        return GatedDelta(number, number, size, size, taps, config.dtype(), "float32")

    return kind


def linear_state(config: Config) -> Kind:
    """Linear attention of the query heads."""
    return LinearState(config.count("num_attention_heads"), config.head_size(), config.dtype())


def short_conv(channels: Source) -> Callable[[Config], Kind]:
    """LFM2's convolution."""
    return lambda config: ShortConv(config.number(channels), config.count("conv_L_cache"), config.dtype())


def attention_first(_config: Config, layers: Sequence[ModelLayer]) -> Sequence[ModelLayer]:
    """All attention is registered before all states."""
    return sorted(layers, key=lambda layer: layer.kind.is_state)


def with_loops(config: Config, layers: Sequence[ModelLayer]) -> Sequence[ModelLayer]:
    """All layers run `loop_num` times; each time but the first they keep a window of their own."""
    again = [
        attention(f"loop.{loop}", window=tokens("loop_window_size")) for loop in range(1, config.count("loop_num"))
    ]
    return [
        one
        for layer in layers
        for one in (layer, *(loop(config, f"layers.{layer.index}", layer.index) for loop in again))
    ]


USUAL: Mapping[str, CacheRule] = {
    "full": attention(),
    "window": attention(window=tokens("sliding_window")),
    "latent": latent(),
    "indexer": fixed("indexer", scaled_keys),
}
