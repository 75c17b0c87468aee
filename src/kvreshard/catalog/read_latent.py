"""Models with multi-head latent attention: what does each layer cache besides its latent?

| model types | caches of a layer | source |
|---|---|---|
| `deepseek_v2`, `deepseek_v3`, `kimi_k2`, `glm4_moe_lite`, `axk1`, `pangu_ultra_moe`, `sarvam_mla` | a latent of `kv_lora_rank + qk_rope_head_dim`; in DeepSeek's own K and V if `qk_nope_head_dim` and `qk_rope_head_dim` are 0 | vLLM 0.32 `deepseek_v2.py`, `glm4_moe_lite.py`, `AXK1.py`, `openpangu.py`, `sarvam.py` |
| `longcat_flash` | two such latents | vLLM 0.32 `longcat_flash.py` |
| `deepseek_v32`, `glm_moe_dsa` | its indexer's keys, then the latent; a layer that uses another's choice has no indexer | vLLM 0.32 `deepseek_v32/attention.py` |
| `deepseek_v4` | by `compress_ratios`, see `read_deepseek_v4` | `models/deepseek_v4/attention.py`, `compressor.py` |
| `deepseek_v41` | by `compress_ratios` and `kv_source_layer_ids`, see `read_deepseek_v41` | `models/deepseek_v41/attention.py`, `compressor.py` |

`num_nextn_predict_layers` more layers predict tokens; they cache only while the engine speculates. Refused: shared indexers in a
field that vLLM does not read for the family, where what it reads says otherwise, compression ratios that are not 0, 1, 4 or 128, in V4.1 not 0, 1 or 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvreshard.catalog.config import Config
from kvreshard.catalog.layers import (
    PACKED,
    PACKED_FP4,
    PACKED_V4,
    Model,
    ModelLayer,
    attention_layer,
    latent_layer,
    predicting,
)
from kvreshard.kinds import Kind, Latent, Ring, ScaledRows, indexer

# vLLM 0.32 `mla/indexer.py`: fp8 keys, one float32 scale for each 128 of them.
SCALED_CHANNELS = 128
# `mla/flashmla_sparse.py`: 512 e4m3, 4 float32 scales, 64 bfloat16 of 576 channels.
PACKED_CHANNELS, PACKED_ROW_BYTES = 576, 656
# V4: pages start at multiples of one packed row, or of half a bfloat16 row.
PACKED_ALIGNMENT_BYTES, PLAIN_ALIGNMENT_BYTES = 576, 512
V4_PAGE_TOKENS, V4_WINDOW_PAGE_TOKENS = 256, 64
# Compression ratio: (tokens of a compressor page, tokens that the compressor looks back, entries per token).
V4_COMPRESSORS = {4: (4, 8, 2), 128: (8, 128, 1)}
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
# Rows of values and scores that the next step needs, before drafts; a ring has at least eight (`compressor.py:154`).
V41_RING_ROWS, V41_MIN_RING_ROWS = 2, 8
# Layers that draft (DSpark, its only own method) where the file does not say how many (`nvidia/dspark.py:89`).
V41_DRAFTING = 3


def read_latent(config: Config) -> Model:
    """One latent per token and layer."""
    return _alike(config, latent)


def read_deepseek(config: Config) -> Model:
    """The same, but K and V where no part of a head is for latents (DeepSeek-OCR)."""
    is_plain = all(config.fields.get(name) == 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return _alike(config, _plain if is_plain else latent)


def _alike(config: Config, layer: Callable[[Config, str, int], ModelLayer]) -> Model:
    """Layers that are all the same, those that predict too."""
    num_layers = config.count("num_hidden_layers")
    layers = [layer(config, f"layers.{index}.attn", index) for index in range(num_layers)]
    for index in range(config.count("num_nextn_predict_layers", 0, at_least=0)):
        layers.append(predicting(layer(config, f"mtp.{index}.attn", num_layers)))
    return finish(config, num_layers, layers, 16)


def _plain(config: Config, name: str, index: int) -> ModelLayer:
    """K and V as wide as `DeepseekAttention` has them, which does not look at `head_dim`."""
    config.must_be("sliding_window")
    width = config.count("hidden_size") // config.count("num_attention_heads")
    return attention_layer(name, index, num_kv_heads=config.num_kv_heads(), head_size=width, dtype=config.dtype())


def read_longcat(config: Config) -> Model:
    """`num_layers` layers, each with two attentions; a prediction layer has one."""
    num_layers = config.renamed({"num_hidden_layers": "num_layers"}).count("num_hidden_layers")
    layers = [
        latent(config, f"layers.{index}.attn.{number}", index) for index in range(num_layers) for number in range(2)
    ]
    for index in range(config.count("num_nextn_predict_layers", 0, at_least=0)):
        layers.append(predicting(latent(config, f"mtp.{index}.attn", num_layers)))
    return finish(config, num_layers, layers, 16)


def read_sparse(config: Config) -> Model:
    """A latent and an indexer key per token and layer; the indexer is registered first. Its kernel blocks are of 64."""
    num_layers = config.count("num_hidden_layers")
    is_shared = _shared_indexers(config, num_layers)
    layers = []
    for index in range(num_layers):
        layers += sparse_latent(config, f"layers.{index}", index)[is_shared[index] :]
    for index in range(config.count("num_nextn_predict_layers", 0, at_least=0)):
        layers += [predicting(layer) for layer in sparse_latent(config, f"mtp.{index}", num_layers)]
    return finish(config, num_layers, layers, 64)


def _shared_indexers(config: Config, num_layers: int) -> list[bool]:
    """Which layers use what an earlier one has chosen. vLLM does not ask `indexer_types`; what it asks must agree with them."""
    if not config.has("indexer_types"):
        return _scheduled(config, num_layers)
    known = {"full": "full", "shared": "shared"}
    listed = [entry == "shared" for entry in config.entries("indexer_types", num_layers, known)]
    scheduled = _scheduled(config, num_layers)
    for index, (one, other) in enumerate(zip(listed, scheduled, strict=True)):
        if one != other:
            has_pattern = config.has("index_topk_pattern")
            by = "index_topk_pattern" if has_pattern else "index_topk_freq and index_skip_topk_offset"
            word, opposite = ("shared", "full") if one else ("full", "shared")
            raise config.error(
                f"indexer_types[{index}]",
                f"is '{word}', but by {by}, which vLLM goes by, the layer is '{opposite}'",
                "make them agree in a copy of the file",
            )
    return listed


def _scheduled(config: Config, num_layers: int) -> list[bool]:
    """`S` in a pattern of letters, or all but every `index_topk_freq`th (`deepseek_v32/attention.py:166`)."""
    if config.has("index_topk_pattern"):
        pattern = config.text("index_topk_pattern")
        return [pattern[index : index + 1] == "S" for index in range(num_layers)]
    every, first = config.count("index_topk_freq", 1), config.count("index_skip_topk_offset", 2, at_least=0)
    return [max(index - first + 1, 0) % every != 0 for index in range(num_layers)]


def sparse_latent(config: Config, layer: str, index: int) -> list[ModelLayer]:
    """The indexer's keys and the latent of one layer."""
    keys = ModelLayer(f"{layer}.indexer", index, indexer(*index_row(config)), "latent")
    return [keys, latent(config, f"{layer}.attn", index)]


