"""Whatever a file holds, is it read, or refused with one error that names a field?"""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.catalog.test_config import DELTA, GEMMA_4, GRANITE, LATENT, NEMOTRON, PLAIN, changed
from tests.unit.catalog.test_families import KIMI, LFM, LLAMA_4, MIMO
from tests.unit.catalog.test_renamed import DBRX, FALCON, GPT, NAS, ZAMBA

from kvreshard.catalog import read_model
from kvreshard.catalog.engine import describe
from kvreshard.catalog.spec import EngineSpec
from kvreshard.model import LayoutError

SPARSE = changed(LATENT, model_type="glm_moe_dsa", index_head_dim=128, index_topk_pattern="FSFS")
FILES = (
    PLAIN, LATENT, SPARSE, NEMOTRON, GRANITE, GEMMA_4, DELTA, KIMI, LFM, LLAMA_4, MIMO, GPT, FALCON, DBRX, NAS, ZAMBA,
    changed(PLAIN, model_type="nobody_knows"),
)  # fmt: skip
MANY_DIGITS = "9" * 5000
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 8), st.sampled_from([1.5, float("nan"), 10**30, -(10**30)]), st.text(max_size=4),
    st.sampled_from([
        "bfloat16", "MM*-", "SSS", MANY_DIGITS, [], [1], [[[]]], ["full_attention"], {}, {"a": 1}, {"1": {"head_dim": -4}},
        {MANY_DIGITS: {"head_dim": 4}}, {"attention": []}, [{"attention": {"n_heads_in_group": 0}}], {"kv_n_heads": [8]},
    ]),
)  # fmt: skip
EXTRA = (
    "per_layer_config",
    "layer_types",
    "dtype",
    "torch_dtype",
    "num_nextn_predict_layers",
    "block_configs",
    "text_config",
)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A file of which some fields hold something else, or parts of their lists do."""
    raw = dict(draw(st.sampled_from(FILES)))
    for name in draw(st.lists(st.sampled_from([*raw, *EXTRA]), min_size=1, max_size=3)):
        value, junk = raw.get(name), draw(JUNK)
        if isinstance(value, list) and value and draw(st.booleans()):
            place = draw(st.integers(0, len(value) - 1))
            junk = [*value[:place], junk, *value[place + 1 :]]
        raw[name] = junk
    return raw


@settings(max_examples=20 * settings.default.max_examples)
@given(damaged(), st.sampled_from([EngineSpec(), EngineSpec(tp=4, spec=2), EngineSpec(tp=3, page=7)]))
def test_a_damaged_file_is_read_or_refused_by_name(raw: dict[str, Any], spec: EngineSpec) -> None:
    with contextlib.suppress(LayoutError):
        describe(read_model("m", raw), spec, "engine")


@pytest.mark.parametrize("junk", [[], [1], {}, 7, True, MANY_DIGITS])
@pytest.mark.parametrize("name", ["dtype", "torch_dtype", "mamba_ssm_cache_dtype"])
def test_a_dtype_that_is_none_is_refused(name: str, junk: object) -> None:
    with pytest.raises(LayoutError, match=f"field '{name}': is ") as refused:
        read_model("m", {**NEMOTRON, name: junk})
    assert len(str(refused.value)) < 300


def count_calls(raw: dict[str, Any], engine: EngineSpec) -> int:
    """How many functions are called to describe a model, built-in ones too: a measure of work that is the same on every machine."""
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        describe(read_model("m", raw), engine, "engine")
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("engine", [EngineSpec(), EngineSpec(tp=2, order="BLHNC")])
def test_four_times_the_layers_are_four_times_the_work(engine: EngineSpec) -> None:
    def layers(number: int) -> dict[str, Any]:
        return changed(
            GEMMA_4, num_hidden_layers=number, layer_types=["sliding_attention", "full_attention"] * (number // 2)
        )

    assert count_calls(layers(800), engine) < 5 * count_calls(layers(200), engine)
