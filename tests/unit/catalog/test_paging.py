"""Do layers form the block tables, page lengths and block bytes that vLLM 0.32's own functions gave for these models?

Expected numbers were computed by running vLLM's grouping on hand-made specs; none of them comes from this package.
"""

import pytest

from kvreshard.catalog import Model, describe, load, parse_engine, read_model
from kvreshard.catalog.engine import plan_pages
from kvreshard.catalog.paging import LayerPage, TableGroup, group_layers, hybrid_page_tokens


def tables(model: Model, engine: str) -> list[tuple[str, int, int]]:
    """Name, layers and tokens per page of each group."""
    return [(g.name, len(g.layers), g.tokens_per_page) for g in plan_pages(model, parse_engine(engine)).groups]


def block_bytes(model: Model, engine: str) -> int:
    """Bytes of one page over all layers, on rank 0."""
    rank = describe(model, parse_engine(engine), "e", 4).ranks[0]
    return rank.regions[0].size_bytes // 4


@pytest.mark.parametrize(
    ("tp", "window_tokens", "full_tokens", "expected_bytes"),
    [(1, 16, 32, 655360), (2, 16, 32, 327680), (4, 16, 16, 163840), (8, 32, 16, 163840)],
)
def test_gemma_4_26b(tp: int, window_tokens: int, full_tokens: int, expected_bytes: int) -> None:
    model = load("gemma-4-26b-a4b")
    expected = [(f"window.{i}", 5, window_tokens) for i in range(5)] + [("full", 5, full_tokens)]
    assert tables(model, f"tp={tp}") == expected
    assert block_bytes(model, f"tp={tp}") == expected_bytes


def test_gemma_4_26b_block_outermost_keeps_page_lengths_and_makes_14_groups() -> None:
    model = load("gemma-4-26b-a4b")
    found = tables(model, "tp=2,order=BLHNC")
    assert sorted(num_layers for name, num_layers, _ in found if name.startswith("window")) == [1] + [2] * 12
    assert [entry for entry in found if entry[0] == "full"] == [("full", 5, 16)]
    assert {tokens for _, _, tokens in found} == {16}
    assert block_bytes(model, "tp=2,order=BLHNC") == 163840


