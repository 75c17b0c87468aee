"""Is an engine that was described paired with one that runs, whose fields have the names of vLLM's modules?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.catalog.naming import named_like
from kvreshard.model import EngineLayout
from kvreshard.model.changed import replace
from kvreshard.model.errors import LayoutMismatch
from kvreshard.plan.compile import compile_routes


def renamed(layout: EngineLayout, name: Callable[[str], str]) -> EngineLayout:
    fields = tuple(replace(field, name=name(field.name)) for field in layout.fields)
    ranks = tuple(
        rank.with_shards([replace(shard, field=name(shard.field)) for shard in rank.shards]) for rank in layout.ranks
    )
    return replace(layout, fields=fields, ranks=ranks)


def as_modules(name: str) -> str:
    """As vLLM names them."""
    _, layer, *_, part = name.split(".")
    return f"model.layers.{layer}.mixer.{part}"


def engine(model: str, text: str, name: str) -> EngineLayout:
    return describe(load(model), parse_engine(text), name)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "nemotron-3-nano-30b-a3b", "gpt-oss-120b"])
def test_fields_are_paired_by_layer_and_part(model: str) -> None:
    theirs = renamed(engine(model, "tp=2", "runs"), as_modules)
    mine = named_like(engine(model, "tp=4", "planned"), theirs)
    assert set(mine.field_by_name) == set(theirs.field_by_name)
    expected = compile_routes(engine(model, "tp=2", "runs"), engine(model, "tp=4", "planned"))
    found = compile_routes(theirs, mine)
    for one, other in zip(found, expected, strict=True):
        assert [(t.src_rank, t.dst_rank, t.axes) for t in one.transfers] == [
            (t.src_rank, t.dst_rank, t.axes) for t in other.transfers
        ]
        names = [[as_modules(name) for name in t.fields] for t in other.transfers]
        assert [list(t.fields) for t in one.transfers] == names


def test_names_that_are_equal_stay() -> None:
    mine = engine("llama-3.1-8b", "tp=4", "planned")
    assert named_like(mine, engine("llama-3.1-8b", "tp=2", "runs")) is mine


def test_another_model_is_refused_with_what_is_there_on_one_side_only() -> None:
    theirs = renamed(engine("llama-3.1-8b", "tp=1", "runs"), as_modules)
    with pytest.raises(LayoutMismatch, match=r"'latent' of layer 0.*only in 'planned'.*'k' of layer 0.*only in 'runs'"):
        named_like(engine("deepseek-v3", "tp=1", "planned"), theirs)


def test_names_that_do_not_tell_fields_apart_are_refused() -> None:
    theirs = renamed(
        engine("llama-3.1-8b", "tp=1", "runs"), lambda name: name.replace("layers.", "x").replace(".k", ".a.k")
    )
    with pytest.raises(LayoutMismatch, match="have the same layer and part"):
        named_like(engine("llama-3.1-8b", "tp=2", "planned"), theirs)


def test_a_name_that_only_looks_like_a_number_is_no_layer() -> None:
    theirs = renamed(engine("llama-3.1-8b", "tp=1", "runs"), lambda name: f"m.\u00b2.{name}")
    assert set(named_like(engine("llama-3.1-8b", "tp=2", "planned"), theirs).field_by_name) == set(theirs.field_by_name)
