"""Rules that make one cache of a decoder layer from the fields of a file: the meaning of the words in `layers`.

`USUAL` has the words of all families: `full`, `window`, `latent`, `indexer`. Rows of `families` make the others with `attention`, `latent`,
`fixed`, `ring` and `state` from the fields that hold their sizes. Behind them are the sizes that a family's class computes from other fields,
which rows name in `sets` and as sizes of a state, and changes of the fields before and of the caches after, for `prepare` and `arrange`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvreshard.catalog.config import PER_LAYER, Config, Source
from kvreshard.catalog.family import CacheRule
from kvreshard.catalog.layer_rules import with_pattern
from kvreshard.catalog.layers import PACKED, ModelLayer, in_cache_dtypes
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, Ring, ShortConv, indexer

# vLLM 0.32 `mla/indexer.py`: fp8 keys, one float32 scale for each 128 of them.
SCALED_CHANNELS = 128
# `mla/flashmla_sparse.py`: 512 e4m3, 4 float32 scales, 64 bfloat16 of 576 channels.
PACKED_CHANNELS, PACKED_ROW_BYTES = 576, 656
# Pools of a kernel block (`v1/attention/backends/mla/indexer.py`).
GLM_KERNEL_POOLS = 64
# A bfloat16 row with three positions of 64 bits behind it (`QSAKeyStateCache`).
POSITION_CHANNELS = 12
# The hidden size of the Falcon file that had the newer architecture before there was a field for that.
NEWER_HIDDEN_SIZE = 8192

WindowRule = Callable[[Config, int], int | None]
"""Config and number of a layer -> tokens of its window."""
Heads = tuple[int, int, int | None]
"""KV heads, channels of K, channels of V (None: as many)."""
HeadRule = Callable[[Config, int], Heads]
"""Config and number of a layer -> its heads."""
DtypeRule = Callable[[Config], str]


def no_window(_config: Config, _index: int) -> int | None:
    """All tokens, whatever `sliding_window` is."""
    return None


def unwindowed(config: Config, _index: int) -> int | None:
    """All tokens; a file with a window is refused."""
    config.must_be("sliding_window")
    return None


def tokens(source: Source) -> WindowRule:
    """As many tokens as a field has."""
    return lambda config, _index: config.number(source)


def plain_window(config: Config, _index: int) -> int | None:
    """`sliding_window`. A file that says null has none, and in vLLM 0.32 all layers are full; nor has one that says 0 (`config/model.py:806`)."""
    is_null = "sliding_window" in config.fields and not config.has("sliding_window")
    return None if is_null else config.count("sliding_window")


def cohere_window(config: Config, _index: int) -> int | None:
    """A token sees `sliding_window` tokens beside itself."""
    if not config.has("sliding_window"):
        raise config.error(
            "sliding_window", "is null or 0", "vLLM's class needs a number; give the tokens of the window"
        )
    return config.count("sliding_window") + 1


def listed_tokens(field: str) -> WindowRule:
    """What the field lists for the layer."""
    return lambda config, index: int(config.fields[field][index])


def chunk(config: Config, _index: int) -> int | None:
    """Tokens of a chunk, at most which are kept; a file without chunks has full layers."""
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


def attention(
    name: str = "attn",
    window: WindowRule = no_window,
    heads: HeadRule = usual_heads,
    family: str = "window",
    *,
    ignores_fp8: bool = False,
) -> CacheRule:
    """K and V, of all tokens or of a window, which `family` names. `ignores_fp8`: as in `ModelLayer`."""

    def cache(config: Config, layer: str, index: int) -> ModelLayer:
        window_tokens = window(config, index)
        number, size, size_v = heads(config, index)
        own = Attention(number, size, config.dtype(), None if size_v == size else size_v, window_tokens)
        found = in_cache_dtypes(f"{layer}.{name}", index, own, "full" if window_tokens is None else family)
        return replace(found, ignores_fp8=ignores_fp8)

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
    """Step-3.5: the usual fields, replaced by those in `attention_other_setting`."""
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
        packed = {PACKED: Latent(channels, "uint8", PACKED, PACKED_ROW_BYTES)} if has_packed else {}
        return in_cache_dtypes(f"{layer}.{name}", index, Latent(channels, config.dtype()), "latent", packed)

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
    """A cache that has one kind, whatever dtype the engine has."""
    return lambda config, layer, index: ModelLayer(f"{layer}.{name}", index, kind(config), family)


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
    """An indexer's key per token, in bfloat16 whatever the dtype of the cache."""
    return lambda config: Latent(config.number(source), "bfloat16")


def group_keys(config: Config) -> Kind:
    """Qwen4-Exp: a key per group of tokens."""
    return Latent(config.count("indexer_head_dim"), "bfloat16", tokens_per_state=config.count("indexer_compress_ratio"))


