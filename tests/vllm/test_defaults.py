"""Fields that a model's file leaves out, as the configuration class of its family sets them.

The class is the one that vLLM takes: its own where it has one, else transformers'. Each is made twice, of other sizes, without the field.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from kvreshard.catalog.config import Config
from kvreshard.catalog.families import FAMILIES
from kvreshard.model import LayoutError

HEADS = {name for name, row in FAMILIES.items() if row.kv_heads is not None}
SIZES = {name for name, row in FAMILIES.items() if row.head_size is not None}
WINDOW_TOKENS = {
    name: known["sliding_window"]
    for name, row in FAMILIES.items()
    for known in (row.if_absent, row.if_null)
    if "sliding_window" in known
}
# vLLM has a model for these, and their configuration class comes with the weights.
FOREIGN = {
    "PanguEmbedded",
    "TeleFLM",
    "bailing_hybrid",
    "bailing_moe",
    "bailing_moe_v2",
    "deepseek",
    "dots_ocr",
    "exaone",
    "internlm2",
    "iquestloopcoder",
    "kimi_audio",
    "mimo",
    "minicpm",
    "minicpmo",
    "minicpmv",
    "molmo",
    "moondream3_text",
    "nemotron-nas",
    "orion",
    "phi3_v",
    "phi4mm",
    "step1",
    "telechat",
}
# Multiples of the most KV heads that a class has by default, and another width.
ASKED = ({"num_attention_heads": 64, "hidden_size": 64 * 96}, {"num_attention_heads": 96, "hidden_size": 96 * 160})


def configuration_class(model_type: str) -> Any:
    """None if it comes with the weights."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    known = _CONFIG_REGISTRY if model_type in _CONFIG_REGISTRY else CONFIG_MAPPING
    return known[model_type] if model_type in known else None  # noqa: SIM401 - `get` of these mappings loads no class


def language_model(model_type: str, sizes: Mapping[str, int]) -> Any:
    """The language model's part of a file that has nothing but sizes."""
    return configuration_class(model_type)(**sizes).get_text_config()


def value(config: Any, name: str) -> int | None:
    """A field; one that differs in some layers as the class declares it."""
    from transformers.configuration_utils import PreTrainedConfig

    assert isinstance(config, PreTrainedConfig)
    try:
        found = getattr(config, name, None)
    except Exception:  # noqa: BLE001 - Gemma 4 has none for all layers
        found = inspect.signature(type(config)).parameters[name].default
    assert found is None or isinstance(found, int)
    return found


def read(model_type: str, config: Any) -> Config:
    """The same file as the catalog sees it."""
    sizes = {name: getattr(config, name) for name in ("num_attention_heads", "hidden_size")}
    return Config(
        "m",
        {"model_type": model_type, **sizes},
        usual_kv_heads=FAMILIES[model_type].kv_heads,
        usual_head_size=FAMILIES[model_type].head_size,
    )


@pytest.mark.parametrize("sizes", ASKED, ids=lambda sizes: "x".join(map(str, sizes.values())))
@pytest.mark.parametrize("model_type", sorted(HEADS - FOREIGN))
def test_kv_heads(model_type: str, sizes: Mapping[str, int]) -> None:
    config = language_model(model_type, sizes)
    expected = value(config, "num_key_value_heads")
    if not hasattr(config, "num_key_value_heads"):  # one per query head in the model
        assert model_type in {"gpt2", "gptj", "bloom", "opt", "gpt_neox"}
        expected = config.num_attention_heads
    assert read(model_type, config).num_kv_heads() == expected


@pytest.mark.parametrize("sizes", ASKED, ids=lambda sizes: "x".join(map(str, sizes.values())))
@pytest.mark.parametrize("model_type", sorted(SIZES - FOREIGN))
def test_head_size(model_type: str, sizes: Mapping[str, int]) -> None:
    config = language_model(model_type, sizes)
    expected = value(config, "head_dim") or config.hidden_size // config.num_attention_heads
    assert read(model_type, config).head_size() == expected


@pytest.mark.parametrize("model_type", sorted(WINDOW_TOKENS))
def test_window(model_type: str) -> None:
    language_class = type(configuration_class(model_type)().get_text_config())
    switch = {"use_sliding_window": True} if model_type.startswith("qwen") else {}
    assert language_class(**switch).sliding_window == WINDOW_TOKENS[model_type]
    if not model_type.startswith("exaone"):  # their classes fail without one, unless the types of the layers are said
        assert language_class(sliding_window=None, **switch).sliding_window is None


def test_only_foreign_families_have_no_class() -> None:
    assert {name for name in HEADS | SIZES if configuration_class(name) is None} == FOREIGN


def test_every_known_family_has_a_default_or_asks_for_the_field() -> None:
    for model_type, row in FAMILIES.items():
        config = Config(
            "m", {"model_type": model_type, **ASKED[0]}, usual_kv_heads=row.kv_heads, usual_head_size=row.head_size
        )
        for known, ask in ((HEADS, config.num_kv_heads), (SIZES, config.head_size)):
            if model_type not in known:
                with pytest.raises(LayoutError, match="is missing; it shapes the cache"):
                    ask()
