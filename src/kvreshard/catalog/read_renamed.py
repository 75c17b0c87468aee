"""Attention models whose files call the usual fields otherwise, or count KV heads in a way of their own.

| model types | KV heads | source |
|---|---|---|
| `opt`, `gpt2`, `gptj`, `bloom`, `gpt_neox` | one per query head | `OPTConfig`, `GPT2Config`, `GPTJConfig`, `BloomConfig`, `GPTNeoXConfig` |
| `gpt_bigcode` | one, or with `multi_query` false one per query head | `GPTBigCodeConfig` |
| `telechat` | `num_key_value_heads`, else one per query head | vLLM 0.32 `telechat2.py` |
| `falcon`, `RefinedWeb`, `RefinedWebModel` | `num_kv_heads` in the newer architecture, else one, or one per query head | vLLM 0.32 `falcon.py`, `configs/falcon.py` |
| `dbrx` | `attn_config.kv_n_heads` | `DbrxConfig` |
| `chatglm` | `multi_query_group_num`, or one per query head | vLLM 0.32 `chatglm.py` |
| `exaone` | `num_key_value_heads` | vLLM 0.32 `exaone.py` |
| `step1` | `num_attention_groups`, else `num_key_value_heads`, else one | vLLM 0.32 `step1.py` |
| `moondream3`, `moondream3_text` | `n_kv_heads`; the file has these under `config.text`, and vLLM knows what it leaves out | vLLM 0.32 `configs/moondream3.py` |
| `step3_text` | one | vLLM 0.32 `step3_text.py` |
| `nemotron-nas` | per layer: query heads over `block_configs[].attention.n_heads_in_group`; none where it is a `no_op` | vLLM 0.32 `nemotron_nas.py` |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvreshard.catalog.config import Config
from kvreshard.catalog.layers import Model, attention_layer
from kvreshard.catalog.read_attention import read_plain

NAMES: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"},
    "gptj": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "opt": {},
    "gpt_neox": {},
    "telechat": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "exaone": {"num_hidden_layers": "num_layers"},
}
MOONDREAM_NAMES = {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "hidden_size": "dim",
}
MOONDREAM_DEFAULTS = {"n_layers": 24, "n_heads": 32, "n_kv_heads": 32, "dim": 2048}
# The oldest Falcon files. This size is that of the one which had the newer architecture before it had a field for that.
REFINED_WEB = ("RefinedWeb", "RefinedWebModel")
REFINED_WEB_NAMES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"}
NEWER_HIDDEN_SIZE = 8192


def read_renamed(config: Config) -> Model:
    """Plain attention; without `num_key_value_heads` every query head has its own."""
    return read_plain(config.renamed(NAMES[config.model_type]))


def read_falcon(config: Config) -> Model:
    """In files of the older architecture `num_kv_heads` says nothing."""
    is_newer = config.flag("new_decoder_architecture", False)
    if config.model_type in REFINED_WEB:
        config = config.renamed(REFINED_WEB_NAMES)
        is_newer = is_newer or config.count("hidden_size") == NEWER_HIDDEN_SIZE
    num_heads = config.count("num_attention_heads")
    num_kv_heads = 1 if config.flag("multi_query", True) else num_heads
    if is_newer:
        num_kv_heads = config.count("num_kv_heads", num_heads)
    return read_plain(config.with_fields(num_key_value_heads=num_kv_heads))


def read_bigcode(config: Config) -> Model:
    """GPT-2's names; all query heads share one K and V unless `multi_query` is false."""
    usual = config.renamed(NAMES["gpt2"])
    is_shared = config.flag("multi_query", True)
    return read_plain(usual.with_fields(num_key_value_heads=1 if is_shared else usual.count("num_attention_heads")))


def read_dbrx(config: Config) -> Model:
    """Layers, heads and width under names of their own, KV heads in an object inside."""
    usual = config.renamed(
        {"num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "d_model"}
    )
    return read_plain(usual.with_fields(num_key_value_heads=config.part("attn_config").count("kv_n_heads")))


def read_chatglm(config: Config) -> Model:
    """Groups of query heads share K and V if `multi_query_attention` says so; the width is derived, as in vLLM."""
    usual = config.renamed({"num_hidden_layers": "num_layers"})
    name = "multi_query_group_num" if config.flag("multi_query_attention", False) else "num_attention_heads"
    return read_plain(usual.with_fields(num_key_value_heads=config.count(name), head_dim=None))


def read_step1(config: Config) -> Model:
    """Groups of query heads share K and V; the width is derived, as in vLLM, for which a name that is there decides even if it says null."""
    name = "num_attention_groups" if "num_attention_groups" in config.fields else "num_key_value_heads"
    return read_plain(config.with_fields(num_key_value_heads=config.count(name, 1), head_dim=None))


def read_moondream3(config: Config) -> Model:
    """The language model is an object inside of an object."""
    text = config.part("config").part("text") if config.model_type == "moondream3" else config
    known = {**MOONDREAM_DEFAULTS, **{name: value for name, value in text.fields.items() if value is not None}}
    usual = replace(text, fields=known).renamed(MOONDREAM_NAMES)
    return read_plain(
        usual.with_fields(
            model_type="moondream3", dtype=config.dtype(), head_dim=None, sliding_window=None, layer_types=None
        )
    )


def read_step3_text(config: Config) -> Model:
    """All query heads share one K and V."""
    return read_plain(config.with_fields(num_key_value_heads=1))


def read_nas(config: Config) -> Model:
    """Layers found by a search: each with KV heads of its own, or without attention."""
    num_layers, num_heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    blocks = config.fields.get("block_configs")
    if not isinstance(blocks, Sequence) or len(blocks) != num_layers:
        raise config.error("block_configs", "is no list with an entry per layer", f"list {num_layers} blocks")
    layers = []
    for index, block in enumerate(blocks):
        own = Config(config.model, block if isinstance(block, Mapping) else {}, f"{config.path}block_configs[{index}].")
        attention = own.part("attention")
        if attention.flag("no_op", False) or attention.fields.get("replace_with_linear"):
            continue
        shared = attention.count("n_heads_in_group")
        if num_heads % shared:
            raise attention.error("n_heads_in_group", f"is {shared}", f"it must divide {num_heads} heads")
        layers.append(
            attention_layer(
                f"layers.{index}.attn",
                index,
                num_kv_heads=num_heads // shared,
                head_size=config.head_size(),
                dtype=config.dtype(),
            )
        )
    return Model(config.model, config.model_type, num_layers, tuple(layers), config.dtype(), num_query_heads=num_heads)
