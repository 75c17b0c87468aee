"""The form of a row of `families.FAMILIES`, which describes the caches of one `model_type`.

A row has columns of data and, where a family needs them, small functions:

| column | content |
|---|---|
| `layers` | the caches of every decoder layer, as words: `"full"`, `"full state"`, `""` for none (`layer_rules`) |
| `caches` | the meaning of words that are not in `caches.USUAL` (`caches`) |
| `predicts` | the caches of every layer that predicts tokens (MTP), as words |
| `kv_heads`, `head_size` | defaults for `num_key_value_heads` and `head_dim` |
| `names` | usual field -> its name in the file: `{"num_hidden_layers": "n_layer"}` |
| `if_absent`, `if_null` | defaults of fields that are absent, or absent or null |
| `if_partial` | defaults of fields that are absent in a `text_config`: those of LLaVA, Pixtral and Qwen2-Audio leave out what is the default |
| `sets` | fields that the family computes, whatever value the file has; None is null |
| `expects` | the values of a field whose caches are described; any other is refused |
| `page_tokens`, `order` | vLLM's defaults for the engine |
| `prepare`, `arrange` | anything else: a change of the fields before, of the caches after |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvreshard.catalog.config import Config, Source
from kvreshard.catalog.layers import ModelLayer

LayerRule = Callable[[Config, int], Sequence[str]]
"""Config and number of decoder layers -> the words of each."""
PredictionRule = Callable[[Config, Sequence[str]], Sequence[str]]
"""Config and the words of the decoder layers -> the words of each layer that predicts."""
CacheRule = Callable[[Config, str, int], ModelLayer]
"""Config, name and number of a decoder layer -> one of its caches."""


def _nothing(_config: Config, _layers: Sequence[str]) -> Sequence[str]:
    return ()


def _as_it_is(config: Config) -> Config:
    return config


def _as_registered(_config: Config, layers: Sequence[ModelLayer]) -> Sequence[ModelLayer]:
    return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row. Two rows with the same rules are equal, whatever their defaults. Without `layers` only the head size of the type is known.

    `numbered_on`: layers that predict continue the numbers of the model's (`layers.61`) instead of their own (`mtp.0`).
    `reserves`: words of states that vLLM's pages have room for in every model of the type, even where no layer keeps one.
    `one_per_draft`: the engine makes as many layers that predict as it speculates tokens. `reads_per_layer`: its rules read
    `per_layer_config`; other families refuse a file that has it.
    """

    layers: LayerRule | None = None
    caches: Mapping[str, CacheRule] = field(default_factory=dict)
    predicts: PredictionRule = _nothing
    prepare: Callable[[Config], Config] = _as_it_is
    arrange: Callable[[Config, Sequence[ModelLayer]], Sequence[ModelLayer]] = _as_registered
    sets: Mapping[str, Source | None] = field(default_factory=dict)
    expects: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    kv_heads: int | str | None = field(default=None, compare=False)
    head_size: int | str | None = field(default=None, compare=False)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    if_absent: Mapping[str, Any] = field(default_factory=dict, compare=False)
    if_partial: Mapping[str, Any] = field(default_factory=dict, compare=False)
    if_null: Mapping[str, Any] = field(default_factory=dict, compare=False)
    page_tokens: int = 16
    order: str = "LBHNC"
    reserves: str = ""
    numbered_on: bool = False
    one_per_draft: bool = False
    reads_per_layer: bool = False
