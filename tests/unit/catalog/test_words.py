"""Every word that a row's rules give a layer means a cache, and every word that a row defines is given to some layer."""

import pytest

from kvreshard.catalog.caches import USUAL
from kvreshard.catalog.config import Config
from kvreshard.catalog.families import FAMILIES
from kvreshard.model import LayoutError

NUM_LAYERS = 8
EVERY_OTHER = [1, 0] * 4
# All types of layers that any family lists.
TYPES = (
    "full_attention sliding_attention chunked_attention linear_attention conv mamba attention hybrid mlp moe sparse_attention sparse "
    "indexed_attention deepseek_sparse_attention qwen_sparse_attention minimax_m3_sparse"
).split()
FIELDS = {
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "sliding_window": 64,
    "sliding_window_pattern": 4,
    "full_attention_interval": 4,
    "num_kv_shared_layers": 2,
    "interleaved_sliding_window": [64, None] * 4,
    "block_configs": [{"attention": {"no_op": False}}, {"attention": {"no_op": True}}] * 4,
    "hybrid_layer_pattern": EVERY_OTHER,
    "local_layer_ids": [0, 2],
    "sparse_attention_config": {"sparse_attention_freq": EVERY_OTHER},
    "indexer_n_heads": 4,
    "ple_layer_ids": [1],
    "attn_layer_period": 4,
    "attn_layer_offset": 1,
    "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]},
    "layer_group_size": 4,
    "full_attn_idxs": [2],
    "index_topk_freq": 2,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "compress_ratios": [0, 4, 128, 1, 0, 4, 128, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2],
    "attention_other_setting": {"attention_type": "sliding_attention"},
    "mtp_config": {"local_layer_ids": [0]},
    "mtp_layers_block_type": ["attention", "mlp"],
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 1,
    "num_mtp_modules": 1,
}  # fmt: skip
# What makes a family take another branch.
OTHERWISE = (
    {},
    {"num_nextn_predict_layers": 1},
    {"index_topk_pattern": "FS" * 4},
    {"short_conv_kernel_size": 4},
    {"qk_nope_head_dim": 0, "qk_rope_head_dim": 0},
    {"indexer_n_heads": None},
    {"compress_ratios": [0, 1, 2, 2, 0, 1, 2, 0]},
    {"attention_other_setting": {"attention_type": "full_attention"}},
    {"sparse_attention_config": None},
)


def layer_lists() -> list[dict[str, object]]:
    """No list of layer types, and each type for all layers, also with one more layer that predicts, and with a full one as the last."""
    types = [
        types
        for kind in TYPES
        for types in ([kind] * NUM_LAYERS, [kind] * (NUM_LAYERS + 1), [*[kind] * (NUM_LAYERS - 1), "full_attention"])
    ]
    return [{}, *({"layer_types": listed, "layers_block_type": listed} for listed in types)]


def words_of(model_type: str) -> set[str]:
    """All words that the rules of a row give."""
    row, found = FAMILIES[model_type], set[str]()
    assert row.layers is not None
    for otherwise in OTHERWISE:
        for listed in layer_lists():
            fields = {**FIELDS, **otherwise, **listed, "model_type": model_type}
            config = Config("m", fields, family=row)
            try:
                layers = row.layers(config, NUM_LAYERS)
                found |= {word for words in layers for word in words.split()}
                found |= {word for words in row.predicts(config, layers) for word in words.split()}
            except LayoutError:
                continue
    return found


@pytest.mark.parametrize("model_type", [name for name, row in FAMILIES.items() if row.layers is not None])
def test_words_and_caches_agree(model_type: str) -> None:
    row, words = FAMILIES[model_type], words_of(model_type)
    assert words
    assert words <= row.caches.keys() | USUAL.keys()
    assert row.caches.keys() <= words
