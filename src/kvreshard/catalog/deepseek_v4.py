"""The caches of DeepSeek-V4 and V4.1: windows of latents, and latents that were compressed.

| model types | caches of a layer, in order | source (vLLM 0.32) |
|---|---|---|
| `deepseek_v4` | a window; with ratio 4 or 128 also compressed latents and the window of their compressor; with 4 before all that the indexer's keys and their compressor's window | `models/deepseek_v4/attention.py`, `compressor.py` |
| `deepseek_v41` | in layers of `kv_source_layer_ids` latents of every token or of every second one, an indexer's keys for as many where `index_source_layer_ids` has the layer too; a window; for every second one also the ring of the open pair. The layers behind read these | `models/deepseek_v41/attention.py`, `compressor.py` |

A compressor keeps, per token and until it is compressed, values and scores in float32, with ratio 4 twice: of the previous and the own group.
The packed form of a latent is vLLM's default. Every form has its own alignment of pages, of all caches alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvreshard.catalog.caches import index_row
from kvreshard.catalog.config import Config
from kvreshard.catalog.family import CacheRule
from kvreshard.catalog.layers import PACKED, PACKED_FP4, PACKED_V4, ModelLayer
from kvreshard.kinds import Kind, Latent, Ring, ScaledRows, indexer

# Pages start at multiples of one packed row, or of half a bfloat16 row.
PACKED_ALIGNMENT_BYTES, PLAIN_ALIGNMENT_BYTES = 576, 512
V4_PAGE_TOKENS, V4_WINDOW_PAGE_TOKENS = 256, 64
# Compression ratio: (tokens of a compressor page, tokens that the compressor looks back, entries per token).
V4_COMPRESSORS = {4: (4, 8, 2), 128: (8, 128, 1)}
V4_LAYERS: Mapping[int, str] = {
    0: "window", 1: "window", 4: "keys keys_compressor window latent_4 compressor_4", 128: "window latent_128 compressor_128",
}  # fmt: skip
V4_SCALED_CHANNELS, V4_SCALE_BYTES = 64, 8
V41_PAGE_TOKENS, V41_WINDOW_PAGE_TOKENS = 128, 32
# Cache dtypes of V4.1 -> (record of windows, of compressed latents, alignment of pages). A record is values, scales, what they are. FlashMLA
# decodes the new records on SM100 only; elsewhere vLLM writes V4's, and calls both `fp8_ds_mla`.
MXFP8, NVFP4 = (512, 16, "mxfp8/scale-per-32"), (256, 32, "nvfp4/scale-per-16")
V4_RECORD = (576, V4_SCALE_BYTES, PACKED)
V41_RECORDS = {
    PACKED: (MXFP8, MXFP8, PLAIN_ALIGNMENT_BYTES),
    PACKED_FP4: (MXFP8, NVFP4, PLAIN_ALIGNMENT_BYTES),
    PACKED_V4: (V4_RECORD, V4_RECORD, PACKED_ALIGNMENT_BYTES),
}
# Values and scores of the rows that the next step needs, before drafts; a ring has at least eight (`compressor.py:154`).
V41_RING = Ring(2, 2 * MXFP8[0], "float32", ("partial",), is_doubled=True, min_entries=8)
# Layers that draft (DSpark, its only own method) where the file does not say how many (`nvidia/dspark.py:89`).
V41_DRAFTING = 3


def v4_layers(config: Config, num_layers: int) -> Sequence[str]:
    """By `compress_ratios`, which may also have those of the layers that predict."""
    num_predicting = config.count("num_nextn_predict_layers", 0, at_least=0)
    ratios = config.numbers("compress_ratios", num_layers, spare=num_predicting)
    for index, ratio in enumerate(ratios):
        if ratio not in V4_LAYERS:
            raise config.error(f"compress_ratios[{index}]", f"is {ratio}", "known are 0, 1, 4 and 128")
    return [V4_LAYERS[ratio] for ratio in ratios]


def _v4_cache(
    name: str, index: int, family: str, packed: Kind, plain: Kind, page_tokens: int | None = None
) -> ModelLayer:
    kinds: dict[str, Kind] = {
        PACKED: _aligned(packed, PACKED_ALIGNMENT_BYTES),
        "bfloat16": _aligned(plain, PLAIN_ALIGNMENT_BYTES),
    }
    return ModelLayer(name, index, kinds[PACKED], family, kinds, page_tokens=page_tokens)


def _aligned(kind: Kind, alignment: int) -> Kind:
    return replace(kind, page_alignment_bytes=alignment) if isinstance(kind, Latent | ScaledRows) else kind


def v4_keys(config: Config, layer: str, index: int) -> ModelLayer:
    """An indexer's keys, one per four tokens."""
    keys = indexer(*index_row(config), tokens_per_state=4, kernel_tokens=V4_PAGE_TOKENS)
    return _v4_cache(f"{layer}.indexer", index, "latent", keys, keys)


def v4_latent(ratio: int) -> CacheRule:
    """Latents of so many tokens each, packed or as plain rows of bfloat16."""

    def cache(config: Config, layer: str, index: int) -> ModelLayer:
        packed, plain = _v4_rows(config, ratio, V4_PAGE_TOKENS, None)
        return _v4_cache(f"{layer}.attn", index, "latent", packed, plain)

    return cache


def v4_window(config: Config, layer: str, index: int) -> ModelLayer:
    """The latents of the last tokens."""
    packed, plain = _v4_rows(config, 1, V4_WINDOW_PAGE_TOKENS, config.count("sliding_window"))
    return _v4_cache(f"{layer}.window", index, "window", packed, plain, V4_WINDOW_PAGE_TOKENS)


