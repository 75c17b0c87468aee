"""Kinds that only an engine's description makes: is every cell where the engine put it?"""

from typing import Any

import numpy as np
import pytest
from tests.pairs.small import engine
from tests.unit.kinds.test_addresses import cells

from kvreshard.kinds import LinearState, Opaque, PageView, Place, ShortConv, Style, TensorShape
from kvreshard.model import LayoutError, LayoutMismatch
from kvreshard.plan import match_fields


def test_a_linear_state_is_one_matrix_per_head() -> None:
    layout = engine("prefill", tp=2, kind=LinearState(4, 3, "float32"))
    for rank in range(2):
        found = dict(cells(layout, rank, "layers.0.ssm", 1, None))
        at = 72 + np.arange(2 * 3 * 3).reshape(2, 3, 3) * 4
        assert found == {(2 * rank + h, r, c): at[h, r, c] for h in range(2) for r in range(3) for c in range(3)}


@pytest.mark.parametrize("dim_first", [True, False])
def test_a_short_convolution_has_speculative_columns(dim_first: bool) -> None:
    style = Style(conv_dim_first=dim_first, speculative_tokens=2)
    layout = engine("prefill", tp=2, kind=ShortConv(6, 3, "bfloat16"), style=style)
    at = np.arange(3 * 4) * 2
    at = at.reshape(3, 4) if dim_first else at.reshape(4, 3).T
    for rank in range(2):
        found = dict(cells(layout, rank, "layers.0.conv.x", 0, None))
        assert found == {(3 * rank + c, t): at[c, t] for c in range(3) for t in range(2)}


def test_an_opaque_state_is_a_part_per_rank() -> None:
    layout = engine("prefill", tp=3, kind=Opaque(5, None, "x"))
    assert layout.groups[0].tokens_per_page is None
    for rank in range(3):
        assert dict(cells(layout, rank, "layers.0.page", 2, None)) == {(rank, i): 10 + i for i in range(5)}


def test_a_page_in_several_pieces_counts_them_one_after_another() -> None:
    view = PageView(TensorShape("page", 3, 1, 4), 100, 4, 1, 0)
    (piece,) = Opaque(12, 8, "x").pieces("layers.0", Place(), Style(), {"page": view})
    byte = next(axis for axis in piece.axes if axis.axis == "byte")
    assert byte.locate(np.arange(12, dtype=np.int64))[1].tolist() == [100 * (i // 4) + i % 4 for i in range(12)]


def test_other_parallel_sizes_do_not_match() -> None:
    one, two = engine("prefill", kind=Opaque(8, None, "x"), tp=2), engine("decode", kind=Opaque(8, None, "x"))
    with pytest.raises(LayoutMismatch, match="axis 'part'"):
        match_fields(one, two)
    assert match_fields(one, one).names == ("layers.0.page",)


@pytest.mark.parametrize(
    ("make", "facts"),
    [
        (lambda: Opaque(0, None, "x"), "0 bytes"),
        (lambda: Opaque(4, None, ""), "tag ''"),
        (lambda: LinearState(0, 4, "float32"), "num_heads is 0; it must be at least 1"),
        (lambda: ShortConv(4, 1, "float32"), "conv_kernel is 1; it must be at least 2"),
    ],
)
def test_what_they_refuse(make: Any, facts: str) -> None:
    with pytest.raises(LayoutError, match=facts):
        make()
