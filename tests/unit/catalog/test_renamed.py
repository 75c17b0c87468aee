"""Are files read that call the usual fields otherwise, and do errors speak of the file's own names?"""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.catalog.test_config import GEMMA_4, LATENT, PLAIN, changed, kinds, windows

from kvreshard.catalog import read_model
from kvreshard.kinds import Attention, Latent, Mamba2
from kvreshard.model import LayoutError

DTYPE = {"dtype": "bfloat16"}
GPT: dict[str, Any] = {**DTYPE, "model_type": "gpt2", "n_layer": 3, "n_head": 12, "n_embd": 768}
FALCON: dict[str, Any] = {
    **DTYPE, "model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 1024, "num_kv_heads": 4,
    "new_decoder_architecture": True, "multi_query": True,
}  # fmt: skip
DBRX: dict[str, Any] = {
    **DTYPE, "model_type": "dbrx", "n_layers": 2, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8},
}  # fmt: skip
NAS: dict[str, Any] = {
    **PLAIN, "model_type": "nemotron-nas", "num_key_value_heads": None,
    "block_configs": [
        {"attention": {"no_op": False, "n_heads_in_group": 8}},
        {"attention": {"no_op": True, "n_heads_in_group": None}},
        {"attention": {"no_op": False, "n_heads_in_group": 16}},
        {"attention": {"no_op": False, "n_heads_in_group": None, "replace_with_linear": True}},
    ],
}  # fmt: skip
ZAMBA: dict[str, Any] = {**PLAIN, "model_type": "zamba2", "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (GPT, Attention(12, 64, "bfloat16")),
        (changed(GPT, model_type="gptj"), Attention(12, 64, "bfloat16")),
        (changed(PLAIN, model_type="bloom", num_hidden_layers=None, n_layer=2, num_key_value_heads=None, num_attention_heads=None,
                 n_head=16), Attention(16, 256, "bfloat16")),
        (changed(PLAIN, model_type="opt", num_key_value_heads=None), Attention(32, 128, "bfloat16")),
        (changed(PLAIN, model_type="exaone", num_hidden_layers=None, num_layers=3), Attention(8, 128, "bfloat16")),
        (changed(PLAIN, model_type="gpt_neox", num_key_value_heads=None), Attention(32, 128, "bfloat16")),
        (changed(GPT, model_type="gpt_bigcode"), Attention(1, 64, "bfloat16")),
        (changed(GPT, model_type="gpt_bigcode", multi_query=False), Attention(12, 64, "bfloat16")),
        (changed(PLAIN, model_type="telechat", num_hidden_layers=None, num_attention_heads=None, num_key_value_heads=None, n_layer=2,
                 n_head=16), Attention(16, 256, "bfloat16")),
        (FALCON, Attention(4, 64, "bfloat16")),
        (changed(FALCON, new_decoder_architecture=None), Attention(1, 64, "bfloat16")),
        (changed(FALCON, new_decoder_architecture=False, multi_query=False), Attention(16, 64, "bfloat16")),
        (changed(FALCON, num_kv_heads=None), Attention(16, 64, "bfloat16")),
        ({**DTYPE, "model_type": "RefinedWeb", "n_layer": 2, "n_head": 128, "hidden_size": 8192, "n_head_kv": 8},
         Attention(8, 64, "bfloat16")),
        ({**DTYPE, "model_type": "RefinedWebModel", "n_layer": 2, "n_head": 71, "hidden_size": 4544, "multi_query": True},
         Attention(1, 64, "bfloat16")),
        (DBRX, Attention(8, 128, "bfloat16")),
        (changed(PLAIN, model_type="chatglm", num_hidden_layers=None, num_layers=3, num_key_value_heads=None,
                 multi_query_attention=True, multi_query_group_num=2), Attention(2, 128, "bfloat16")),
        (changed(PLAIN, model_type="chatglm", num_hidden_layers=None, num_layers=3, num_key_value_heads=None,
                 multi_query_group_num=2), Attention(32, 128, "bfloat16")),
        (changed(PLAIN, model_type="step3_text", num_attention_groups=1, num_key_value_heads=None, head_dim=256, share_q_dim=2048),
         Attention(1, 256, "bfloat16")),
        *(({**changed(PLAIN, model_type="step1", head_dim=None), **fields}, Attention(heads, 128, "bfloat16"))
          for fields, heads in (({"num_attention_groups": 4}, 4), ({"num_attention_groups": None}, 1), ({}, 8))),
        ({**DTYPE, "model_type": "moondream3", "config": {"text": {"n_layers": 3}}}, Attention(32, 64, "bfloat16")),
        ({**DTYPE, "model_type": "moondream3_text", "n_layers": 3, "n_heads": 24, "n_kv_heads": 8, "dim": 1536}, Attention(8, 64, "bfloat16")),
        (changed(LATENT, model_type="minicpm3", num_key_value_heads=40, qk_nope_head_dim=64, qk_rope_head_dim=32),
         Attention(32, 96, "bfloat16")),
        *((changed(LATENT, model_type=name), Latent(576, "bfloat16")) for name in ("axk1", "pangu_ultra_moe", "sarvam_mla")),
    ],
)  # fmt: skip
def test_every_layer_has_the_heads_that_the_file_says(raw: dict[str, Any], expected: object) -> None:
    assert set(kinds(read_model("m", raw)).values()) == {expected}


def test_layers_found_by_a_search_have_heads_of_their_own_or_none() -> None:
    assert kinds(read_model("m", NAS)) == {
        "layers.0.attn": Attention(4, 128, "bfloat16"),
        "layers.2.attn": Attention(2, 128, "bfloat16"),
    }


