"""Recurrent states beside attention: shapes and views by vLLM's own calculators, in both orders of the convolution."""

import pytest

pytest.importorskip("vllm")

import numpy as np
from tests.vllm import models
from tests.vllm.engines import LAYOUTS, Side, build, give_pages, read, reshard, run, write
from vllm.model_executor.layers.mamba import mamba_utils

from kvreshard.model import LayoutError, LayoutMismatch

pytestmark = pytest.mark.vllm
TOKENS = 40


@pytest.fixture(params=["SD", "DS"])
def dim_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """The order that vLLM's own function says, in this process."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: request.param)
    assert mamba_utils.is_conv_state_dim_first() == (request.param == "DS")
    return bool(request.param == "DS")


def pair(layers: models.Layers, tps: tuple[int, int], orders: tuple[str, str] = ("LBHNC", "LBNHC")) -> None:
    src, dst = (
        build(engine, layers, tp=tp, order=order, blocks=30, config={"kv_heads": 4})
        for engine, tp, order in zip(("prefill", "decode"), tps, orders, strict=True)
    )
    reshard(src, dst, TOKENS)


@pytest.mark.parametrize("tps", [(1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("groups", [1, 4])
def test_mamba2(tps: tuple[int, int], groups: int, dim_first: bool) -> None:
    layers = {models.name(i, "mixer"): models.mamba2(8, 4, groups, 6, 4, dim_first=dim_first) for i in (0, 1, 3)}
    layers[models.name(2)] = models.attention(4, 8, bs=32)
    pair(layers, tps)


@pytest.mark.parametrize("tps", [(1, 2), (2, 4)])
def test_gated_delta(tps: tuple[int, int], dim_first: bool) -> None:
    layers = {models.name(i, "linear_attn"): models.gated_delta(4, 8, 6, 4, 4, dim_first=dim_first) for i in (0, 1)}
    layers[models.name(2)] = models.attention(4, 8, bs=64)
    pair(layers, tps)


@pytest.mark.parametrize("kind", ["mamba1", "kimi-delta", "short-conv", "linear"])
def test_other_states(kind: str, dim_first: bool) -> None:
    layer = {
        "mamba1": lambda: models.mamba1(16, 4, 4, dim_first=dim_first),
        "kimi-delta": lambda: models.kimi_delta(4, 6, 4, dim_first=dim_first),
        "short-conv": lambda: models.short_conv(16, 3, dim_first=dim_first),
        "linear": lambda: models.linear(4, 6),
    }[kind]()
    pair({models.name(0, "mixer"): layer, models.name(1): models.attention(4, 8, bs=32)}, (2, 1))


@pytest.mark.parametrize("num_spec", [0, 2])
def test_columns_of_speculation_are_scratch(num_spec: int, dim_first: bool) -> None:
    src = {models.name(0, "mixer"): models.mamba2(4, 4, 2, 6, 4, dim_first=dim_first, num_spec=num_spec)}
    dst = {models.name(0, "mixer"): models.mamba2(4, 4, 2, 6, 4, dim_first=dim_first, num_spec=3)}
    reshard(build("prefill", src, tp=2), build("decode", dst), TOKENS)


@pytest.mark.parametrize("order", [order for order in LAYOUTS if order[:2] in ("LB", "BL")])
def test_padded_pages(order: str, dim_first: bool) -> None:
    """A state in a page of 4096 bytes, of which it fills 1376, overlaid with attention pages."""
    layers = {models.name(i, "mixer"): models.mamba2(8, 4, 4, 6, 4, dim_first=dim_first, padded=4096) for i in (0, 1)}
    layers[models.name(2)] = models.attention(4, 8, bs=32)
    src = build("prefill", layers, order=order, blocks=30)
    dst = build("decode", layers, tp=2, order="LBNHC", blocks=30, config={"kv_heads": 4})
    assert {shard.geometry.page_stride_bytes for shard in src.layout.ranks[0].shards} == {4096}
    reshard(src, dst, TOKENS)


def test_orders_of_the_convolution_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = []
    for engine, order, tp in (("prefill", "SD", 2), ("decode", "DS", 1)):
        monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda order=order: order)
        layers = {models.name(0, "mixer"): models.mamba2(4, 4, 2, 6, 4, dim_first=order == "DS")}
        sides.append(build(engine, layers, tp=tp))
    reshard(sides[0], sides[1], TOKENS)


def test_shapes_that_contradict_the_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "SD")
    layer = models.mamba2(8, 4, 2, 6, 4, dim_first=False)
    assert build("prefill", {"model.layers.0.mixer": layer}, tp=2).layout.fields
    for changes, info in (
        ({"n_groups": 4}, "shape (3, 28)|expected 40 channels"),
        ({"conv_kernel_size": 5}, "expected 28 channels and 4 taps"),
        ({"num_heads": 4, "head_dim": 8}, "(4, 4, 6)|(2, 8, 6)"),
    ):
        sizes = {**layer.info.state_sizes, **changes}
        layer_info_of = models.LayerInfo("MAMBA", "", "cuda", state_form="mamba2", state_sizes=sizes)
        wrong = models.ModelLayer(layer.spec, layer_info_of, layer.writer)
        with pytest.raises(LayoutError) as caught:
            build("prefill", {"model.layers.0.mixer": wrong}, tp=2)
        for fact in ("layer 'model.layers.0.mixer'", *info.split("|")):
            assert fact in str(caught.value)


def test_an_order_that_the_shapes_do_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "SD")
    layer = models.mamba2(8, 4, 2, 6, 4, dim_first=False)
    spec = layer.spec(models.RankPlace())
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    fixed = models.ModelLayer(lambda place: spec, layer.info, layer.writer)
    with pytest.raises(LayoutError, match="VLLM_SSM_CONV_STATE_LAYOUT"):
        build("prefill", {"model.layers.0.mixer": fixed})


def test_an_unknown_state_is_moved_whole_between_equal_ranks_only(dim_first: bool) -> None:
    known = models.mamba2(4, 4, 2, 6, 4, dim_first=dim_first)
    unknown = models.ModelLayer(known.spec, models.LayerInfo("MAMBA", "", "cuda"), known.writer)
    layers = {models.name(0, "mixer"): unknown}
    src, dst, other = build("prefill", layers, tp=2), build("decode", layers, tp=2), build("decode", layers)
    assert [field.encoding.startswith("opaque/") for field in src.layout.fields] == [True]
    reshard_opaque(src, dst)
    with pytest.raises(LayoutMismatch, match="axis 'part'"):
        reshard_opaque(src, other)


def reshard_opaque(src: Side, dst: Side) -> None:
    """Labels are not looked up by address, since no coordinate has a meaning, but must arrive where the backend reads."""
    rng = np.random.default_rng(1)
    give_pages(src, TOKENS, rng)
    give_pages(dst, TOKENS, rng)
    write(src, TOKENS)
    run(src, dst, TOKENS, rng)
    read(dst, TOKENS)


def test_an_unknown_state_in_another_order_is_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both orders have equally many bytes."""
    sides = []
    for order in ("SD", "DS"):
        monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda order=order: order)
        known = models.mamba2(4, 4, 2, 6, 4, dim_first=order == "DS")
        unknown = models.ModelLayer(known.spec, models.LayerInfo("MAMBA", "", "cuda"), known.writer)
        sides.append(build("prefill", {models.name(0, "mixer"): unknown}))
    with pytest.raises(LayoutMismatch, match="encoding"):
        reshard_opaque(*sides)
