"""Does a digest of a model's configuration see what matters, and only that?"""

from __future__ import annotations

from typing import Any

import pytest

from kvreshard.vllm.engine_facts import digest_config

CONFIG: dict[str, Any] = {"rope_parameters": {"rope_theta": 1e4}, "layer_types": ["full", "window"], "hidden_size": 64}


@pytest.mark.parametrize(
    "change", [{"_name_or_path": "/elsewhere"}, {"transformers_version": "9"}, {"torch_dtype": "float32"}]
)
def test_where_it_came_from_does_not_count(change: dict[str, Any]) -> None:
    assert digest_config({**CONFIG, **change}) == digest_config(CONFIG)


@pytest.mark.parametrize(
    "change", [{"rope_parameters": {"rope_theta": 5e4}}, {"layer_types": ["window", "full"]}, {"hidden_size": 65}]
)
def test_what_the_model_is_counts(change: dict[str, Any]) -> None:
    assert digest_config({**CONFIG, **change}) != digest_config(CONFIG)


def test_the_order_of_names_does_not_count() -> None:
    assert digest_config(dict(reversed(CONFIG.items()))) == digest_config(CONFIG)
