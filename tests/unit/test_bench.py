"""What the benchmark stands on: its block tables, its intervals, its bars, its page, the releases of vLLM beside it."""

import importlib
import importlib.util
import json
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from bench import bars, beside, page, rows_first_token, rows_load
from bench.bars import Bar
from bench.compare import Comparison, Spent, balanced, compare, interval
from bench.engine_pairs import Turn
from bench.intree import Pair
from bench.results import Result, compared, machine, save, skipped
from bench.shapes import Shape, Weights, first_token_s
from bench.tables import KINDS, page_table
from tests import releases
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


def found(ours_ms: float, theirs_ms: float) -> Comparison:
    """A comparison without noise, of processor time and of the clock alike."""
    ratio = theirs_ms / ours_ms
    spent = [Spent(side / 1e3, side / 1e3) for side in (ours_ms, theirs_ms)]
    return Comparison(*spent, (ratio, ratio, ratio), (ratio, ratio, ratio), 6)


def holds(judged: tuple[Bar, ...]) -> list[bool | None]:
    return [bar.holds for bar in judged]


def test_a_handshake_is_judged_by_itself_and_beside_the_newest_release() -> None:
    assert holds(bars.handshake(found(9.9, 6.7), is_newest=True)) == [True, True]
    assert holds(bars.handshake(found(9.9, 6.5), is_newest=True)) == [True, False]
    assert holds(bars.handshake(found(10.1, 9.0), is_newest=True)) == [False, True]
    assert holds(bars.handshake(found(9.9, 1.0), is_newest=False)) == [True]


@pytest.mark.parametrize(
    ("ours_ms", "theirs_ms", "first_token_ms", "judged"),
    [
        (0.49, 0.1, 100.0, [True, True]),
        (0.51, 0.1, 100.0, [False, True]),
        (2.3, 1.95, 300.0, [True, True]),
        (2.6, 2.1, 300.0, [True, True]),
        (2.7, 2.1, 300.0, [False, True]),
        (2.6, 2.1, 250.0, [True, False]),
    ],
)
def test_a_preparation_is_judged_beside_in_tree_and_beside_the_first_token(
    ours_ms: float, theirs_ms: float, first_token_ms: float, judged: list[bool]
) -> None:
    assert holds(bars.preparation(ours_ms / 1e3, theirs_ms / 1e3, first_token_ms / 1e3)) == judged


@pytest.mark.parametrize(("interval", "verdict"), [((0.95, 2.0), True), ((0.94, 2.0), None), ((0.5, 0.94), False)])
def test_a_transfer_is_judged_by_its_interval(interval: tuple[float, float], verdict: bool | None) -> None:
    assert holds(bars.transfer(interval)) == holds(bars.first_token(interval)) == [verdict]


def test_staging_must_not_cost_and_must_not_be_missed_where_it_halves() -> None:
    """Of the other way's time over that of the way that was taken."""
    spans = [(0.92, 2.0), (0.9, 2.0), (0.5, 0.9)]
    assert [holds(bars.staging(True, span)) for span in spans] == [[True], [None], [False]]
    spans = [(0.46, 2.0), (0.45, 2.0), (0.1, 0.45)]
    assert [holds(bars.staging(False, span)) for span in spans] == [[True], [None], [False]]


def test_a_first_token_takes_the_longer_of_computing_and_reading_weights() -> None:
    """Of 1e12 operations a token on two GPUs, of 100 GB of weights, and of 1e12 operations for each of the 5,000 pairs of tokens."""
    kinds = Weights(1e9, 0.5e12, 2, 0), Weights(50e9, 1e3, 2, 0), Weights(1e3, 1e3, 2, 1e12)
    found = [first_token_s(Shape("", "", "", "", Pair(1, 2, 1, 16), weights), 100) for weights in kinds]
    assert found[0] == pytest.approx(1e12 * 100 / (2 * 989e12 / 2) + 1e12 / 3.35e12 + 0.020)
    assert found[1] == pytest.approx(100e9 / (2 * 3.35e12) + 0.020)
    assert found[2] == pytest.approx(1e12 * 5000 / (2 * 989e12 / 2) + 0.020)


def test_results_are_kept_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Result("b", "two, fresh", 1.0, "ms", "NixlConnector", 2.0, 2.0, (1.5, 2.5), (Bar("fast", True),))
    save([skipped("a", "one", "why not"), first], machine() | {"commit": "1111111"}, path)
    again = Result("a", "one", 3.0, "ms", "NixlConnector", 6.0, 2.0, (0.5, 2.5), (Bar("fast", False),))
    save([again], machine() | {"commit": "2222222"}, path)
    body = json.loads(path.read_text())
    assert [(entry["row"], entry["bars"][0]["holds"]) for entry in body["results"]] == [("a", False), ("b", True)]
    assert body["commits"] == {"a": "2222222", "b": "1111111"}
    said = page.describe(body["machine"], body["commits"]).splitlines()
    assert "- 2222222: handshake." in said
    assert "- 1111111: preparation of a request." in said


