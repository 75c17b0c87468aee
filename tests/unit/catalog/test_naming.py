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


def draft_behind(name: str) -> str:
    """As most of vLLM's classes name layers that predict: with the numbers behind the model's (DeepSeek-V3 has 61)."""
    return as_modules(name.replace("mtp.0", "layers.61"))


def draft_apart(name: str) -> str:
    """As Qwen3-Next's class names them: with numbers of their own."""
    return name if name.startswith("mtp.") else as_modules(name)


def states_behind(name: str) -> str:
    """As Falcon-H1's class names them, whose states are numbered behind attention (72 layers)."""
    _, layer, cache, *_, part = name.split(".")
    return f"model.layers.{layer}.attn.{part}" if cache == "attn" else f"model.{int(layer) + 72}.mixer.{part}"


@pytest.mark.parametrize(
    ("model", "text", "as_named"),
    [
        ("deepseek-v3", "tp=2,spec=1", draft_behind),
        ("qwen3-next-80b-a3b", "tp=2,spec=1", lambda name: f"model.{draft_apart(name)}"),
        ("falcon-h1-34b", "tp=2", states_behind),
        ("deepseek-v4-flash", "tp=2", lambda name: f"model.{name}".replace("window", "attn.swa_cache")),
    ],
)
def test_layers_are_paired_in_order_where_their_numbers_differ(
    model: str, text: str, as_named: Callable[[str], str]
) -> None:
    planned = engine(model, text, "planned")
    found = named_like(planned, renamed(engine(model, text, "runs"), as_named))
    assert [field.name for field in found.fields] == [as_named(field.name) for field in planned.fields]


def test_a_draft_that_only_one_side_has_is_left_out() -> None:
    theirs = renamed(engine("deepseek-v3", "tp=1,spec=1", "runs"), draft_behind)
    mine = named_like(engine("deepseek-v3", "tp=1", "planned"), theirs)
    assert {*theirs.field_by_name} - {*mine.field_by_name} == {"model.layers.61.mixer.latent"}
    (route,) = compile_routes(mine, theirs)
    assert route.warnings


def test_names_with_more_numbers_on_one_side_are_refused() -> None:
    """Loops are numbered in the layer here and behind all layers there: an order by numbers would pair others."""
    theirs = renamed(engine("deepseek-v3", "tp=1", "runs"), as_modules)
    mine = renamed(engine("deepseek-v3", "tp=1", "planned"), lambda name: name.replace(".attn.", ".attn.0."))
    with pytest.raises(LayoutMismatch, match="is it the same model"):
        named_like(mine, theirs)


def test_names_that_are_equal_stay() -> None:
    mine = engine("llama-3.1-8b", "tp=4", "planned")
    assert named_like(mine, engine("llama-3.1-8b", "tp=2", "runs")) is mine


def test_another_model_is_refused_with_what_is_there_on_one_side_only() -> None:
    theirs = renamed(engine("llama-3.1-8b", "tp=1", "runs"), as_modules)
    with pytest.raises(LayoutMismatch, match=r"0 fields 'k' in 'planned' and 32 in 'runs', 61 fields 'latent'"):
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
