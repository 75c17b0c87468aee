"""Is what the benchmark stands on right: its block tables, its intervals, its page?"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from bench import page, rows_ttft
from bench.compare import balanced, compare, interval
from bench.engine_pairs import Turn
from bench.results import Result, compared, machine, save, skipped, times
from bench.tables import KINDS, page_table
from tests.e2e.engine import Output


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


def test_who_comes_second_is_not_slower_for_it() -> None:
    """Second costs 20 % here; the sides are alike, whichever order has one pair more."""
    for num_pairs in (6, 7, 40, 41):
        ratios = np.array([1.2, 1 / 1.2] * num_pairs)[:num_pairs] * np.random.default_rng(1).normal(1, 0.001, num_pairs)
        middle, low, high = balanced(ratios)
        assert 0.99 < low <= middle <= high < 1.01
    assert balanced(np.full(6, 2.0)) == pytest.approx((2, 2, 2))


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


@pytest.mark.parametrize(("ours", "cell"), [(2.0, "2.00"), (0.0, "")])
def test_what_is_too_little_to_be_seen_has_no_ratio(tmp_path: Path, ours: float, cell: str) -> None:
    path = tmp_path / "results.json"
    save([Result("d session", "memory", ours, 4.0, "MiB", times(ours, 4.0), None, "below 5 MB", True)], machine(), path)
    row = page.table(json.loads(path.read_text())["results"]).splitlines()[-1]
    assert row == f"| d | memory | {ours:.3g} MiB | 4 MiB | {cell} |  | below 5 MB | met |"


def test_a_bar_may_stand_on_the_lower_bound() -> None:
    found = compare(lambda: sum(range(2000)), lambda: sum(range(2000)), pairs=5)
    above = found.cpu_ratio[1]
    assert compared("r", "n", found, "b", above, cpu=True, low=True).met is True
    assert compared("r", "n", found, "b", above * 1.001, cpu=True, low=True).met is False


class FakePair:
    """Engines that take `seconds` and answer with each prompt's last token; `log` tells whose turn it was."""

    def __init__(self, name: str, seconds: float, log: list[str], wrong: bool = False) -> None:
        self.name, self.seconds, self.log, self.wrong = name, seconds, log, wrong

    def turn(self, prompt: Sequence[int]) -> Turn:
        self.log.append(self.name)
        return Turn(self.seconds, self.seconds / 2, self.answer(prompt, self.wrong))

    def ordinary(self, prompts: Sequence[Sequence[int]]) -> list[Output]:
        return [self.answer(prompt, False) for prompt in prompts]

    def make_yield(self) -> int:
        return 2

    @staticmethod
    def answer(prompt: Sequence[int], wrong: bool) -> Output:
        token = prompt[-1] + wrong
        return Output(tokens=[token], logprobs=[{token: -0.5}])


def test_first_tokens_are_compared_in_turns_and_the_bar_is_on_the_lower_bound() -> None:
    log: list[str] = []
    results = list(
        rows_ttft._measure("m", FakePair("ours", 0.010, log), FakePair("theirs", 0.012, log), full=False, num_ranks=2)
    )
    assert [round(result.ratio or 0, 2) for result in results] == [1.2] * 4
    assert all(result.met and result.details["decode_ms"] == [5.0, 6.0] for result in results)
    assert log[2:6] == ["theirs", "ours", "ours", "theirs"]
    assert log.count("ours") == log.count("theirs")
    slower = rows_ttft._measure("m", FakePair("ours", 0.012, []), FakePair("theirs", 0.010, []), False, 2)
    assert not any(result.met for result in slower)
    scattered = [(Turn(1.0, 0.5, Output()), Turn(seconds, 0.5, Output())) for seconds in [0.5, 1.5] * 4 + [1.2]]
    unsure = rows_ttft._result("m", scattered)
    assert (unsure.ratio, unsure.met) == (1.2, False)


def test_a_first_token_of_another_text_is_no_result() -> None:
    with pytest.raises(AssertionError, match=r"ours: .* texts differ"):
        list(rows_ttft._measure("m", FakePair("ours", 0.01, [], wrong=True), FakePair("theirs", 0.01, []), False, 2))
    with pytest.raises(AssertionError, match=r"in-tree: .* texts differ"):
        list(rows_ttft._measure("m", FakePair("ours", 0.01, []), FakePair("theirs", 0.01, [], wrong=True), False, 2))


def test_cores_to_spare_are_not_claimed_for_threads_that_were_not_found() -> None:
    results = list(rows_ttft._measure("m", FakePair("ours", 0.01, []), FakePair("theirs", 0.01, []), False, 3))
    assert [result.note for result in results][2:] == ["skipped: 2 of 3 spinning threads of NIXL's were found"]


def test_without_vllm_the_first_token_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (result,) = rows_ttft.run(False)
    assert result.met is None
    assert "vLLM is not installed" in result.note
