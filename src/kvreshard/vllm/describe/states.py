"""Kind of a recurrent layer's state, checked against the shapes of its pages.

The form of a state comes from the class of vLLM's layer, its sizes from the attributes from which that layer computes its
shapes (`layer_info`). A page holds the states back to back in the order of `MambaSpec.shapes`; a convolution state is
(channel, tap) or (tap, channel), as `is_conv_state_dim_first` tells. Speculation adds columns beyond the live taps.

| form | shapes on a rank |
|---|---|
| `mamba1` | conv (channels), (channels, state) |
| `mamba2` | conv (heads x head size + 2 x groups x state), (heads, head size, state) |
| `gated-delta` | conv (2 x key heads x key size + value heads x value size), (value heads, value size, key size) |
| `kimi-delta` | conv (3 x heads x head size), (heads, head size, head size) |
| `short-conv` | conv (channels) |
| `position-conv` | conv (channels), all on every rank |
| `linear` | (heads, head size, head size) |

Opaque: other forms, states of those that every rank keeps whole, more shapes than these (replay rings and records of
speculation, whose meaning depends on where they stand).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvreshard.kinds import GatedDelta, Kind, LinearState, Mamba1, Mamba2, Place, ShortConv, Style
from kvreshard.kinds.page import DTYPE_BYTES
from kvreshard.kinds.place import size
from kvreshard.model import LayoutError
from kvreshard.vllm.describe.layer_info import LayerInfo
from kvreshard.vllm.describe.paged import Found, dtype_name

Sizes = Mapping[str, int]
Shapes = tuple[tuple[int, ...], ...]

MAKE: Mapping[str, Callable[[Sizes, list[str]], Kind]] = {
    "mamba1": lambda s, d: Mamba1(s["intermediate_size"], s["ssm_state_size"], s["conv_kernel_size"], d[0], d[1]),
    "mamba2": lambda s, d: Mamba2(
        s["num_heads"], s["head_dim"], s["n_groups"], s["ssm_state_size"], s["conv_kernel_size"], d[0], d[1]
    ),
    "gated-delta": lambda s, d: GatedDelta(
        s["num_k_heads"], s["num_v_heads"], s["head_k_dim"], s["head_v_dim"], s["conv_kernel_size"], d[0], d[1]
    ),
    "kimi-delta": lambda s, d: GatedDelta(
        s["num_heads"], s["num_heads"], s["head_dim"], s["head_dim"], s["conv_size"], d[0], d[1]
    ),
    "short-conv": lambda s, d: ShortConv(s["conv_dim"], s["L_cache"], d[0]),
    "position-conv": lambda s, d: ShortConv(s["hc_hidden_size"], s["conv_state_len"] + 1, d[0], is_replicated=True),
    "linear": lambda s, d: LinearState(s["num_heads"], s["head_dim"], d[0]),
}
REPLICATED = ("position-conv",)
TAPS: Mapping[str, tuple[str, int]] = {
    "mamba1": ("conv_kernel_size", -1),
    "mamba2": ("conv_kernel_size", -1),
    "gated-delta": ("conv_kernel_size", -1),
    "kimi-delta": ("conv_size", -1),
    "short-conv": ("L_cache", -1),
    "position-conv": ("conv_state_len", 0),
}
"""Form -> the size that gives the live taps of its convolution, and what to add to it."""


def state_kind(layer: str, spec: Any, info: LayerInfo, place: Place, conv_dim_first: bool) -> Found:
    """The kind of a `MambaSpec` layer. Raises LayoutError if shapes and sizes contradict one another."""
    form = info.state_form
    if form is None:
        return Found(None, reason="form of the state unknown")
    if spec.tp_replicated != (form in REPLICATED):
        return Found(None, reason="state kept whole by each rank" if spec.tp_replicated else "state split by ranks")
    shapes: Shapes = tuple(tuple(int(extent) for extent in shape) for shape in spec.shapes)
    dtypes = [dtype_name(dtype) for dtype in spec.dtypes]
    unknown = [dtype for dtype in dtypes if dtype not in DTYPE_BYTES]
    if unknown:
        return Found(None, reason=f"dtype {unknown[0]}")
    channels, others = _expected(form, info.state_sizes, place)
    if len(shapes) != len(others) + (form in TAPS):
        return Found(None, reason=f"{len(shapes)} tensors in a state of form {form}")
    scratch = 0
    if form in TAPS:
        name, less = TAPS[form]
        scratch = _scratch_taps(layer, form, shapes[0], channels, info.state_sizes[name] + less, conv_dim_first)
    if shapes[-len(others) :] != others and others:
        raise LayoutError(
            f"layer '{layer}': its state has shapes {shapes}, but {dict(info.state_sizes)} of the whole model give rank "
            f"{place.tp_rank} of {place.tp_size} {others} besides the convolution; one of the two is wrong"
        )
    style = Style(conv_dim_first=conv_dim_first, speculative_tokens=scratch)
    return Found(MAKE[form](info.state_sizes, dtypes), style)


def _expected(form: str, sizes: Sizes, place: Place) -> tuple[int, Shapes]:
    """Channels of the convolution and the other shapes on this rank."""

    def held(key: str) -> int:
        return size(place.part(sizes[key]))

    if form == "mamba1":
        return held("intermediate_size"), ((held("intermediate_size"), sizes["ssm_state_size"]),)
    if form == "mamba2":
        state = sizes["ssm_state_size"]
        channels = held("num_heads") * sizes["head_dim"] + 2 * held("n_groups") * state
        return channels, ((held("num_heads"), sizes["head_dim"], state),)
    if form == "gated-delta":
        key, value = sizes["head_k_dim"], sizes["head_v_dim"]
        channels = 2 * held("num_k_heads") * key + held("num_v_heads") * value
        return channels, ((held("num_v_heads"), value, key),)
    if form == "short-conv":
        return held("conv_dim"), ()
    if form == "position-conv":
        return sizes["hc_hidden_size"], ()
    width = sizes["head_dim"]
    channels = 3 * held("num_heads") * width if form == "kimi-delta" else 0
    return channels, ((held("num_heads"), width, width),)


def _scratch_taps(layer: str, form: str, shape: tuple[int, ...], channels: int, taps: int, conv_dim_first: bool) -> int:
    """Columns beyond the live taps. Mamba-1 has none. Raises LayoutError."""
    dim, length = shape if conv_dim_first else shape[::-1]
    if dim != channels or length < taps or (form == "mamba1" and length != taps):
        order = "(channel, tap)" if conv_dim_first else "(tap, channel)"
        raise LayoutError(
            f"layer '{layer}': its convolution state has shape {shape} in the order {order}, expected {channels} channels and "
            f"{taps} taps on this rank; set VLLM_SSM_CONV_STATE_LAYOUT alike in all processes of the engine"
        )
    return length - taps
