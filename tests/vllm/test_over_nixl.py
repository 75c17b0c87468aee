"""Mixes that no engine of vLLM's CPU build can run, as real views over real NIXL.

A latent cache beside keys and values does not start there: CPU_MLA takes kernel blocks of 16 tokens, CPU_ATTN multiples of 32
(vLLM 0.32.0, `v1/attention/backends/mla/cpu_mla.py`, `cpu_attn.py`). Here vLLM's own functions size and lay out the caches
of both, for a GPU's backends, on plain memory.
"""

import pytest

pytest.importorskip("vllm")

from tests.vllm import models
from tests.vllm.engines import build, reshard_over_nixl

pytestmark = [pytest.mark.vllm, pytest.mark.nixl]
TOKENS = 150


def latent_target() -> models.Layers:
    """Kimi-K2.5 with Eagle-3, in small: a latent model, and a draft of keys and values behind it."""
    target = {models.name(i): models.mla(576, bs=64) for i in range(3)}
    return {**target, models.name(3): models.attention(4, 16, bs=64)}


def grouped_target() -> models.Layers:
    """The opposite: keys and values in the model, a latent in the draft."""
    target = {models.name(i): models.attention(4, 64, bs=64) for i in range(3)}
    return {**target, models.name(3): models.mla(576, bs=64)}


@pytest.mark.parametrize("orders", [("LBHNC", "LBHNC"), ("LBNHC", "BLHNC")])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("layers", [latent_target, grouped_target])
def test_a_draft_of_the_other_kind(layers: object, prefill: int, decode: int, orders: tuple[str, str]) -> None:
    assert callable(layers)
    options = {"num_layers": 3, "speculative": models.speculative(draft_heads=4), "kv_heads": 4}
    src = build("prefill", layers(), tp=prefill, order=orders[0], config=options, blocks=24)
    dst = build("decode", layers(), tp=decode, order=orders[1], config=options, blocks=30)
    assert {field.optional for field in src.layout.fields} == {False, True}
    assert reshard_over_nixl(src, dst, TOKENS) > 0
