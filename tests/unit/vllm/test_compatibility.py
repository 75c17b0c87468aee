"""The digest of a model's configuration covers what matters, and only that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvreshard.vllm.compatibility import digest_config, read_media, read_rope

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


LONG: dict[str, Any] = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "max_model_len", "expected"),
    [
        (CONFIG, 8192, {}),
        ({"rope_parameters": LONG}, 4096, {"rope_factors": "short"}),
        ({"rope_parameters": LONG}, 4097, {"rope_factors": "long"}),
        ({"text_config": {"rope_parameters": {"full": LONG, "window": {"rope_type": "default"}}}}, 8192, {"rope_factors": "long"}),
        ({"rope_parameters": {**LONG, "rope_type": "yarn"}}, 8192, {}),
    ],
)  # fmt: skip
def test_long_rope_goes_by_the_length_that_an_engine_allows(
    config: dict[str, Any], max_model_len: int, expected: dict[str, str]
) -> None:
    assert read_rope(config, max_model_len) == expected


def test_a_length_that_a_model_notes_does_not_count() -> None:
    """MiniMax-M2 does, where it has been loaded."""
    assert digest_config({**CONFIG, "max_model_len": 4096}) == digest_config({**CONFIG, "max_model_len": 8192})


def test_what_is_done_to_images_counts() -> None:
    def read(kwargs: dict[str, Any] | None, pruning: tuple[str, float] | None = None) -> dict[str, str]:
        return read_media(SimpleNamespace(mm_processor_kwargs=kwargs, get_video_pruning_spec=lambda: pruning))

    assert read_media(None) == {}
    assert read(None) == read({}) == {"mm_processor_kwargs": "{}", "video_pruning": "none"}
    assert read({"max_pixels": 100, "min_pixels": 9}) == read({"min_pixels": 9, "max_pixels": 100}) != read({})
    assert read({}, ("evs", 0.5))["video_pruning"] == "evs 0.5"
