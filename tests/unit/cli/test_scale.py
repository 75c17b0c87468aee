"""Is a model cut down so that everything in it is still there, at its real sizes?"""

import pytest

from kvreshard.catalog import MODELS, EngineSpec, load, parse_engine
from kvreshard.cli import scale
from kvreshard.cli.inputs import InputError
from kvreshard.cli.scale import BUDGET_BYTES, check_room, fit
from kvreshard.model import LayoutError
from kvreshard.testing.trial import trial_bytes


def test_given_stages_shrink_with_the_layers() -> None:
    fitted = fit(load("deepseek-v3"), parse_engine("tp=2,pp=20+21+20"), EngineSpec(), 1, 16, 9)
    assert fitted.num_layers == 9
    assert [len({shard.field for shard in rank.shards}) for rank in fitted.prefill.ranks] == [3] * 6


def test_layers_that_do_not_fit_the_model_or_the_stages() -> None:
    with pytest.raises(InputError, match="has 32 decoder layers"):
        fit(load("llama-3.1-8b"), EngineSpec(), EngineSpec(), 1, 16, 33)
    with pytest.raises(InputError, match="fewer than the 3 pipeline stages"):
        fit(load("llama-3.1-8b"), EngineSpec(), EngineSpec(pp=3), 1, 16, 2)
    with pytest.raises(LayoutError, match=r"20\+21\+21 = 62 layers"):
        fit(load("deepseek-v3"), parse_engine("pp=20+21+21"), EngineSpec(), 1, 16, 9)


@pytest.mark.parametrize("name", MODELS)
def test_every_sort_of_layer_survives(name: str) -> None:
    fitted = fit(load(name), EngineSpec(), EngineSpec(), 1, 16, 1)
    whole = fit(load(name), EngineSpec(), EngineSpec(), 1, 16, None)
    sorts = [{(f.axes, f.encoding) for f in part.prefill.fields} for part in (fitted, whole)]
    assert sorts[0] == sorts[1]


def test_a_large_model_is_cut_to_the_budget_and_a_small_one_is_not() -> None:
    large = fit(load("llama-3.1-70b"), parse_engine("tp=8"), parse_engine("tp=4"), 3, 4096, None)
    assert 1 < large.num_layers < 80
    assert large.pool_bytes <= BUDGET_BYTES
    assert fit(load("deepseek-v2-lite"), EngineSpec(), EngineSpec(), 1, 64, None).num_layers == 27


def test_pages_that_an_engine_gives_are_kept() -> None:
    fitted = fit(load("llama-3.1-8b"), parse_engine("pages=50"), EngineSpec(), 1, 64, 2)
    assert fitted.prefill.groups[0].num_pages == 50
    assert fitted.decode.groups[0].num_pages != 50


def test_more_memory_than_there_is_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = fit(load("llama-3.1-8b"), EngineSpec(), parse_engine("pages=100000000"), 3, 512, 2)
    with pytest.raises(InputError, match=r"^pools of 11\.9 TiB .* take 23\.8 TiB of memory, and .* give fewer pages="):
        check_room(fitted)
    small = fit(load("llama-3.1-8b"), EngineSpec(), EngineSpec(), 1, 64, 2)
    check_room(small)
    least = trial_bytes(small.prefill, small.decode)
    monkeypatch.setattr(scale, "available_bytes", lambda: least - 1)
    with pytest.raises(InputError, match="--layers"):
        check_room(small)
    monkeypatch.setattr(scale, "available_bytes", lambda: least + 2 * scale.PROCESS_BYTES - 1)
    with pytest.raises(InputError, match=r"^2 ranks, each a process of its own, take 90 MiB .* or --transport memory$"):
        check_room(small, 2)
    check_room(small, 1)
    for enough in (least, None):
        monkeypatch.setattr(scale, "available_bytes", lambda enough=enough: enough)
        check_room(small)


def test_what_a_trial_takes_counts_what_it_is_compared_with() -> None:
    layouts = fit(load("llama-3.1-8b"), parse_engine("pages=100"), parse_engine("pages=300"), 1, 64, 2)
    small, large = layouts.prefill, layouts.decode
    pages_bytes = sum(region.size_bytes for region in small.ranks[0].regions)
    more = trial_bytes(large, small) - trial_bytes(small, small)
    assert more == 2 * pages_bytes
    assert trial_bytes(small, large) - trial_bytes(small, small) == (2 + 2) * more
