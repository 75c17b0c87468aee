"""Reads the caches of a model from its parsed config.json, by the row of its family.

1. Take the language model's part of the file (`config.language_part`). Its `model_type` names the row; a multimodal model has the type of its text
   part, or its own where that says none.
2. Fill in what the row knows of fields that the file calls otherwise or leaves out.
3. The row's rule gives the words of each layer, each word a cache.
4. A type without a row is read as plain attention only if nothing in the file can shape the cache otherwise (`unknown`).
5. The dtype of the caches is the model's, unless the file declares another (`declared`).

Raises LayoutError naming the field, its value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from kvreshard.catalog.caches import USUAL
from kvreshard.catalog.config import PER_LAYER, Config, language_part
from kvreshard.catalog.declared import read_with_dtype
from kvreshard.catalog.families import FAMILIES
from kvreshard.catalog.family import Family
from kvreshard.catalog.layer_rules import ON, Windows
from kvreshard.catalog.layers import Model, ModelLayer
from kvreshard.catalog.unknown import check_unknown
from kvreshard.model.text import escaped

WINDOW = "sliding_window"
QUERY_HEADS = "num_attention_heads"
# What may differ between layers without shaping a cache.
HARMLESS_PER_LAYER = (QUERY_HEADS, "intermediate_size", "num_experts", "num_local_experts")
UNKNOWN_LAYERS = Windows(switch=ON)
_ROLE = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)\Z")


def read_model(name: str, raw: Mapping[str, Any]) -> Model:
    """The model of a parsed config.json."""
    return read_config(language_part(name, raw))


def read_config(config: Config) -> Model:
    """The model of the fields of its language part."""
    config = replace(config, family=FAMILIES.get(config.model_type, Family()))
    if config.fields.get(WINDOW) == 0:  # none, as `config/model.py` has it
        config = config.with_fields(**{WINDOW: None})
    if not config.family.reads_per_layer:
        _check_per_layer(config)
    model = read_with_dtype(_read, config)
    return replace(model, doubts=tuple(_doubts(config)))


def _read(config: Config) -> Model:
    if config.family.layers is None:
        check_unknown(config)
    config = _filled(config)
    family, num_layers = config.family, config.count("num_hidden_layers")
    words = (family.layers or UNKNOWN_LAYERS)(config, num_layers)
    layers = [one for index in range(num_layers) for one in _caches(config, f"layers.{index}", index, words[index])]
    for number, predicted in enumerate(family.predicts(config, words)):
        name, index = (
            (f"layers.{num_layers + number}", num_layers + number)
            if family.numbered_on
            else (f"mtp.{number}", num_layers)
        )
        min_drafts = number + 1 if family.one_per_draft else 1
        for one in _caches(config, name, index, predicted):
            layers.append(replace(one, optional=True, predicts=True, min_drafts=min_drafts))
    has_heads = any(not layer.kind.is_state for layer in layers)
    return Model(
        config.model,
        config.model_type,
        num_layers,
        tuple(family.arrange(config, layers)),
        config.dtype(),
        default_page=family.page_tokens,
        default_order=family.order,
        num_query_heads=config.count(QUERY_HEADS) if has_heads else None,
    )


def _filled(config: Config) -> Config:
    """The fields under their usual names, with those that the row knows without the file."""
    family = config.family
    unsaid = {name: value for name, value in family.unsaid.items() if not config.has(name)}
    config = config.with_fields(**{**family.left_out, **config.fields, **unsaid}).renamed(family.names)
    config = family.prepare(config)
    computed = {name: None if source is None else config.number(source) for name, source in family.sets.items()}
    for name, allowed in family.expects.items():
        config.must_be(name, *allowed)
    return config.with_fields(**computed)


def _caches(config: Config, name: str, index: int, words: str) -> Iterator[ModelLayer]:
    """The caches of one layer in the order in which vLLM registers them."""
    for word in words.split():
        yield (config.family.caches.get(word) or USUAL[word])(config, name, index)


def _doubts(config: Config) -> Iterator[str]:
    """Architectures of another type than the one that was read. Types with the same rules of their own have equal caches."""
    around = config.fields if config.outer is None else config.outer
    listed = around.get("architectures")
    own = {_bare(str(said)) for fields in (config.fields, around) if (said := fields.get("model_type"))}
    for name in listed if isinstance(listed, list) else ():
        base = _bare(_ROLE.sub("", name)) if isinstance(name, str) else ""
        other = next(
            (known for known, row in FAMILIES.items() if row.layers is not None and _bare(known) == base), None
        )
        if other is not None and base not in own and not _are_kin(config.family, FAMILIES[other]):
            yield (
                f"the file's architectures say {escaped(name, 60)}, which is of model type '{other}', and its model_type says "
                f"'{escaped(config.model_type, 60)}', by which it was read; vLLM goes by architectures"
            )


def _are_kin(family: Family, other: Family) -> bool:
    """Whether the rules are the same: of rows that were written as one. Rules of plain attention alone do not count, many unlike families have no others."""
    return family == other and family != Family(layers=family.layers)


def _bare(name: str) -> str:
    """A type or an architecture without what tells their spellings apart."""
    return name.lower().replace("_", "").replace("-", "").removesuffix("text")


def _check_per_layer(config: Config) -> None:
    """Refuse layers that differ from the others in what shapes a cache."""
    for layer, fields in config.part(PER_LAYER).fields.items():
        for name in fields if isinstance(fields, Mapping) else ():
            if name not in HARMLESS_PER_LAYER or (name == QUERY_HEADS and not config.has("num_key_value_heads")):
                raise config.error(
                    f"{PER_LAYER}.{layer}.{name}",
                    "differs from the other layers'",
                    f"caches that differ so are not described for model type '{config.model_type}'",
                )