def test_two_latents_per_layer() -> None:
    model = read_model("m", changed(LATENT, model_type="longcat_flash", num_hidden_layers=None, num_layers=2))
    assert [(layer.name, layer.index) for layer in model.layers if not layer.predicts] == [
        ("layers.0.attn.0", 0), ("layers.0.attn.1", 0), ("layers.1.attn.0", 1), ("layers.1.attn.1", 1),
    ]  # fmt: skip


def test_attention_of_zamba_is_registered_before_the_states() -> None:
    model = read_model("m", ZAMBA)
    state = Mamba2(8, 1024, 1, 64, 4, "bfloat16", "bfloat16")
    assert [(layer.name, layer.kind) for layer in model.layers] == [
        *((f"layers.{index}.attn", Attention(32, 256, "bfloat16")) for index in (1, 3)),
        *((f"layers.{index}.mamba", state) for index in range(4)),
    ]


def test_the_first_layers_of_a_model_have_a_period_of_their_own() -> None:
    raw = changed(PLAIN, model_type="cohere2_moe", num_hidden_layers=8, first_k_dense_replace=2)
    assert windows(read_model("m", raw)) == [None, None, 4097, 4097, 4097, None, 4097, 4097]
    inner = changed(raw, prefix_dense_sliding_window_pattern=2, sliding_window_pattern=3)
    assert windows(read_model("m", inner)) == [4097, None, 4097, 4097, None, 4097, 4097, None]
    assert windows(read_model("m", changed(raw, first_k_dense_replace=None)))[:4] == [4097, 4097, 4097, None]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"index_topk_freq": 4}, "FFSSSFS"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "SFSFSFS"),
        ({"index_topk_pattern": "FSS"}, "FSSFFFF"),
        ({}, "FFFFFFF"),
        (
            {
                "index_topk_freq": 4,
                "index_skip_topk_offset": 3,
                "index_topk_pattern": None,
                "indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full"],
            },
            "FFFSSSF",
        ),
        ({"index_topk_pattern": "FSS", "indexer_types": ["full", "shared", "shared"] + ["full"] * 4}, "FSSFFFF"),
    ],
)
def test_layers_that_share_an_indexer_have_none(fields: dict[str, Any], expected: str) -> None:
    raw = changed(
        LATENT, model_type="glm_moe_dsa", index_head_dim=128, num_hidden_layers=7, num_nextn_predict_layers=1, **fields
    )
    names = [layer.name for layer in read_model("m", raw).layers]
    assert [f"layers.{index}.indexer" in names for index in range(7)] == [letter == "F" for letter in expected]
    assert "mtp.0.indexer" in names


def test_what_differs_per_layer_is_read_for_gemma_4() -> None:
    named = changed(GEMMA_4, global_head_dim=None, num_global_key_value_heads=None)
    listed = changed(named, per_layer_config={"03": {"head_dim": 512, "num_key_value_heads": 2}})
    assert kinds(read_model("m", listed)) == kinds(read_model("m", GEMMA_4))


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (changed(GPT, n_layer=0), "field 'n_layer': is 0"),
        (changed(GPT, n_embd="768"), "field 'n_embd': is '768'"),
        (changed(GPT, n_head=None), "field 'n_head': is missing"),
        (changed(DBRX, attn_config={}), "attn_config.kv_n_heads': is missing"),
        (changed(NAS, block_configs=[]), "block_configs': is no list with an entry per layer; list 4 blocks"),
        (changed(NAS, block_configs=[{"attention": {"n_heads_in_group": 5}}] * 4), r"block_configs\[0\].attention.n_heads_in_group': is 5; it must divide 32"),
        (changed(NAS, block_configs=[7] * 4), "attention.n_heads_in_group': is missing"),
        (changed(PLAIN, per_layer_config={"1": {"num_key_value_heads": 4}}),
         "per_layer_config.1.num_key_value_heads': differs from the other layers'"),
        (changed(PLAIN, num_key_value_heads=None, per_layer_config={"1": {"num_attention_heads": 16}}),
         "per_layer_config.1.num_attention_heads': differs"),
        (changed(PLAIN, per_layer_config=[1]), r"per_layer_config': is \[1\]; give an object"),
        (changed(GEMMA_4, per_layer_config={"x": {}}), "per_layer_config': has {'x': {}}; give an object with fields per layer"),
        (changed(GEMMA_4, per_layer_config={"1": {"head_dim": 0}}), "head_dim': is 0"),
        (changed(GEMMA_4, use_bidirectional_attention="all"), "use_bidirectional_attention': is 'all'"),
        (changed(GEMMA_4, global_head_dim=None), "global_head_dim': is missing"),
        (changed(PLAIN, model_type="gemma3_text", head_dim=128, use_bidirectional_attention=True),
         "use_bidirectional_attention': is True"),
        (changed(ZAMBA, layers_block_type=["mamba"]), "layers_block_type': has 1 entries for 4 decoder layers"),
        (changed(LATENT, model_type="glm_moe_dsa", index_head_dim=128, indexer_types=["full", "shared"] * 2),
         r"indexer_types\[1\]': is 'shared'"),
        (changed(PLAIN, model_type="some_loops", loop_num=2), "loop_num': is set, and model type 'some_loops' is not known"),
    ],
)  # fmt: skip
def test_a_field_is_refused_by_the_name_that_the_file_gives_it(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        read_model("m", raw)


def test_query_heads_that_differ_shape_no_cache() -> None:
    differing = changed(PLAIN, per_layer_config={"1": {"num_attention_heads": 16}})
    assert read_model("m", differing).layers == read_model("m", PLAIN).layers