def group_ring(config: Config) -> Kind:
    """Qwen4-Exp: keys of the open group. In a multimodal model positions of several axes stand behind them; vLLM removes those from a text
    model's own file (`model_executor/models/config.py:890`).
    """
    group, channels = config.count("indexer_compress_ratio"), config.count("indexer_head_dim")
    if config.outer is not None and config.part("rope_parameters").has("mrope_section"):
        channels = -(-channels // 4) * 4 + POSITION_CHANNELS
    return Ring(group, channels, "bfloat16", ("partial",), lap_entries=group)


def state(name: str, kind: Callable[..., Kind], *sizes: Source, recurrent: DtypeRule | None = None) -> CacheRule:
    """A state per request: its kind with these sizes, in the model's dtype. `recurrent`: the dtype of a second, recurrent part
    (vLLM 0.32 `mamba_utils.py`).
    """

    def own(config: Config) -> Kind:
        dtypes = [config.dtype(), *([] if recurrent is None else [recurrent(config)])]
        return kind(*[config.number(size) for size in sizes], *dtypes)

    return fixed(name, own, "state")


def saved_dtype(field: str, default: str | None = None) -> DtypeRule:
    """The dtype in a field; `auto` and an absent field are the default, None for the model's."""
    return lambda config: config.state_dtype(field, default or config.dtype())


def kda(name: str, heads: Source, width: Source, conv: Source) -> CacheRule:
    """Delta attention with as many key as value heads, recurrent in float32 (vLLM 0.32 `kda_state_dtype`)."""
    return state(name, GatedDelta, heads, heads, width, width, conv, recurrent=lambda _config: "float32")


gated_delta = state(
    "delta", GatedDelta, "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim", recurrent=saved_dtype("mamba_ssm_dtype"),
)  # fmt: skip
"""Gated delta attention, by the fields of Qwen's files."""
position_conv = state(
    "ple",
    partial(ShortConv, is_replicated=True),
    lambda config: config.count("hidden_size") * config.count("hc_count", 4),
    lambda config: (config.count("ple_conv_kernel_size", 4) - 1) * config.count("ngram_size", 3) + 1,
)
"""Qwen4-Exp: `ple_conv_kernel_size` taps, each `ngram_size` tokens apart, of `hc_count` streams, whole on every rank."""


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
    "window": attention(window=plain_window),
    "latent": latent(),
    "indexer": fixed("indexer", scaled_keys),
}


def minicpm3_head_size(config: Config) -> int:
    """Channels of K as they come out of the latent."""
    return config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim")


def deepseek_head_size(config: Config) -> int:
    """As wide as in vLLM's `DeepseekAttention`, which ignores `head_dim`."""
    return config.count("hidden_size") // config.count("num_attention_heads")


def falcon_kv_heads(config: Config) -> int:
    """`num_kv_heads` in the newer architecture, else one, or one per query head. The oldest files have no field for the architecture."""
    is_newer = config.flag("new_decoder_architecture", False)
    if config.model_type != "falcon":
        is_newer = is_newer or config.count("hidden_size") == NEWER_HIDDEN_SIZE
    num_heads = config.count("num_attention_heads")
    shared = 1 if config.flag("multi_query", True) else num_heads
    return config.count("num_kv_heads", num_heads) if is_newer else shared


def bigcode_kv_heads(config: Config) -> int:
    """All query heads share one K and V unless `multi_query` is false."""
    return 1 if config.flag("multi_query", True) else config.count("num_attention_heads")


def chatglm_kv_heads(config: Config) -> int:
    """Groups of query heads share K and V with `multi_query_attention`."""
    is_shared = config.flag("multi_query_attention", False)
    return config.count("multi_query_group_num" if is_shared else "num_attention_heads")


def step1_kv_heads(config: Config) -> int:
    """One per group of query heads. In vLLM the presence of a name decides, even with null as its value."""
    return config.count("num_attention_groups" if "num_attention_groups" in config.fields else "num_key_value_heads", 1)


def zamba2_head_size(config: Config) -> int:
    """Attention over the hidden states and the embeddings."""
    default = 2 * config.count("hidden_size") // config.count("num_attention_heads")
    return config.count("attention_head_dim", default)


def zamba2_ssm_head_size(config: Config) -> int:
    """`mamba_headdim`, else the inner size over the heads."""
    inner = config.count("mamba_expand") * config.count("hidden_size")
    return config.count("mamba_headdim", inner // config.count("n_mamba_heads"))


def hidden_times(factor: str, *, unless: str | None = None) -> Callable[[Config], int]:
    """The inner size of a state: the field `unless`, else the hidden size times a factor."""

    def size(config: Config) -> int:
        if unless is not None and config.has(unless):
            return config.count(unless)
        return config.count(factor) * config.count("hidden_size")

    return size


def ssm_head_size(inner_size: Callable[[Config], int]) -> Callable[[Config], int]:
    """`mamba_d_head`; `auto` is the inner size over the heads, and any other must agree with it."""

    def size(config: Config) -> int:
        inner, heads = inner_size(config), config.count("mamba_n_heads")
        width = inner // heads if config.fields.get("mamba_d_head") == "auto" else config.count("mamba_d_head")
        if heads * width != inner:
            fact = f"is {width} for {heads} heads, but the inner size is {inner}"
            raise config.error("mamba_d_head", fact, "their product must be it")
        return width

    return size


def nemotron_blocks(config: Config) -> Config:
    """Layers of one block each, as many as are listed. Older files repeat the width as `attention_head_dim`, which transformers does not read."""
    listing = with_pattern(config, "hybrid_override_pattern", "layers_block_type")
    blocks = listing.fields.get("layers_block_type")
    number = len(blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else 0
    config.must_be("attention_head_dim", config.head_size())
    return listing.with_fields(num_hidden_layers=config.count("num_hidden_layers", number or None))


def refuse_listening(config: Config) -> Config:
    """Voxtral's encoder of sound attends to earlier sound, so it has caches that the text part does not mention."""
    raise config.error(
        "model_type",
        f"is '{config.model_type}', whose encoder of sound keeps caches beside the language model's",
        "these are not described; ask an engine that runs for its layout (`kvreshard doctor --peer`)",
    )