def test_the_page_says_where_a_bar_does_not_hold(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    judged = [(Bar("fast", True),), (Bar("fast", False), Bar("small", True))]
    results = [
        Result("b", f"Llama, 1k tokens, {kind}", ours, "ms", "NixlConnector 0.32.0", 2.0, 2 / ours, (0.9, 1.1), bar)
        for kind, ours, bar in zip(("fresh", "random"), (1.0, 4.0), judged, strict=True)
    ]
    alone = Result("d", "idle", 0.0, "%", bars=(Bar("small", None),), note="a note")
    save([*results, alone, skipped("a", "all", "not here", "NixlConnector 0.33.0")], machine(), path)
    lines = page.tables(json.loads(path.read_text())["results"]).splitlines()
    assert "| fast | **1 of 2** | Llama, 1k tokens, random (0.32.0) |  |" in lines
    assert "| small | 1 of 2 |  | idle |" in lines
    assert "| Llama, 1k tokens | NixlConnector 0.32.0 | 1 / 2 ms, 2.00 | **4 / 2 ms, 0.50** |" in lines
    assert "| idle | 0 % |  |  |  | a note |" in lines
    assert "NixlConnector 0.33.0: skipped: not here" in lines


def test_a_comparison_is_a_result_of_the_clock_or_of_the_processor() -> None:
    beside_it = compare(lambda: sum(range(2000)), lambda: sum(range(2000)), pairs=5)
    by_clock, by_cpu = (compared("r", "n", "other", beside_it, (), cpu=cpu) for cpu in (False, True))
    assert (by_clock.unit, by_clock.ratio, by_clock.interval) == (
        "ms",
        beside_it.wall_ratio[0],
        beside_it.wall_ratio[1:],
    )
    assert (by_cpu.unit, by_cpu.ours, by_cpu.ratio) == ("ms CPU", beside_it.ours.cpu_s * 1e3, beside_it.cpu_ratio[0])


def test_a_release_that_is_not_here_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ["vLLM is not installed here" in result.note for result in beside.beside(["a", "f"], False)] == [True] * 4
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(releases, "ROOT", tmp_path)
    assert beside.missing("0.32.0") is None
    assert "python -m tests.releases 0.33.0" in (beside.missing("0.33.0") or "")


@pytest.mark.parametrize("module", [*beside.ROWS.values(), "__main__"])
def test_every_row_finds_what_it_measures(module: str) -> None:
    """No type checker looks at `bench/`: what was renamed elsewhere is noticed here."""
    found = importlib.import_module(f"bench.{module}")
    assert callable(found.main if module == "__main__" else found.run)


def test_another_release_than_asked_for_is_a_failure_and_no_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text("__version__ = '0.31.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(beside, "RELEASES", ("0.32.0",))
    monkeypatch.setattr(beside, "missing", lambda release: None)
    results = list(beside.beside(["a", "c"], False))
    assert [(result.row, result.note) for result in results] == [
        (letter, "failed: the process beside vLLM 0.32.0 ended with 1") for letter in "ac"
    ]
    assert "vLLM is 0.31.0 here, not 0.32.0" in capfd.readouterr().err


def test_a_result_passes_from_process_to_process() -> None:
    whole = Result("a", "n", 1.5, "ms", "other", 3.0, 2.0, (1.0, 2.5), (Bar("fast", True),), "note", {"pairs": 6})
    for result in (whole, skipped("a", "n", "why")):
        assert beside._decoded(json.dumps(asdict(result))) == result


def test_a_row_that_fails_does_not_take_its_results_with_it(capfd: pytest.CaptureFixture[str]) -> None:
    def breaks() -> Iterator[Result]:
        yield Result("z", "first", 1.0)
        raise ValueError("broken")

    first, failed = beside.guarded("z", breaks)
    assert (first.ours, failed.note) == (1.0, "failed: ValueError: broken")
    assert "Traceback" in capfd.readouterr().err


def test_of_the_newest_wheel_the_python_files_are_taken_over_the_installed_operators(tmp_path: Path) -> None:
    wheel, installed, folder = tmp_path / "vllm.whl", tmp_path / "installed", tmp_path / "folder"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("vllm/__init__.py", "vllm/v1/core.py", "vllm/_C.abi3.so", "vllm/config.json"):
            archive.writestr(name, "of the wheel")
    installed.mkdir()
    (installed / "_C.abi3.so").write_text("installed")
    releases.unpack(wheel, "0.33.0", installed, folder)
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    metadata = "vllm-0.33.0+cpu.dist-info/METADATA"
    assert files == [metadata, "vllm/_C.abi3.so", "vllm/__init__.py", "vllm/v1/core.py"]
    assert (folder / "vllm/_C.abi3.so").read_text() == "installed"
    assert "Version: 0.33.0+cpu" in (folder / metadata).read_text()
    releases.unpack(wheel, "0.31.0", installed, tmp_path / "whole")
    assert (tmp_path / "whole/vllm/_C.abi3.so").read_text() == "of the wheel"
    assert not list((tmp_path / "whole").glob("*.dist-info"))


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


def measured(ours: FakePair, theirs: FakePair, num_ranks: int = 2) -> list[Result]:
    return list(rows_first_token._measure("m", "NixlConnector", ours, theirs, False, num_ranks))  # type: ignore[arg-type]


def test_first_tokens_are_compared_in_turns_and_the_bar_is_on_the_interval() -> None:
    log: list[str] = []
    results = measured(FakePair("ours", 0.010, log), FakePair("theirs", 0.012, log))
    assert [(round(result.ratio or 0, 2), *holds(result.bars)) for result in results] == [(1.2, True)] * 4
    assert all(result.details["decode_ms"] == [5.0, 6.0] for result in results)
    assert [result.beside for result in results[::2]] == [
        "NixlConnector as it ships",
        "NixlConnector with cores to spare",
    ]
    assert log[2:6] == ["theirs", "ours", "ours", "theirs"]
    assert log.count("ours") == log.count("theirs")
    slower = measured(FakePair("ours", 0.012, []), FakePair("theirs", 0.010, []))
    assert [holds(result.bars) for result in slower] == [[False]] * 4
    scattered = [(Turn(1.0, 0.5, Output()), Turn(seconds, 0.5, Output())) for seconds in [0.5, 1.5] * 4 + [1.2]]
    unsure = rows_first_token._result("m", "NixlConnector", scattered)
    assert (unsure.ratio, holds(unsure.bars)) == (1.2, [None])


def test_a_first_token_of_another_text_is_no_result() -> None:
    with pytest.raises(AssertionError, match=r"ours: .* texts differ"):
        measured(FakePair("ours", 0.01, [], wrong=True), FakePair("theirs", 0.01, []))
    with pytest.raises(AssertionError, match=r"in-tree: .* texts differ"):
        measured(FakePair("ours", 0.01, []), FakePair("theirs", 0.01, [], wrong=True))


def test_cores_to_spare_are_not_claimed_for_threads_that_were_not_found() -> None:
    results = measured(FakePair("ours", 0.01, []), FakePair("theirs", 0.01, []), num_ranks=3)
    assert [result.note for result in results][2:] == ["skipped: 2 of 3 spinning threads of NIXL's were found"]


def test_under_load_rounds_are_compared_side_by_side() -> None:
    """Two rounds of three requests: ours in 10 ms and twice as many a second, but for one that takes 100 ms."""
    first_ms = np.array([[[10.0, 10.0, 100.0], [20.0, 20.0, 20.0]]] * 2)
    median, last, rate = rows_load.results("m, 3 at a time", "NixlConnector", first_ms, np.array([[40.0, 20.0]] * 2))
    assert (median.ours, median.theirs, median.ratio) == (10.0, 20.0, 2.0)
    assert [bar.holds for bar in median.bars] == [True]
    assert last.ours is not None
    assert last.ours > 90.0
    assert (last.theirs, last.bars) == (20.0, ())
    assert (rate.ours, rate.theirs, rate.ratio) == (40.0, 20.0, 2.0)
    (slow,) = [
        bar.holds
        for result in rows_load.results("m", "NixlConnector", first_ms[:, ::-1], np.array([[20.0, 40.0]] * 2))
        for bar in result.bars
        if "per second" in bar.text
    ]
    assert slow is False


@pytest.mark.parametrize("rows", [["zz"], ["a", "zz"]])
def test_an_unknown_row_is_refused_before_any_is_measured(
    rows: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from bench import __main__ as command

    monkeypatch.setattr(command, "_results", lambda *_: pytest.fail("a row was measured"))
    monkeypatch.setattr("sys.argv", ["bench", *rows])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "no row is called zz; there are a, b, c, d" in capsys.readouterr().err
