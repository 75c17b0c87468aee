"""Does a shrunk model keep every sort of layer at its own size?"""

import pytest

from kvreshard.catalog import MODELS, describe, fit_stages, load, parse_engine, shrink
from kvreshard.catalog.engine import plan_pages
from kvreshard.model import LayoutError


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("max_layers", [1, 4, 1000])
def test_every_sort_and_every_draft_stays(model: str, max_layers: int) -> None:
    whole = load(model)
    small = shrink(whole, max_layers)
    assert {(cache.family, cache.kind) for cache in small.layers} == {
        (cache.family, cache.kind) for cache in whole.layers
    }
    assert [cache.name for cache in small.layers if cache.optional] == [c.name for c in whole.layers if c.optional]
    names = [cache.name for cache in whole.layers]
    assert [names.index(cache.name) for cache in small.layers] == sorted(names.index(c.name) for c in small.layers)
    assert small.num_layers <= max(max_layers, 3)


@pytest.mark.parametrize("model", MODELS)
def test_pages_stay_as_long_and_as_large(model: str) -> None:
    spec = parse_engine("tp=2")
    whole, small = (plan_pages(made, spec) for made in (load(model), shrink(load(model), 6)))
    sizes = {page.name: (page.tokens_per_page, page.page_bytes) for page in whole.pages}
    assert {page.name: (page.tokens_per_page, page.page_bytes) for page in small.pages}.items() <= sizes.items()


def test_the_earliest_layers_fill_up() -> None:
    small = shrink(load("gemma-4-26b-a4b"), 4)
    assert [cache.name for cache in small.layers] == [f"layers.{i}.attn" for i in (0, 1, 2, 5)]
    assert [cache.index for cache in small.layers] == [0, 1, 2, 3]


def test_uneven_stages_follow() -> None:
    spec = parse_engine("tp=2,pp=20+21+20")
    small = shrink(load("deepseek-v3"), 7)
    fitted = fit_stages(spec, small.num_layers)
    assert sum(fitted.stages) == 7
    assert min(fitted.stages) >= 1
    describe(small, fitted, "e", 2)
    assert fit_stages(parse_engine("pp=2"), 7) == parse_engine("pp=2")
    with pytest.raises(LayoutError, match="3 stages for 2 layers"):
        fit_stages(spec, 2)
    with pytest.raises(LayoutError, match="keep at least one"):
        shrink(load("deepseek-v3"), 0)