def index_row(config: Config) -> tuple[int, int]:
    """Bytes of an indexer's key, and of its scales."""
    channels = config.count("index_head_dim")
    if channels % SCALED_CHANNELS:
        raise config.error(
            "index_head_dim", f"is {channels}", f"scales belong to {SCALED_CHANNELS} channels each; give a multiple"
        )
    return channels, channels // SCALED_CHANNELS * 4


def latent(config: Config, name: str, index: int) -> ModelLayer:
    """The latent of one layer."""
    channels = config.count("kv_lora_rank") + config.count("qk_rope_head_dim")
    packed = None
    if channels == PACKED_CHANNELS:
        packed = Latent(channels, "uint8", PACKED, PACKED_ROW_BYTES)
    return latent_layer(name, index, channels=channels, dtype=config.dtype(), packed=packed)


def read_deepseek_v4(config: Config) -> Model:
    """Every layer keeps a window of latents; ratio 4 or 128 adds compressed latents and their compressor's window.

    Ratio 4 also has an indexer over the compressed latents, with a compressor of its own. A compressor keeps, per token
    and until it is compressed, values and scores in float32 (twice with ratio 4: previous and own group).
    """
    num_layers = config.count("num_hidden_layers")
    num_predicting = config.count("num_nextn_predict_layers", 0, at_least=0)
    ratios = config.numbers("compress_ratios", num_layers, spare=num_predicting)
    layers: list[ModelLayer] = []
    for index, ratio in enumerate(ratios):
        if ratio not in (0, 1, *V4_COMPRESSORS):
            raise config.error(f"compress_ratios[{index}]", f"is {ratio}", "known are 0, 1, 4 and 128")
        layers += _v4_layer(config, f"layers.{index}", index, ratio)
    for index in range(num_predicting):
        layers += [predicting(layer) for layer in _v4_layer(config, f"mtp.{index}", num_layers, 0)]
    model = finish(config, num_layers, layers, V4_PAGE_TOKENS)
    return replace(model, default_order="BLHNC")


