"""Are the caches of a draft those that it has beside its target? Forms and windows against vLLM's classes: `tests/vllm/test_drafts.py`."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvreshard.catalog import as_draft, describe, load, parse_engine, read_model
from kvreshard.catalog.drafts import read_draft
from kvreshard.model import LayoutError

LAYER: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "head_dim": 128, "dtype": "float16",
}  # fmt: skip
LLAMA = {**LAYER, "num_hidden_layers": 2, "dtype": "bfloat16"}
QWEN = {**LAYER, "model_type": "qwen3"}
DFLASH = {**QWEN, "num_hidden_layers": 2, "architectures": ["DFlashDraftModel"], "dflash_config": {}}
SLIDING = ["sliding_attention"] * 2


def windows(target: dict[str, Any], draft: dict[str, Any]) -> list[int | None]:
    return [layer.kind.window_tokens for layer in read_draft("d", draft, read_model("t", target)).layers]


@pytest.mark.parametrize(
    "draft",
    [
        LAYER,
        {"model_type": "eagle", "model": {**LAYER, "num_key_value_heads": 4}, "num_key_value_heads": 8},
        {"speculators_model_type": "eagle3", "transformer_layer_config": LAYER},
        {
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {k: v for k, v in LAYER.items() if k != "model_type"},
        },
    ],
)
def test_a_draft_is_read_out_of_its_form_and_runs_in_the_targets_dtype(draft: dict[str, Any]) -> None:
    target = read_model("t", LLAMA)
    assert [layer.kind for layer in read_draft("d", draft, target).layers] == [target.layers[0].kind]
    assert target.layers[0].kind.dtype == "bfloat16"


def test_a_target_that_says_no_dtype_leaves_the_drafts_to_the_engine() -> None:
    target = read_model("t", {**LLAMA, "dtype": None})
    model = as_draft(target, read_draft("d", LAYER, target))
    with pytest.raises(LayoutError, match="'dtype': is missing"):
        describe(model, parse_engine("tp=1"), "e")
    assert describe(model, parse_engine("tp=1,dtype=bf16"), "e").field_by_name["draft.0.attn.k"].encoding == "bfloat16"


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ({}, {**LAYER, "sliding_window": 64}, [None]),
        ({"model_type": "mistral", "sliding_window": 512}, LAYER, [512]),
        ({}, {**DFLASH, "dflash_config": {"use_swa": True, "swa_window_size": 32}}, [32, 32]),
        ({}, {**DFLASH, "layer_types": SLIDING, "sliding_window": 64, "use_sliding_window": True}, [64, 64]),
        ({}, {**DFLASH, "model_type": "laguna", "architectures": ["DFlashLagunaForCausalLM"], "layer_types": SLIDING, "sliding_window": 64},
         [None, None]),
    ],
)  # fmt: skip
def test_windows(target: dict[str, Any], draft: dict[str, Any], expected: list[int | None]) -> None:
    assert windows({**LLAMA, **target}, draft) == expected


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"model_type": "medusa", "num_heads": 3}, r"draft 'd', model type 'medusa': Medusa's heads keep no cache; leave --draft out$"),
        ({"medusa_num_heads": 3, "medusa_num_layers": 1}, "Medusa's heads keep no cache"),
        ({"model_type": "mlp_speculator"}, "keeps no cache, and vLLM 0.32 has none of them; leave --draft out"),
        ({"model_type": "gemma4_assistant", "text_config": LAYER}, "read the cache of the target; leave --draft out"),
        ({"model_type": "deepseek_mtp"}, r"model type 'deepseek_mtp': .* layers that predict \(MTP\).*say spec=1 in the engine"),
        ({**LAYER, "model_type": "qwen3_next"}, r"layers that predict \(MTP\)"),
        ({"model_type": "eagle"}, "field 'model': is missing"),
        ({"speculators_model_type": "new"}, "'speculators_model_type': is 'new'; known here are eagle3"),
        ({"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "qwen3"}},
         "'transformer_layer_config.num_key_value_heads': is missing"),
        ({**DFLASH, "layer_types": SLIDING}, r"'dflash_config.swa_window_size': is missing"),
        ({**LAYER, "architectures": ["Gemma4DSparkModel"]}, "'architectures': has 'Gemma4DSparkModel'; drafts of that kind"),
    ],
)  # fmt: skip
def test_a_draft_that_is_none_is_refused_with_the_remedy(tmp_path: Path, draft: dict[str, Any], message: str) -> None:
    file = tmp_path / "d.json"
    file.write_text(json.dumps(draft))
    with pytest.raises(LayoutError, match=message):
        load("llama-3.1-8b", str(file))


def test_beside_a_draft_the_models_own_prediction_layers_are_not_made() -> None:
    model = load("deepseek-v3", "llama-3.1-8b")
    layers = describe(model, parse_engine("tp=1,spec=1"), "e").field_by_name
    assert "draft.0.attn.k" in layers
    assert "mtp.0.attn.latent" not in layers
    assert "mtp.0.attn.latent" in describe(model, parse_engine("tp=1,spec=1,draft=off"), "e").field_by_name


@pytest.mark.parametrize(
    ("draft", "told"), [("nowhere", "draft 'nowhere' is not known"), ("", "the draft's name is empty")]
)
def test_a_draft_that_is_nowhere_is_called_a_draft(draft: str, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        load("llama-3.1-70b", draft)