def test_gemma_4_26b_pipeline_keeps_groups_and_shares_them_over_stages() -> None:
    layout = describe(load("gemma-4-26b-a4b"), parse_engine("tp=2,pp=4"), "e", 4)
    names = [group.name for group in layout.groups]
    counts = []
    for stage in range(4):
        shards = layout.ranks[2 * stage].shards
        counts.append([sum(s.field.endswith(".k") and s.geometry.group == name for s in shards) for name in names])
    assert counts == [[2, 1, 1, 1, 1, 1], [1, 2, 2, 1, 1, 1], [1, 1, 1, 2, 2, 1], [1, 1, 1, 1, 1, 2]]
    assert {rank.regions[0].size_bytes // 4 for rank in layout.ranks} == {131072}


def test_gemma_3_27b_splits_windows_by_strides() -> None:
    model = load("gemma-3-27b")
    groups = plan_pages(model, parse_engine("tp=1")).groups
    assert [len(g.layers) for g in groups] == [9, 9, 9, 9, 8, 8, 10]
    windows = [f"layers.{i}.attn" for i in range(62) if (i + 1) % 6]
    assert groups[0].layers == tuple(windows[0::6])
    assert block_bytes(model, "tp=1") == 1310720


def test_gpt_oss_groups_windows_first() -> None:
    model = load("gpt-oss-120b")
    assert tables(model, "tp=1") == [("window", 18, 16), ("full", 18, 16)]
    assert block_bytes(model, "tp=1") == 589824


def test_nearly_equal_buckets_are_not_split() -> None:
    windows = [LayerPage(f"s{i}", "window", "window", "w", 16, 32768, 128) for i in range(12)]
    full = [LayerPage(f"f{i}", "full", "full", "f", 16, 32768) for i in range(13)]
    groups = group_layers([*windows, *full], block_outermost=False)
    assert [len(group.layers) for group in groups] == [12, 13]
    assert max(sum(layer.page_bytes for layer in group.layers) for group in groups) == 425984
    seven = group_layers([*full[:4], *windows[:7]], block_outermost=False)
    assert [len(group.layers) for group in seven] == [4, 4, 3]


@pytest.mark.parametrize(("dtype", "expected"), [("fp8_ds_mla", 3076352), ("auto", 5012736)])
@pytest.mark.parametrize("order", ["NHD", "BLHNC"])
def test_deepseek_v32_has_one_group_indexers_first(dtype: str, expected: int, order: str) -> None:
    model = load("deepseek-v3.2")
    engine = f"tp=8,order={order},dtype={dtype}"
    assert tables(model, engine) == [("latent", 122, 64)]
    assert block_bytes(model, engine) == expected
    rank = describe(model, parse_engine(engine), "e", 4).ranks[0]
    pages = 1 if order == "BLHNC" else 4
    assert rank.shard_by_field["layers.0.indexer.index_k"].offset_bytes == 0
    assert rank.shard_by_field["layers.0.attn.latent"].offset_bytes == 61 * 8448 * pages


@pytest.mark.parametrize(("tp", "expected"), [(1, 6594560), (8, 4759552)])
def test_kimi_with_its_draft_is_one_group_of_unequal_pages(tp: int, expected: int) -> None:
    model = load("kimi-k2.5-eagle3")
    engine = f"tp={tp},page=64"
    assert tables(model, engine) == [("full", 62, 64)]
    assert block_bytes(model, engine) == expected
    rank = describe(model, parse_engine(engine), "e", 4).ranks[0]
    assert rank.shard_by_field["draft.0.attn.k"].offset_bytes == 61 * 73728 * 4


@pytest.mark.parametrize(
    ("model", "dtype", "tp", "tokens", "page_bytes"),
    [
        ("nemotron-3-nano-30b-a3b", "auto", 1, 2096, 2146304),
        ("nemotron-3-nano-30b-a3b", "auto", 2, 2096, 1073152),
        ("nemotron-3-nano-30b-a3b", "auto", 4, 1056, 540672),
        ("nemotron-3-nano-30b-a3b", "auto", 8, 528, 270336),
        ("nemotron-3-nano-30b-a3b", "fp8", 1, 4176, 2138112),
        ("nemotron-3-nano-30b-a3b", "fp8", 2, 4176, 1069056),
        ("nemotron-3-nano-30b-a3b", "fp8", 4, 2096, 536576),
        ("nemotron-3-nano-30b-a3b", "fp8", 8, 1056, 270336),
        ("granite-4-h-small", "auto", 1, 528, 2162688),
        ("granite-4-h-small", "auto", 2, 528, 1081344),
        ("granite-4-h-small", "auto", 4, 528, 540672),
        ("granite-4-h-small", "auto", 8, 528, 270336),
        ("falcon-h1-34b", "auto", 1, 1040, 2129920),
        ("falcon-h1-34b", "auto", 2, 1040, 1064960),
        ("qwen3-next-80b-a3b", "auto", 1, 544, 1114112),
        ("qwen3-next-80b-a3b", "auto", 2, 544, 557056),
        ("qwen3-next-80b-a3b", "auto", 4, 272, 278528),
        ("jamba-1.5-mini", "auto", 1, 80, 327680),
        ("jamba-1.5-mini", "auto", 8, 80, 40960),
    ],
)
def test_hybrids_widen_the_attention_page(model: str, dtype: str, tp: int, tokens: int, page_bytes: int) -> None:
    plan = plan_pages(load(model), parse_engine(f"tp={tp},dtype={dtype}"))
    assert {g.tokens_per_page for g in plan.groups if g.name == "full"} == {tokens}
    assert {page.page_bytes for page in plan.pages} == {page_bytes}
    assert {g.padded_page_bytes for g in plan.groups if g.name.startswith("state")} == {page_bytes}


@pytest.mark.parametrize(
    ("model", "states", "full"),
    [
        ("nemotron-3-nano-30b-a3b", [6, 6, 6, 5], 6),
        ("granite-4-h-small", [4] * 9, 4),
        ("falcon-h1-34b", [72], 72),
        ("qwen3-next-80b-a3b", [12, 12, 12], 12),
        ("jamba-1.5-mini", [4] * 7, 4),
    ],
)
def test_hybrids_group_states(model: str, states: list[int], full: int) -> None:
    found = tables(load(model), "tp=1")
    assert [n for name, n, _ in found if name.startswith("state")] == states
    assert [n for name, n, _ in found if name == "full"] == [full]


def test_qwen3_next_with_a_float32_state() -> None:
    raw = {**CONFIG_QWEN3_NEXT, "mamba_ssm_dtype": "float32"}
    model = read_model("test", raw)
    assert [plan_pages(model, parse_engine(f"tp={tp}")).groups[-1].tokens_per_page for tp in (1, 2, 4)] == [
        1056,
        1056,
        528,
    ]


CONFIG_QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}


def test_a_user_page_size_is_rounded_up_to_hold_a_state() -> None:
    assert hybrid_page_tokens(64, 2134016, 1024) == 2112
    assert hybrid_page_tokens(4096, 2134016, 1024) == 4096
    assert hybrid_page_tokens(24, 100, 100) == 32
    assert hybrid_page_tokens(16, 100000, 1152, latent=True) == 128