def _v4_layer(config: Config, layer: str, index: int, ratio: int) -> list[ModelLayer]:
    window_tokens = config.count("sliding_window")
    caches: list[ModelLayer] = []
    if ratio == 4:
        keys = replace(indexer(*index_row(config), tokens_per_state=ratio), kernel_tokens=V4_PAGE_TOKENS)
        caches.append(_v4_cache(f"{layer}.indexer", index, "latent", keys, keys))
        caches.append(_v4_compressor(f"{layer}.indexer_compressor", index, ratio, config.count("index_head_dim")))
    window = _v4_cache(f"{layer}.window", index, "window", *_v4_rows(config, 1, V4_WINDOW_PAGE_TOKENS, window_tokens))
    caches.append(replace(window, page_tokens=V4_WINDOW_PAGE_TOKENS))
    if ratio in V4_COMPRESSORS:
        caches.append(_v4_cache(f"{layer}.attn", index, "latent", *_v4_rows(config, ratio, V4_PAGE_TOKENS, None)))
        caches.append(_v4_compressor(f"{layer}.compressor", index, ratio, config.count("head_dim")))
    return caches


def _v4_rows(config: Config, ratio: int, kernel_tokens: int, window: int | None) -> tuple[ScaledRows, Latent]:
    """Latents packed, and as plain rows of bfloat16."""
    channels, rotated = config.count("head_dim"), config.count("qk_rope_head_dim")
    if channels - rotated != 7 * V4_SCALED_CHANNELS:
        raise config.error(
            "head_dim", f"is {channels}, of which {rotated} rotated", "packed rows are known for 512 and 64 only"
        )
    row_bytes = (channels - rotated) + 2 * rotated
    packed = ScaledRows(
        row_bytes, V4_SCALE_BYTES, PACKED, "latent", "latent_scale", ratio, window, kernel_tokens=kernel_tokens
    )
    return packed, Latent(channels, "bfloat16", tokens_per_state=ratio, window_tokens=window)


def _v4_compressor(name: str, index: int, ratio: int, channels: int) -> ModelLayer:
    page_tokens, window_tokens, entries = V4_COMPRESSORS[ratio]
    partial = Latent(2 * entries * channels, "float32", window_tokens=window_tokens, name="partial")
    return replace(_v4_cache(name, index, "compressor", partial, partial), page_tokens=page_tokens)


def _v4_cache(
    name: str, index: int, family: str, packed: ScaledRows | Latent, plain: ScaledRows | Latent
) -> ModelLayer:
    """vLLM's default for V4 is the packed form; each form has its own alignment of pages, of all caches alike."""
    kinds: dict[str, Kind] = {
        PACKED: replace(packed, page_alignment_bytes=PACKED_ALIGNMENT_BYTES),
        "bfloat16": replace(plain, page_alignment_bytes=PLAIN_ALIGNMENT_BYTES),
    }
    return ModelLayer(name, index, kinds[PACKED], family, kinds)


