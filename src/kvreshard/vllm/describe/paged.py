"""Kind of a layer that has pages of tokens, from its specification and its backend.

| specification (`v1/kv_cache_interface.py`) | kind |
|---|---|
| full, window, chunked, R-SWA | `Attention`, as the backend fills its pages |
| MLA, window MLA | `Latent`, or `ScaledRows` where scales lie behind the values |
| ring (`CircularBufferSpec`) | `Ring` |

The encoding distinguishes caches that hold other bytes for the same values: dtype, quantisation, and scales that lie outside the page.
A difference between engines that does not change bytes (backend, layout) must not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvreshard.kinds import Attention, Kind, Latent, Ring, ScaledRows, Style
from kvreshard.kinds.page import DTYPE_BYTES
from kvreshard.vllm.describe.interiors import DS_MLA, FP8, RING_PARTS, interior, quantised_row
from kvreshard.vllm.describe.layer_info import LayerInfo
from kvreshard.vllm.versions import release

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A kind with the style of its pages; None with the reason where the interior is not known."""

    kind: Kind | None
    style: Style = Style()  # noqa: RUF009 (frozen)
    reason: str = ""


def dtype_name(dtype: Any) -> str:
    """The name of a torch dtype as kinds write it.

    >>> dtype_name("torch.bfloat16")
    'bfloat16'
    """
    name = str(dtype).removeprefix("torch.")
    return {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "int8": "uint8"}.get(name, name)


def _interior(spec: Any, info: LayerInfo, *, ring: bool = False) -> str | None:
    has_own_form = spec.num_head_slots is not None or spec.state_content_bytes is not None
    return interior(info.backend, info.cache_dtype, info.platform, release().minor, packing=has_own_form, ring=ring)


def attention_kind(spec: Any, info: LayerInfo, count_heads: Callable[[], int]) -> Found:
    """Keys and values. `count_heads`: KV heads of the whole model; called only where the interior is known."""
    filled = _interior(spec, info)
    if filled is None:
        return Found(None, reason="interior unknown")
    if spec.tokens_per_state != 1:
        return Found(None, reason=f"{spec.tokens_per_state} tokens per state")
    if filled == "scaled-cell":
        return Found(_scaled(spec, info, count_heads()), Style("cell"))
    if filled not in ("cell", "slots", "planes-kt", "tiles"):
        return Found(None, reason=f"interior {filled} is not for keys and values")
    dtype, quantisation = element(spec, info)
    if dtype not in DTYPE_BYTES:
        return Found(None, reason=f"dtype {dtype}")
    kind = Attention(count_heads(), spec.head_size, dtype, spec.head_size_v, quantisation=quantisation)
    return Found(kind, Style(filled))


def _scaled(spec: Any, info: LayerInfo, num_kv_heads: int) -> Attention:
    """Values with their scale behind them, in bytes: int4 packs two values in a byte."""
    packed = 2 if info.cache_dtype.startswith("int4") else 1
    k, v = spec.head_size // packed + SCALE_BYTES, spec.head_size_v // packed + SCALE_BYTES
    quantisation = info.cache_dtype + (f"/{info.fp8_format}" if info.cache_dtype.startswith("fp8") else "")
    return Attention(num_kv_heads, k, "uint8", v, quantisation=quantisation)


def element(spec: Any, info: LayerInfo) -> tuple[str, str]:
    """Dtype and quantisation of single values. The dtype of fp8 caches is bytes; their scales are the layer's own."""
    if info.cache_dtype not in FP8:
        return dtype_name(spec.dtype), ""
    dtype = "fp8_e5m2" if info.cache_dtype == "fp8_e5m2" else "fp8_e4m3"
    fnuz = "fnuz/" if info.fp8_format.endswith("fnuz") else ""
    if info.scales is None:
        return dtype, f"{fnuz}scale-per-tensor"
    k, v = (format(scale, ".9g") for scale in info.scales)
    return dtype, f"{fnuz}scale-per-tensor(k={k},v={v})"


def latent_kind(spec: Any, info: LayerInfo) -> Found:
    """One vector per state, whole on every rank.

    The field's name tells which vector it is: DeepSeek-V4's compressor stores values and scores that are not compressed yet (`partial`).
    """
    filled = _interior(spec, info)
    if filled is None or not isinstance(spec.tokens_per_state, int) or spec.tokens_per_state < 1:
        return Found(None, reason="interior unknown")
    name = "partial" if info.backend == "CompressorBackend" else "latent"
    if filled == "rows":
        dtype, quantisation = element(spec, info)
        if dtype not in DTYPE_BYTES:
            return Found(None, reason=f"dtype {dtype}")
        return Found(Latent(spec.head_size, dtype, quantisation, None, spec.tokens_per_state, name=name))
    if filled == "quantised-rows":
        return _quantised_rows(spec, info)
    return Found(None, reason=f"interior {filled} is not for latent vectors")


def _quantised_rows(spec: Any, info: LayerInfo) -> Found:
    """Vectors with their scales. Kernel blocks are as the view has them; without any, the whole page is one."""
    num_bytes, dtype = int(spec.state_content_size_bytes), dtype_name(spec.dtype)
    row = quantised_row(info.cache_dtype, num_bytes, info.has_mx_scales, release().minor) if dtype == "uint8" else None
    if row is None:
        return Found(None, reason=f"rows of {num_bytes} bytes of {dtype}")
    if row.is_inline:
        return Found(Latent(spec.head_size, "uint8", row.encoding, num_bytes, spec.tokens_per_state))
    names = ("latent", "latent_scale") if info.cache_dtype in DS_MLA else ("index_k", "index_scale")
    return Found(
        ScaledRows(row.value_bytes, row.scale_bytes, row.encoding, *names, tokens_per_state=spec.tokens_per_state)
    )


def ring_kind(spec: Any, info: LayerInfo) -> Found:
    """The last tokens, overwritten in turn; an engine with speculation has a longer ring."""
    known = _interior(spec, info, ring=True)
    parts = RING_PARTS.get(info.backend, ("partial",))
    if (
        known is None
        or dtype_name(spec.dtype) not in DTYPE_BYTES
        or spec.num_kv_heads != len(parts)
        or spec.tokens_per_state != 1
    ):
        return Found(None, reason="interior unknown")
    return Found(Ring(spec.block_size, spec.head_size + spec.head_size_v, dtype_name(spec.dtype), parts))


def window_tokens(spec: Any) -> int | None:
    """Tokens that a request's pages still hold before its position; None for all.

    vLLM keeps one token less than the window, since the next token is in it too, and what multi-module speculation needs
    (`single_type_kv_cache_manager.py`, `SlidingWindowManager`). A chunk keeps at most its tokens (`ChunkedLocalAttentionManager`).
    """
    window = getattr(spec, "sliding_window", None)
    if window is not None and hasattr(spec, "extra_retained_tokens"):
        return max(1, int(window) - 1 + int(spec.extra_retained_tokens))
    if hasattr(spec, "attention_chunk_size") and not hasattr(spec, "sliding_window"):
        return int(spec.attention_chunk_size)
    return None
