"""The caches of DeepSeek-V4 and V4.1: windows of latents, compressed latents, and the tokens that a compressor needs.

| model types | caches of a layer, in order | source (vLLM 0.32) |
|---|---|---|
| `deepseek_v4` | a window; with ratio 4 or 128 also compressed latents and the window of their compressor; with 4 before all that the indexer's keys and their compressor's window | `models/deepseek_v4/attention.py`, `compressor.py` |
| `deepseek_v41` | in layers of `kv_source_layer_ids` latents of every token or of every second one, an indexer's keys for as many where `index_source_layer_ids` has the layer too; a window; for every second one also the ring of the open pair. The layers behind read these | `models/deepseek_v41/attention.py`, `compressor.py` |

The dtype of the cache decides the form of its latents, and the page alignment of all caches. vLLM's default is `fp8_ds_mla`.
A compressor keeps values and scores in float32 per token until the token is compressed, with ratio 4 twice: of the previous group and its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvreshard.catalog.caches import index_row
from kvreshard.catalog.config import Config
from kvreshard.catalog.family import CacheRule
from kvreshard.catalog.layer_rules import num_predicting
from kvreshard.catalog.layers import PACKED, PACKED_FP4, PACKED_V4, ModelLayer
from kvreshard.kinds import Kind, Latent, Ring, ScaledRows, indexer

CHANNELS, ROTATED = 512, 64
# Bytes of values, bytes of scales, what they are; None is a row of bfloat16.
Record = tuple[int, int, str] | None
V4_RECORD, MXFP8, NVFP4 = (576, 8, PACKED), (512, 16, "mxfp8/scale-per-32"), (256, 32, "nvfp4/scale-per-16")
# Cache dtype -> (record of windows, of other latents, alignment of pages: one packed row, or half a row of bfloat16).
Forms = Mapping[str, tuple[Record, Record, int]]
V4_FORMS: Forms = {PACKED: (V4_RECORD, V4_RECORD, 576), "bfloat16": (None, None, 512)}
# FlashMLA decodes the new records on SM100 only; elsewhere vLLM writes V4's, and calls both `fp8_ds_mla`.
V41_FORMS: Forms = {
    PACKED: (MXFP8, MXFP8, 512),
    PACKED_FP4: (MXFP8, NVFP4, 512),
    PACKED_V4: (V4_RECORD, V4_RECORD, 576),
    "bfloat16": (None, None, 512),
}
# Compression ratio: (tokens of a compressor page, tokens that the compressor looks back, entries per token).
V4_COMPRESSORS = {4: (4, 8, 2), 128: (8, 128, 1)}
V4_LAYERS: Mapping[int, str] = {
    0: "window", 1: "window", 4: "keys keys_compressor window latent_4 compressor_4", 128: "window latent_128 compressor_128",
}  # fmt: skip
# Values and scores of the rows that the next step needs, before drafts; a ring has at least eight (`compressor.py:154`).
V41_RING = Ring(2, 2 * CHANNELS, "float32", ("partial",), is_doubled=True, min_entries=8)
# Layers that draft (DSpark, its only own method) of a file without their number (`nvidia/dspark.py:89`).
V41_DRAFTING = 3


def v4_layers(config: Config, num_layers: int) -> Sequence[str]:
    """By `compress_ratios`, which may also have those of the layers that predict."""
    return [V4_LAYERS[ratio] for ratio in _ratios(config, num_layers, num_predicting(config), (0, 1, 4, 128))]


def v41_layers(config: Config, num_layers: int) -> Sequence[str]:
    """The same, and by the lists of the layers that others read."""
    ratios = _ratios(config, num_layers, len(v41_drafting(config, ())), (0, 1, 2))
    sources = config.positions("kv_source_layer_ids", num_layers, first=0)
    indexed = config.positions("index_source_layer_ids", num_layers, first=0)
    layers = []
    for index, ratio in enumerate(ratios):
        keys = f" keys_{ratio}" if index in indexed else ""
        ring = " compressor" if ratio > 1 else ""
        is_source = index in sources and ratio > 0
        layers.append(f"latent_{ratio}{keys} window{ring}" if is_source else "window")
    return layers


def _ratios(config: Config, num_layers: int, spare: int, known: Sequence[int]) -> Sequence[int]:
    size, rotated = config.count("head_dim"), config.count("qk_rope_head_dim")
    if (size, rotated) != (CHANNELS, ROTATED):
        raise config.error(
            "head_dim", f"is {size}, of which {rotated} rotated", f"rows are known for {CHANNELS} and {ROTATED} only"
        )
    ratios = config.numbers("compress_ratios", num_layers, spare=spare)
    for index, ratio in enumerate(ratios):
        if ratio not in known:
            names = f"{', '.join(map(str, known[:-1]))} and {known[-1]}"
            raise config.error(f"compress_ratios[{index}]", f"is {ratio}", f"known are {names}")
    return ratios


def v41_drafting(config: Config, _layers: Sequence[str]) -> Sequence[str]:
    """A window each."""
    fields = ("n_mtp_layers", "num_nextn_predict_layers")
    number = next(filter(None, (config.count(field, 0, at_least=0) for field in fields)), V41_DRAFTING)
    return ["window"] * number


@dataclass(frozen=True, slots=True)
class Version:
    """V4 or V4.1: the forms of latents and the tokens of kernel blocks. A window's kernel block is its page."""

    forms: Forms
    kernel_tokens: int
    window_kernel_tokens: int

    def latent(self, ratio: int) -> CacheRule:
        """Latents of so many tokens each."""

        def cache(_config: Config, layer: str, index: int) -> ModelLayer:
            kinds = {
                dtype: _rows(other, ratio, None, self.kernel_tokens, alignment)
                for dtype, (_, other, alignment) in self.forms.items()
            }
            return ModelLayer(f"{layer}.attn", index, kinds[PACKED], "latent", kinds)

        return cache

    def window(self, config: Config, layer: str, index: int) -> ModelLayer:
        """The latents of the last tokens."""
        tokens, page_tokens = config.count("sliding_window"), self.window_kernel_tokens
        kinds = {
            dtype: _rows(recent, 1, tokens, page_tokens, alignment)
            for dtype, (recent, _, alignment) in self.forms.items()
        }
        return ModelLayer(f"{layer}.window", index, kinds[PACKED], "window", kinds, page_tokens=page_tokens)

    def keys(self, ratio: int) -> CacheRule:
        """An indexer's keys, one per so many tokens."""

        def cache(config: Config, layer: str, index: int) -> ModelLayer:
            keys = indexer(*index_row(config), tokens_per_state=ratio, kernel_tokens=self.kernel_tokens)
            kinds = self._in_all_forms(lambda alignment: replace(keys, page_alignment_bytes=alignment))
            return ModelLayer(f"{layer}.indexer", index, kinds[PACKED], "latent", kinds)

        return cache

    def compressor(self, name: str, ratio: int, channels: str) -> CacheRule:
        """The last tokens, not yet compressed."""
        page_tokens, window_tokens, entries = V4_COMPRESSORS[ratio]

        def cache(config: Config, layer: str, index: int) -> ModelLayer:
            size = 2 * entries * config.count(channels)
            partial = Latent(size, "float32", window_tokens=window_tokens, name="partial")
            kinds = self._in_all_forms(lambda alignment: replace(partial, page_alignment_bytes=alignment))
            return ModelLayer(f"{layer}.{name}", index, kinds[PACKED], "compressor", kinds, page_tokens=page_tokens)

        return cache

    def _in_all_forms(self, kind: Callable[[int], Kind]) -> dict[str, Kind]:
        return {dtype: kind(alignment) for dtype, (_, _, alignment) in self.forms.items()}