def read_deepseek_v41(config: Config) -> Model:
    """Every layer keeps a window of latents. Those of `kv_source_layer_ids` also keep latents of all tokens, or of every second one with
    the ring of the open pair, and an indexer's keys for as many; the layers behind them read these.
    """
    num_layers = config.count("num_hidden_layers")
    fields = ("n_mtp_layers", "num_nextn_predict_layers")
    num_predicting = next(filter(None, (config.count(field, 0, at_least=0) for field in fields)), V41_DRAFTING)
    ratios = config.numbers("compress_ratios", num_layers, spare=num_predicting)
    sources = config.positions("kv_source_layer_ids", num_layers, first=0)
    indexed = config.positions("index_source_layer_ids", num_layers, first=0)
    if (config.count("head_dim"), config.count("qk_rope_head_dim")) != (MXFP8[0], V4_SCALED_CHANNELS):
        raise config.error("head_dim", f"is {config.count('head_dim')}", "rows are known for 512, of which 64 rotated")
    layers: list[ModelLayer] = []
    for index, ratio in enumerate(ratios):
        if ratio not in (0, 1, 2):
            raise config.error(f"compress_ratios[{index}]", f"is {ratio}", "known are 0, 1 and 2")
        name, is_source = f"layers.{index}", index in sources and ratio > 0
        if is_source:
            layers.append(_v41_latents(f"{name}.attn", index, ratio))
        if is_source and index in indexed:
            layers.append(_v41_keys(config, f"{name}.indexer", index, ratio))
        layers.append(_v41_window(config, f"{name}.window", index))
        if is_source and ratio > 1:
            ring = Ring(
                V41_RING_ROWS, 2 * MXFP8[0], "float32", ("partial",), is_doubled=True, min_entries=V41_MIN_RING_ROWS
            )
            layers.append(ModelLayer(f"{name}.compressor", index, ring, "ring"))
    for index in range(num_predicting):
        layers.append(predicting(_v41_window(config, f"mtp.{index}.window", num_layers)))
    return finish(config, num_layers, layers, V41_PAGE_TOKENS, order="BLHNC")


def _v41_latents(name: str, index: int, ratio: int) -> ModelLayer:
    kinds = {dtype: _v41_rows(latent, alignment, ratio) for dtype, (_, latent, alignment) in V41_RECORDS.items()}
    return ModelLayer(name, index, kinds[PACKED], "latent", {**kinds, "bfloat16": _v41_plain(ratio)})


def _v41_window(config: Config, name: str, index: int) -> ModelLayer:
    tokens = config.count("sliding_window")
    kinds = {dtype: _v41_rows(window, alignment, 1, tokens) for dtype, (window, _, alignment) in V41_RECORDS.items()}
    plain = replace(_v41_plain(1), window_tokens=tokens)
    return ModelLayer(
        name, index, kinds[PACKED], "window", {**kinds, "bfloat16": plain}, page_tokens=V41_WINDOW_PAGE_TOKENS
    )


def _v41_rows(record: tuple[int, int, str], alignment: int, ratio: int, window: int | None = None) -> Kind:
    """In a window a kernel block is its page, elsewhere of 128 tokens."""
    return ScaledRows(
        *record,
        "latent",
        "latent_scale",
        ratio,
        window,
        kernel_tokens=V41_PAGE_TOKENS if window is None else V41_WINDOW_PAGE_TOKENS,
        page_alignment_bytes=alignment,
    )


def _v41_plain(ratio: int) -> Latent:
    return Latent(MXFP8[0], "bfloat16", tokens_per_state=ratio, page_alignment_bytes=PLAIN_ALIGNMENT_BYTES)


def _v41_keys(config: Config, name: str, index: int, ratio: int) -> ModelLayer:
    keys = indexer(*index_row(config), tokens_per_state=ratio, kernel_tokens=V41_PAGE_TOKENS)
    kinds: dict[str, Kind] = {
        dtype: replace(keys, page_alignment_bytes=alignment) for dtype, (_, _, alignment) in V41_RECORDS.items()
    }
    kinds["bfloat16"] = replace(keys, page_alignment_bytes=PLAIN_ALIGNMENT_BYTES)
    return ModelLayer(name, index, kinds[PACKED], "latent", kinds)


def finish(
    config: Config, num_layers: int, layers: list[ModelLayer], page_tokens: int, *, order: str = "LBNHC"
) -> Model:
    """The model of these layers, with the page and order that vLLM gives it."""
    return Model(
        config.model,
        config.model_type,
        num_layers,
        tuple(layers),
        config.dtype(),
        default_page=page_tokens,
        default_order=order,
        num_query_heads=config.count("num_attention_heads"),
    )