@pytest.mark.parametrize(
    ("dtype", "expected", "pages"),
    [
        ("auto", 1002240, {8640, 37440, 1728, 32832}),
        ("bfloat16", 1600000, {8704, 65536, 2048, 32768, 8192}),
    ],
)
def test_deepseek_v4_flash_packs_five_groups(dtype: str, expected: int, pages: set[int]) -> None:
    model = load("deepseek-v4-flash")
    plan = plan_pages(model, parse_engine(f"tp=8,dtype={dtype}"))
    assert [(g.name, len(g.layers), g.tokens_per_page) for g in plan.groups] == [
        ("window.0", 22, 64),
        ("window.1", 21, 64),
        ("latent", 62, 256),
        ("compressor.0", 42, 4),
        ("compressor.1", 20, 8),
    ]
    assert {page.page_bytes for page in plan.pages} == pages
    assert block_bytes(model, f"tp=8,dtype={dtype}") == expected


def test_deepseek_v4_flash_tensors_lie_where_vllm_puts_them() -> None:
    rank = describe(load("deepseek-v4-flash"), parse_engine("tp=2"), "e", 4).ranks[1]
    first = {
        "layers.2.indexer.index_k": 0,
        "layers.2.attn.latent": 181440,
        "layers.3.attn.latent": 967680,
        "layers.2.indexer_compressor.partial": 0,
        "layers.2.compressor.partial": 181440,
        "layers.3.compressor.partial": 0,
        "layers.1.window.latent": 0,
        "layers.2.window.latent": 37440,
    }
    assert {name: rank.shard_by_field[name].offset_bytes for name in first} == first
    assert rank.shard_by_field["layers.2.attn.latent_scale"].offset_bytes == 181440 + 64 * 576
    assert rank.shard_by_field["layers.3.attn.latent_scale"].offset_bytes == 967680 + 2 * 576
    assert {shard.geometry.page_stride_bytes for shard in rank.shards} == {1002240}


def test_deepseek_v4_predicting_layer_joins_the_second_window_group() -> None:
    groups = plan_pages(load("deepseek-v4-flash"), parse_engine("tp=1,spec=1")).groups
    assert "mtp.0.window" in groups[1].layers
    assert [len(g.layers) for g in groups] == [22, 22, 62, 42, 20]


def page(name: str, base: str, spec: str, size: int, window: int | None = None, rows: bool = False) -> LayerPage:
    return LayerPage(name, base, base, spec, 16, size, window, rows)


def test_a_window_that_does_not_divide_is_padded() -> None:
    groups = group_layers(
        [page("f", "full", "f", 24576), page("s", "window", "s", 16384, 100), page("t", "window", "s", 16384, 100)],
        block_outermost=False,
    )
    assert [(g.tokens_per_page, g.page_bytes, len(g.layers)) for g in groups] == [
        (16, 24576, 1),
        (16, 24576, 1),
        (16, 24576, 1),
    ]


def test_windows_next_to_a_latent_that_does_not_divide_are_kept_whole() -> None:
    latents = [page(f"m{i}", "full", "m", 18432, rows=True) for i in range(4)]
    groups = group_layers([*latents, page("d", "window", "d", 65536, 2048)], block_outermost=False)
    assert [(len(g.layers), sum(layer.page_bytes for layer in g.layers)) for g in groups] == [(5, 4 * 18432 + 65536)]
    # A smaller window page is padded to the latent's, and keeps a table of its own.
    groups = group_layers([*latents, page("d", "window", "d", 16384, 2048)], block_outermost=False)
    assert [len(g.layers) for g in groups] == [1, 1, 1, 1, 1]


def test_small_states_are_padded_to_a_draft() -> None:
    states = [LayerPage(f"m{i}", "state", "state", "m", 0, 384) for i in range(2)]
    groups = group_layers([*states, page("a", "full", "a", 8192)], block_outermost=False)
    assert [(g.page_bytes, len(g.layers)) for g in groups] == [(8192, 1), (8192, 1), (8192, 1)]


def test_no_layers_no_groups() -> None:
    assert group_layers([], block_outermost=True) == ()


def test_every_layer_is_in_one_group() -> None:
    mixed = [page(f"{base}{i}", base, f"{base}{i % 2}", 1024 * (1 + i % 2), 64 if base == "window" else None)
             for i in range(7) for base in ("full", "window")]  # fmt: skip
    for block_outermost in (False, True):
        groups: tuple[TableGroup, ...] = group_layers(mixed, block_outermost=block_outermost)
        assert sorted(layer.name for g in groups for layer in g.layers) == sorted(layer.name for layer in mixed)
