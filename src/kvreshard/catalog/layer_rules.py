"""General rules for the caches of each decoder layer, which rows of `families` name in `layers` and `predicts`.

A rule gives a text per layer: the words of its caches in the order in which vLLM registers them, `""` for a layer without any. Rules
of one family each are in `family_layers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvreshard.catalog.config import Config
from kvreshard.catalog.family import LayerRule, PredictionRule

LAYER_TYPES: Mapping[str, str] = {"full_attention": "full", "sliding_attention": "window"}
# What `use_sliding_window` means to a family's class: nothing; no window unless it is true; no window if it is false.
IGNORED, OFF, ON = "ignored", "off", "on"


def alike(words: str) -> LayerRule:
    """All layers have the same caches."""
    return lambda _config, num_layers: [words] * num_layers


def every(period: int | str, default: int | None = None, *, others: str, last: str = "full") -> LayerRule:
    """The last of every `period` layers is another: a number, or the field that has it."""

    def rule(config: Config, num_layers: int) -> list[str]:
        number = period if isinstance(period, int) else config.count(period, default)
        return [others if (index + 1) % number else last for index in range(num_layers)]

    return rule


def listed(words: Mapping[str, str], otherwise: LayerRule | None = None, *, field: str = "layer_types") -> LayerRule:
    """The file lists the type of every layer in `field`; else, if a rule is given, by that."""

    def rule(config: Config, num_layers: int) -> Sequence[str]:
        if otherwise is not None and not config.has(field):
            return otherwise(config, num_layers)
        return config.entries(field, num_layers, words)

    return rule


def sharing(rule: LayerRule) -> LayerRule:
    """The last `num_kv_shared_layers` read the cache of an earlier layer and have none (vLLM 0.32 `gemma4.py`)."""

    def shared(config: Config, num_layers: int) -> Sequence[str]:
        layers, number = rule(config, num_layers), config.count("num_kv_shared_layers", at_least=0)
        if number >= num_layers:
            raise config.error("num_kv_shared_layers", f"is {number} of {num_layers} layers", "one layer needs a cache")
        return [*layers[: num_layers - number], *[""] * number]

    return shared


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers of plain attention, full or with the window of `sliding_window`, as most families have them.

    `by_type`: the class in vLLM 0.32 looks at `layer_types`; if not, a window that some layers lack is dropped for all. `for_all`: without
    types all layers have the window (`engine/arg_utils.py:2249`). `switch`: what `use_sliding_window` means. `first`: where the file has no
    `max_window_layers`, the first layer with a window; None if the class does not ask for it.
    """

    by_type: bool = True
    for_all: bool = True
    switch: str = IGNORED
    first: int | None = None

    def __call__(self, config: Config, num_layers: int) -> Sequence[str]:
        none = ["full"] * num_layers
        is_on = config.flag("use_sliding_window", self.switch != OFF)
        if self.switch == OFF and not is_on:
            return none
        if config.has("layer_types"):
            types = config.entries("layer_types", num_layers, LAYER_TYPES)
            return types if self.by_type or "full" not in types else none
        if not config.has("sliding_window") or not self.for_all or (self.switch == ON and not is_on):
            return none
        first = 0 if self.first is None else config.count("max_window_layers", self.first, at_least=0)
        return ["window" if index >= first else "full" for index in range(num_layers)]


ALTERNATING = listed(LAYER_TYPES, every(2, others="window"))
# vLLM 0.32 has classes that give no layer a window of its own: all have one, or, where `layer_types` differ, none.
BY_TYPE, ALL_OR_NONE, SWITCHED = Windows(), Windows(by_type=False), Windows(switch=OFF, first=28)


def mtp(words: str, field: str = "num_nextn_predict_layers", default: int = 0) -> PredictionRule:
    """As many layers that predict as `field` says, all alike."""
    return lambda config, _layers: [words] * config.count(field, default, at_least=0)


def one(words: str) -> PredictionRule:
    """One layer predicts, whatever the file says."""
    return lambda _config, _layers: [words]


def mtp_like_first(config: Config, layers: Sequence[str]) -> Sequence[str]:
    """Layers that predict are like the model's first ones."""
    return [layers[index % len(layers)] for index in range(config.count("num_nextn_predict_layers", 0, at_least=0))]


def mtp_behind(config: Config, layers: Sequence[str]) -> Sequence[str]:
    """Layers that predict are listed behind the others."""
    return layers[config.count("num_hidden_layers") :]
