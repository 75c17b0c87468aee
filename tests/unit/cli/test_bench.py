"""`kvreshard bench`: are the constants shown, kept, and told apart from the defaults?"""

import json
import re
from pathlib import Path

import pytest

from kvreshard.plan.cost import MEASURED_SPEEDUP, CostModel
from kvreshard.session.constants import host_description, save_constants


def test_without_a_file_the_defaults_are_shown(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "default; not measured here" in run("bench").stdout
    found = json.loads(run("bench", "--json").stdout)
    assert found["source"] == "default"
    assert CostModel(**found["constants"]) == CostModel()
    assert list(tmp_path.iterdir()) == []


def test_kept_constants_are_shown(run, tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    model = CostModel(1e-6, 2e9, 3e-8, 4e9, 5e9, min_speedup=MEASURED_SPEEDUP)
    save_constants(path, host_description(), model)
    assert "a posted copy" in run("bench", "--constants", path).stdout
    assert "  1 us\n" in run("bench", "--constants", path).stdout
    found = json.loads(run("bench", "--constants", path, "--json").stdout)
    assert (found["source"], CostModel(**found["constants"])) == ("measured", model)


def test_a_file_that_is_none_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{}")
    result = run("bench", "--constants", tmp_path / "odd.json")
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["bench"],
        ["bench", "--calibrate"],
        ["plan", "--model", "llama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=2"],
    ],
)
def test_a_path_that_cannot_be_looked_at_is_refused(run, tmp_path: Path, words: list[str]) -> None:
    """As one in a directory of somebody else: whether there is a file is not known."""
    option = "--constants" if words[0] == "bench" else "--cost-model"
    result = run(*words, option, tmp_path / ("x" * 300))
    assert (result.exit_code, "cannot be read: File name too long" in result.stderr) == (2, True), result.output


def test_a_file_without_an_end_is_not_read_to_it(run) -> None:
    result = run("bench", "--constants", "/dev/zero")
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


def test_a_constant_that_is_none_is_named(run, tmp_path: Path) -> None:
    save_constants(tmp_path / "odd.json", host_description(), CostModel())
    text = (tmp_path / "odd.json").read_text()
    (tmp_path / "odd.json").write_text(text.replace('"move_run_s": 8e-9', '"move_run_s": 0.0'))
    result = run("bench", "--constants", tmp_path / "odd.json")
    assert result.exit_code == 2
    assert "move_run_s is 0.0; the constants of a cost model must be positive" in result.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_a_constant_without_measure_is_named_too(run, tmp_path: Path) -> None:
    """Gaps of infinitely many bytes would pay."""
    save_constants(tmp_path / "odd.json", host_description(), CostModel())
    text = (tmp_path / "odd.json").read_text()
    (tmp_path / "odd.json").write_text(re.sub(r'"copy_s": [^,]+', '"copy_s": 1e308', text))
    result = run(
        "plan",
        "--model",
        "llama-3.1-8b",
        "--prefill",
        "tp=1",
        "--decode",
        "tp=2",
        "--cost-model",
        tmp_path / "odd.json",
    )
    assert (result.exit_code, "copy_s is 1e+308; the constants of" in result.stderr) == (2, True), result.output


def test_calibration_measures_and_keeps(run, tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    measured = json.loads(run("bench", "--calibrate", "--constants", path, "--json").stdout)
    assert json.loads(run("bench", "--constants", path, "--json").stdout)["constants"] == measured["constants"]
    assert 0 <= measured["constants"].pop("hidden_share") <= 0.5  # 0 where there is one core
    assert measured["constants"].pop("batch_s") == 0.0  # hidden on a processor
    assert all(value > 0 for value in measured["constants"].values())


def dear_and_cheap_copies(tmp_path: Path) -> tuple[Path, Path]:
    """Constants of this host by which everything, and by which nothing, is better staged."""
    paths = tmp_path / "dear.json", tmp_path / "cheap.json"
    save_constants(paths[0], host_description(), CostModel(copy_s=1.0))
    save_constants(paths[1], host_description(), CostModel(copy_s=1e-15))
    return paths


def test_a_plan_chooses_by_the_constants_that_it_is_given(run, tmp_path: Path) -> None:
    asked = ("plan", "--model", "llama-3.1-8b", "--prefill", "tp=2,order=NHD", "--decode", "tp=4,order=NHD", "--json")
    ways = []
    for path in dear_and_cheap_copies(tmp_path):
        document = json.loads(run(*asked, "--cost-model", path).stdout)
        ways.append({reading["way"] for subject in document["subjects"] for reading in subject["readings"]})
    assert ways == [{"staged"}, {"direct"}]


def test_a_verification_moves_by_the_constants_that_it_is_given(run, tmp_path: Path) -> None:
    asked = ("verify", "--model", "llama-3.1-8b", "--prefill", "tp=1,order=NHD", "--decode", "tp=2,order=NHD")
    more = ("--layers", "1", "--tokens", "40", "--requests", "1", "--transport", "memory", "--json")
    shares = []
    for path in dear_and_cheap_copies(tmp_path):
        document = json.loads(run(*asked, *more, "--cost-model", path).stdout)
        assert document["passed"]
        shares.append(document["num_staged_bytes"] / document["num_bytes"])
    assert shares == [1.0, 0.0]


ENGINES = ("--model", "llama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=2", "--cost-model")


@pytest.mark.parametrize(
    "words", [("plan", *ENGINES), ("verify", *ENGINES), ("bench", "--constants")], ids=["plan", "verify", "bench"]
)
def test_constants_that_are_asked_for_and_not_there_are_refused(run, tmp_path: Path, words: tuple[str, ...]) -> None:
    missing = run(*words, tmp_path / "none.json")
    assert missing.exit_code == 2
    assert "there is no constants file" in missing.stderr
    save_constants(tmp_path / "theirs.json", "another machine", CostModel())
    foreign = run(*words, tmp_path / "theirs.json")
    assert foreign.exit_code == 2
    assert f"none of this host ({host_description()}) but of (another machine)" in foreign.stderr
    assert "kvreshard bench --calibrate --constants" in foreign.stderr