def _v4_rows(config: Config, ratio: int, kernel_tokens: int, window: int | None) -> tuple[Kind, Kind]:
    channels, rotated = config.count("head_dim"), config.count("qk_rope_head_dim")
    if channels - rotated != 7 * V4_SCALED_CHANNELS:
        raise config.error(
            "head_dim", f"is {channels}, of which {rotated} rotated", "packed rows are known for 512 and 64 only"
        )
    row = channels - rotated + 2 * rotated, V4_SCALE_BYTES, PACKED
    return _rows(row, ratio, window, kernel_tokens), Latent(
        channels, "bfloat16", tokens_per_state=ratio, window_tokens=window
    )


def _rows(record: tuple[int, int, str], ratio: int, window: int | None, kernel_tokens: int, alignment: int = 1) -> Kind:
    names = "latent", "latent_scale"
    return ScaledRows(*record, *names, ratio, window, kernel_tokens=kernel_tokens, page_alignment_bytes=alignment)


def v4_compressor(name: str, ratio: int, channels: str) -> CacheRule:
    """The last tokens, not yet compressed."""
    page_tokens, window_tokens, entries = V4_COMPRESSORS[ratio]

    def cache(config: Config, layer: str, index: int) -> ModelLayer:
        partial = Latent(2 * entries * config.count(channels), "float32", window_tokens=window_tokens, name="partial")
        return _v4_cache(f"{layer}.{name}", index, "compressor", partial, partial, page_tokens)

    return cache


V4_CACHES: Mapping[str, CacheRule] = {
    "keys": v4_keys,
    "keys_compressor": v4_compressor("indexer_compressor", 4, "index_head_dim"),
    "window": v4_window,
    **{f"latent_{ratio}": v4_latent(ratio) for ratio in V4_COMPRESSORS},
    **{f"compressor_{ratio}": v4_compressor("compressor", ratio, "head_dim") for ratio in V4_COMPRESSORS},
}


def v41_layers(config: Config, num_layers: int) -> Sequence[str]:
    """By `compress_ratios`, which may also have those of the layers that draft."""
    ratios = config.numbers("compress_ratios", num_layers, spare=len(v41_drafting(config, ())))
    sources = config.positions("kv_source_layer_ids", num_layers, first=0)
    indexed = config.positions("index_source_layer_ids", num_layers, first=0)
    if (config.count("head_dim"), config.count("qk_rope_head_dim")) != (MXFP8[0], V4_SCALED_CHANNELS):
        raise config.error("head_dim", f"is {config.count('head_dim')}", "rows are known for 512, of which 64 rotated")
    layers = []
    for index, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            raise config.error(f"compress_ratios[{index}]", f"is {ratio}", "known are 0, 1 and 2")
        is_source = index in sources and ratio > 0
        keys = f" keys_{ratio}" if index in indexed else ""
        words = f"latent_{ratio}{keys} window" if is_source else "window"
        layers.append(f"{words} compressor" if is_source and ratio > 1 else words)
    return layers


def v41_drafting(config: Config, _layers: Sequence[str]) -> Sequence[str]:
    """A window each."""
    fields = ("n_mtp_layers", "num_nextn_predict_layers")
    number = next(filter(None, (config.count(field, 0, at_least=0) for field in fields)), V41_DRAFTING)
    return ["window"] * number


def v41_latent(ratio: int) -> CacheRule:
    """Latents of so many tokens each."""

    def cache(_config: Config, layer: str, index: int) -> ModelLayer:
        return _v41_cache(f"{layer}.attn", index, "latent", ratio, None)

    return cache


def v41_window(config: Config, layer: str, index: int) -> ModelLayer:
    """The latents of the last tokens. A kernel block is a page."""
    return _v41_cache(f"{layer}.window", index, "window", 1, config.count("sliding_window"))


def _v41_cache(name: str, index: int, family: str, ratio: int, window: int | None) -> ModelLayer:
    kernel_tokens = V41_PAGE_TOKENS if window is None else V41_WINDOW_PAGE_TOKENS
    kinds = {
        dtype: _rows(compressed if window is None else recent, ratio, window, kernel_tokens, alignment)
        for dtype, (recent, compressed, alignment) in V41_RECORDS.items()
    }
    kinds["bfloat16"] = Latent(
        MXFP8[0], "bfloat16", tokens_per_state=ratio, window_tokens=window, page_alignment_bytes=PLAIN_ALIGNMENT_BYTES
    )
    page_tokens = None if window is None else V41_WINDOW_PAGE_TOKENS
    return ModelLayer(name, index, kinds[PACKED], family, kinds, page_tokens=page_tokens)


def v41_keys(ratio: int) -> CacheRule:
    """An indexer's keys, one per so many tokens."""

    def cache(config: Config, layer: str, index: int) -> ModelLayer:
        keys = indexer(*index_row(config), tokens_per_state=ratio, kernel_tokens=V41_PAGE_TOKENS)
        alignments = {dtype: alignment for dtype, (_, _, alignment) in V41_RECORDS.items()}
        alignments["bfloat16"] = PLAIN_ALIGNMENT_BYTES
        kinds: dict[str, Kind] = {
            dtype: replace(keys, page_alignment_bytes=alignment) for dtype, alignment in alignments.items()
        }
        return ModelLayer(f"{layer}.indexer", index, kinds[PACKED], "latent", kinds)

    return cache


V41_CACHES: Mapping[str, CacheRule] = {
    "window": v41_window,
    "compressor": lambda _config, layer, index: ModelLayer(f"{layer}.compressor", index, V41_RING, "ring"),
    **{f"latent_{ratio}": v41_latent(ratio) for ratio in (1, 2)},
    **{f"keys_{ratio}": v41_keys(ratio) for ratio in (1, 2)},
}
