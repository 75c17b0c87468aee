"""Is what the benchmark stands on right: its block tables, its intervals, its page?"""

import json
from pathlib import Path

import numpy as np
import pytest
from bench import page
from bench.compare import compare, interval
from bench.results import Result, compared, machine, save, skipped
from bench.tables import KINDS, page_table


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_pages", "pool"), [(1, 4), (64, 100), (500, 2000)])
def test_a_table_has_distinct_pages_of_its_pool(kind: str, num_pages: int, pool: int) -> None:
    pages = page_table(kind, num_pages, pool, seed=3)
    assert len(pages) == num_pages == len(set(pages.tolist()))
    assert pages.min() >= 1
    assert pages.max() < pool
    assert np.array_equal(pages, page_table(kind, num_pages, pool, seed=3))


def test_tables_are_as_fragmented_as_they_are_called() -> None:
    joined = {kind: int((np.diff(page_table(kind, 500, 2000, 0)) == 1).sum()) for kind in KINDS}
    assert joined["fresh"] == 499
    assert joined["reversed"] == 0
    assert 240 <= joined["half"] <= 300
    assert joined["random"] < 20


def test_an_interval_holds_its_median() -> None:
    middle, low, high = interval(np.random.default_rng(0).lognormal(0.5, 0.2, 41))
    assert low <= middle <= high
    assert low < high


def test_both_sides_run_equally_often_and_after_the_same() -> None:
    calls: list[str] = []
    found = compare(
        lambda: calls.append("ours"),
        lambda: calls.append("theirs"),
        pairs=6,
        between=lambda: calls.append("between"),
    )
    assert found.pairs == 6
    assert calls.count("ours") == calls.count("theirs") == 7
    assert set(calls[::2]) == {"between"}


def test_results_are_kept_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    save(
        [skipped("a", "one", "why not"), Result("b", "two", 1.0, 2.0, "ms", 2.0, (1.5, 2.5), "1x", True)],
        machine(),
        path,
    )
    save([Result("a", "one", 3.0, 6.0, "ms", 2.0, (0.5, 2.5), "4x", False)], machine(), path)
    results = json.loads(path.read_text())["results"]
    assert [(entry["row"], entry["met"]) for entry in results] == [("a", False), ("b", True)]
    assert "**not met**" in page.table(results)


def test_a_bar_may_stand_on_the_lower_bound() -> None:
    found = compare(lambda: sum(range(2000)), lambda: sum(range(2000)), pairs=5)
    above = found.cpu_ratio[1]
    assert compared("r", "n", found, "b", above, cpu=True, low=True).met is True
    assert compared("r", "n", found, "b", above * 1.001, cpu=True, low=True).met is False
