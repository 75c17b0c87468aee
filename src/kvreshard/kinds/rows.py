"""Quantised rows with their scales apart: all rows of a kernel block, then all their scales.

Two fields per layer, the rows and the scales, whole on every rank, axes (token, channel) counted in bytes.

| cache | row | scales | kernel block |
|---|---|---|---|
| sparse indexer of DeepSeek-V3.2 (`DeepseekV32IndexerBackend`) | 128 e4m3 | one float32 | 64 tokens |
| the same of DeepSeek-V4 | 128 e4m3 | one float32 | 256 tokens, 64 states |
| DeepSeek-V4's `fp8_ds_mla` (`fused_compress_quant_cache`) | 448 e4m3, 64 bfloat16 | 7 ue8m0, one zero | its page: 64 states, or 2 |

vLLM 0.33 stores four UE8M0 bytes in place of the float32 on SM100, and DeepSeek-V4.1's rows, which lie so until 0.32, as `mla.Latent`.

Kernel blocks belong to the cache, not to the engine's choice: a page of several is several such blocks. A page shorter than
one, or no multiple of it, is one block. Refused: sizes that are not positive.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, states_per_page
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field, LayoutError

TENSOR = "rows"


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """`row_bytes` of values and `scale_bytes` of scales per state of `tokens_per_state` tokens."""

    is_state: ClassVar[bool] = False
    row_bytes: int
    scale_bytes: int
    quantisation: str
    row_name: str = "index_k"
    scale_name: str = "index_scale"
    tokens_per_state: int = 1
    window_tokens: int | None = None
    kernel_tokens: int | None = None
    page_alignment_bytes: int = 1

    def __post_init__(self) -> None:
        sizes = (self.row_bytes, self.scale_bytes, self.tokens_per_state, self.page_alignment_bytes)
        if min(sizes) <= 0 or (self.kernel_tokens is not None and self.kernel_tokens < self.tokens_per_state):
            raise LayoutError(
                f"rows of {self.row_bytes} bytes with {self.scale_bytes} scale bytes, {self.tokens_per_state} tokens per "
                f"state, kernel blocks of {self.kernel_tokens} tokens, pages aligned to {self.page_alignment_bytes}: sizes "
                "must be positive"
            )

    def tensors(self, place: Place, style: Style, tokens_per_page: int) -> tuple[TensorShape, ...]:
        states = states_per_page(tokens_per_page, self.tokens_per_state, "quantised rows")
        cell_bytes = self.row_bytes + self.scale_bytes
        return (TensorShape(TENSOR, 1, states, cell_bytes, self.page_alignment_bytes, self.tokens_per_state),)

    def pieces(self, layer: str, place: Place, style: Style, views: Mapping[str, PageView]) -> tuple[Piece, ...]:
        shape = views[TENSOR].shape
        states = self._kernel_states(views[TENSOR])
        blocks = Digit(shape.states // states, 0, states * shape.cell_bytes)
        held = place.tokens(self.tokens_per_state)
        return tuple(
            Piece(
                TENSOR,
                Field(
                    f"{layer}.{name}",
                    (Axis("token", None, self.tokens_per_state), Axis("channel", extent)),
                    1,
                    f"uint8/{self.quantisation}",
                ),
                (
                    AxisMap("token", held, (Digit(states, 0, extent), blocks, Digit(None, 1, 0))),
                    AxisMap("channel", whole(extent), (Digit(extent, 0, 1),)),
                ),
                offset,
            )
            for name, extent, offset in (
                (self.row_name, self.row_bytes, 0),
                (self.scale_name, self.scale_bytes, states * self.row_bytes),
            )
        )

    def _kernel_states(self, view: PageView) -> int:
        """States of a kernel block: the cache's own, else the engine's."""
        if self.kernel_tokens is None:
            return view.kernel_states
        states = self.kernel_tokens // self.tokens_per_state
        return states if view.shape.states % states == 0 else view.shape.states


def indexer(
    channels: int, scale_bytes: int = 4, tokens_per_state: int = 1, kernel_tokens: int | None = 64
) -> ScaledRows:
    """The sparse indexer's cache: `channels` e4m3 values and their float32 scales."""
    return ScaledRows(
        channels,
        scale_bytes,
        "fp8_e4m3/scale-per-token",
        tokens_per_state=tokens_per_state,
        kernel_tokens=kernel_tokens,
    )
