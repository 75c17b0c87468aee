"""Keys and values in all six layouts: every label lies where the layout says, and a transfer moves it there."""

import pytest

pytest.importorskip("vllm")

from tests.vllm import models
from tests.vllm.engines import LAYOUTS, build, reshard

pytestmark = pytest.mark.vllm
TOKENS = 37


@pytest.mark.parametrize("order", LAYOUTS)
def test_one_layout_to_another(order: str) -> None:
    other = LAYOUTS[LAYOUTS.index(order) - 1]
    reshard(build("prefill", models.llama(), order=order), build("decode", models.llama(), tp=2, order=other), TOKENS)


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 4), (4, 1), (2, 8), (8, 2), (8, 4)])
def test_tensor_parallel_sizes(src_tp: int, dst_tp: int) -> None:
    config = {"kv_heads": 4}
    src = build("prefill", models.llama(), tp=src_tp, config=config, order="LBNHC")
    dst = build("decode", models.llama(), tp=dst_tp, config=config, order="LBNHC")
    reshard(src, dst, TOKENS)


def test_page_sizes() -> None:
    src = build("prefill", models.llama(bs=16), order="LBNHC")
    dst = build("decode", models.llama(bs=48), tp=2, order="LBHNC")
    reshard(src, dst, 100)


@pytest.mark.parametrize("orders", [("LBNHC", "LBHNC"), ("LBHNC", "BLHNC")])
@pytest.mark.parametrize("tps", [(1, 2), (4, 8), (2, 1)])
def test_a_hybrid_of_windows_and_full_attention(orders: tuple[str, str], tps: tuple[int, int]) -> None:
    sides = [
        build(
            engine,
            models.gemma4(),
            tp=tp,
            order=order,
            blocks=40,
            config={"text": {"swa_num_key_value_heads": 8}, "kv_heads": 2},
        )
        for engine, order, tp in zip(("prefill", "decode"), orders, tps, strict=True)
    ]
    assert {group.window_tokens for group in sides[0].layout.groups} == {39, None}
    reshard(*sides, 70)