def _rows(record: Record, ratio: int, window: int | None, kernel_tokens: int, alignment: int) -> Kind:
    if record is None:
        return Latent(
            CHANNELS, "bfloat16", tokens_per_state=ratio, window_tokens=window, page_alignment_bytes=alignment
        )
    names = "latent", "latent_scale"
    return ScaledRows(*record, *names, ratio, window, kernel_tokens=kernel_tokens, page_alignment_bytes=alignment)


V4, V41 = Version(V4_FORMS, 256, 64), Version(V41_FORMS, 128, 32)
V4_CACHES: Mapping[str, CacheRule] = {
    "keys": V4.keys(4),
    "keys_compressor": V4.compressor("indexer_compressor", 4, "index_head_dim"),
    "window": V4.window,
    **{f"latent_{ratio}": V4.latent(ratio) for ratio in V4_COMPRESSORS},
    **{f"compressor_{ratio}": V4.compressor("compressor", ratio, "head_dim") for ratio in V4_COMPRESSORS},
}
V41_CACHES: Mapping[str, CacheRule] = {
    "window": V41.window,
    "compressor": lambda _config, layer, index: ModelLayer(f"{layer}.compressor", index, V41_RING, "ring"),
    **{f"latent_{ratio}": V41.latent(ratio) for ratio in (1, 2)},
    **{f"keys_{ratio}": V41.keys(ratio) for ratio in (1, 2)},
}
