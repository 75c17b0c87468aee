"""Kind of a recurrent layer's state, checked against the shapes of its pages.

The form of a state comes from the class of vLLM's layer, its sizes from the attributes from which that layer computes its
shapes (`layer_info`, `state_forms`). A page holds the states back to back in the order of `MambaSpec.shapes`; a convolution state is
(channel, tap) or (tap, channel), as `is_conv_state_dim_first` tells. Speculation adds columns beyond the live taps.

Opaque: other forms, states of those that every rank keeps whole, more shapes than these (replay rings and records of
speculation, whose meaning depends on where they stand).
"""

from __future__ import annotations

from typing import Any

from kvreshard.kinds import Place, Style
from kvreshard.kinds.page import DTYPE_BYTES
from kvreshard.kinds.place import size
from kvreshard.model import LayoutError
from kvreshard.vllm.describe.layer_info import LayerInfo
from kvreshard.vllm.describe.paged import Found, dtype_name
from kvreshard.vllm.describe.state_forms import FORMS, Shapes, StateForm


def state_kind(layer: str, spec: Any, info: LayerInfo, place: Place, conv_dim_first: bool) -> Found:
    """The kind of a `MambaSpec` layer. Raises LayoutError if shapes and sizes contradict one another."""
    if info.state_form is None:
        return Found(None, reason="form of the state unknown")
    form, sizes = FORMS[info.state_form], info.state_sizes
    if spec.tp_replicated != form.is_replicated:
        return Found(None, reason="state kept whole by each rank" if spec.tp_replicated else "state split by ranks")
    shapes: Shapes = tuple(tuple(int(extent) for extent in shape) for shape in spec.shapes)
    dtypes = [dtype_name(dtype) for dtype in spec.dtypes]
    unknown = [dtype for dtype in dtypes if dtype not in DTYPE_BYTES]
    if unknown:
        return Found(None, reason=f"dtype {unknown[0]}")

    def held(key: str) -> int:
        return size(place.part(sizes[key]))

    others = form.shapes(sizes, held)
    if len(shapes) != len(others) + (form.channels is not None):
        return Found(None, reason=f"{len(shapes)} tensors in a state of form {info.state_form}")
    scratch = 0
    if form.channels is not None:
        scratch = _scratch_taps(layer, form, shapes[0], form.channels(sizes, held), form.taps(sizes), conv_dim_first)
    if shapes[-len(others) :] != others and others:
        raise LayoutError(
            f"layer '{layer}': its state has shapes {shapes}, but {dict(sizes)} of the whole model give rank "
            f"{place.tp_rank} of {place.tp_size} {others} besides the convolution; one of the two is wrong"
        )
    return Found(form.make(sizes, dtypes), Style(conv_dim_first=conv_dim_first, speculative_tokens=scratch))


def _scratch_taps(
    layer: str, form: StateForm, shape: tuple[int, ...], channels: int, taps: int, conv_dim_first: bool
) -> int:
    """Columns beyond the live taps. Raises LayoutError."""
    dim, length = shape if conv_dim_first else shape[::-1]
    if dim != channels or length < taps or (length != taps and not form.may_speculate):
        order = "(channel, tap)" if conv_dim_first else "(tap, channel)"
        raise LayoutError(
            f"layer '{layer}': its convolution state has shape {shape} in the order {order}, expected {channels} channels and "
            f"{taps} taps on this rank; set VLLM_SSM_CONV_STATE_LAYOUT alike in all processes of the engine"
        )
    return length - taps
