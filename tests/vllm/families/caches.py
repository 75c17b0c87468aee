"""Caches, block tables and fields in one form, in which vLLM's specifications and the catalog's kinds can be compared.

| cache | what is compared |
|---|---|
| K and V | KV heads, channels of K, channels of V, window (or chunk) in tokens, dtype |
| latent | channels, window, tokens per entry, dtype |
| indexer | bytes per entry, tokens per entry |
| ring | entries, parts, channels of a part, dtype |
| state | bytes of all its tensors |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_cache_interface import KVQuantMode

from kvreshard.catalog.engine import describe, engine_layers, plan_pages
from kvreshard.catalog.layers import Model
from kvreshard.catalog.spec import EngineSpec
from kvreshard.kinds import Attention, Kind, Latent, Place, Ring, ScaledRows, Style
from kvreshard.kinds.page import DTYPE_BYTES
from kvreshard.model import EngineLayout
from kvreshard.model.changed import replace

Cache = tuple[object, ...]
Table = tuple[list[int], int | None]
"""Places of its layers among the caches, and tokens per page, None for states."""
ORDERS = ("LBHNC", "BLHNC")
# The shortest that the CPU build's kernel for windows takes.
PAGE_TOKENS = 32


def caches_of(model: Model, spec: EngineSpec, rank: int) -> list[Cache]:
    """The caches that the catalog gives one rank."""
    place, style = Place(rank, spec.tp), Style(speculative_tokens=spec.spec)
    return [_of_kind(layer.kind, place, style) for layer in engine_layers(model, spec)]


def tables_of(model: Model, spec: EngineSpec, order: str) -> list[Table]:
    """The block tables that the catalog gives an engine."""
    plan = plan_pages(model, replace(spec, page=PAGE_TOKENS, order=order))
    places = {layer.name: place for place, layer in enumerate(plan.layers)}
    states = {layer.name for layer in plan.layers if layer.kind.is_state and not isinstance(layer.kind, Ring)}
    return [
        (sorted(places[name] for name in group.layers), None if group.layers[0] in states else group.tokens_per_page)
        for group in plan.groups
    ]


def fields_of(layout: EngineLayout, rank: int, layers: Sequence[str]) -> list[list[Any]]:
    """The fields of every layer, without its name: axes, bytes and encoding of an element, whether an engine may lack it, and what the
    rank holds of each axis.
    """
    fields = {field.name: field for field in layout.fields}
    found: dict[str, list[Any]] = {layer: [] for layer in layers}
    for shard in next(held for held in layout.ranks if held.rank == rank).shards:
        field = fields[shard.field]
        layer = max((layer for layer in layers if shard.field.startswith(f"{layer}.")), key=len)
        axes = [(axis.name, axis.extent, axis.tokens_per_index) for axis in field.axes]
        held = [(axis.axis, str(axis.owned)) for axis in shard.geometry.axes]
        found[layer].append(
            (shard.field.removeprefix(layer), axes, field.element_bytes, field.encoding, field.optional, held)
        )
    return [sorted(found[layer], key=repr) for layer in layers]


def expected_fields(model: Model, spec: EngineSpec, rank: int, order: str) -> list[list[Any]]:
    """The same as the catalog describes them."""
    layout = describe(model, replace(spec, page=PAGE_TOKENS, order=order), "engine")
    return fields_of(layout, rank, [layer.name for layer in engine_layers(model, spec)])


def _of_kind(kind: Kind, place: Place, style: Style) -> Cache:
    page_bytes = sum(tensor.page_bytes for tensor in kind.tensors(place, style, PAGE_TOKENS))
    if isinstance(kind, Attention):
        width = kind.head_size if kind.head_size_v is None else kind.head_size_v
        head_bytes = (kind.head_size + width) * DTYPE_BYTES[kind.dtype] * PAGE_TOKENS
        return "attention", page_bytes // head_bytes, kind.head_size, width, kind.window_tokens, kind.dtype
    if isinstance(kind, Latent):
        return "latent", kind.channels, kind.window_tokens, kind.tokens_per_state, kind.dtype
    if isinstance(kind, ScaledRows):
        return "rows", kind.row_bytes + kind.scale_bytes, kind.tokens_per_state
    if isinstance(kind, Ring):
        return "ring", kind.capacity(style), len(kind.parts), kind.channels, kind.dtype
    return "state", page_bytes


def _dtype(spec: Any) -> str:
    """Of values: torch has those in fp8, with a scale per tensor, as bytes. Packed rows have several."""
    is_fp8 = getattr(spec, "kv_quant_mode", None) == KVQuantMode.FP8_PER_TENSOR
    if is_fp8 and getattr(spec, "cache_dtype_str", None) in (None, "fp8", "fp8_e4m3"):
        return "fp8_e4m3"
    return str(spec.dtype).removeprefix("torch.")


def of_spec(spec: Any) -> Cache:
    """The same of one of vLLM's specifications."""
    name = type(spec).__name__
    if name == "MambaSpec":
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
        return "state", sum(sizes)
    dtype = _dtype(spec)
    if name in ("MLAAttentionSpec", "SlidingWindowMLASpec"):
        window = spec.sliding_window if name == "SlidingWindowMLASpec" else None
        if dtype == "uint8":
            return "rows", spec.state_content_bytes or spec.head_size, spec.tokens_per_state
        return "latent", spec.head_size, window, spec.tokens_per_state, dtype
    if name == "CircularBufferSpec":
        return "ring", spec.block_size, spec.num_kv_heads, spec.head_size + spec.head_size_v, dtype
    windows = {
        "FullAttentionSpec": None,
        "SlidingWindowSpec": "sliding_window",
        "ChunkedLocalAttentionSpec": "attention_chunk_size",
    }
    if name not in windows:
        return (name,)
    field = windows[name]
    return "attention", spec.num_kv_heads, spec.head_size, spec.head_size_v, field and getattr(spec, field), dtype
