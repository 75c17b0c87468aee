"""`kvreshard bench`: are the constants shown, kept, and told apart from the defaults?"""

import json
from pathlib import Path

import pytest

from kvreshard.plan.cost import CostModel
from kvreshard.session.constants import host_facts, save_constants


def test_without_a_file_the_defaults_are_shown(run, tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    assert "default; not measured here" in run("bench", "--constants", path).stdout
    found = json.loads(run("bench", "--constants", path, "--json").stdout)
    assert found["source"] == "default"
    assert CostModel(**found["constants"]) == CostModel()
    assert not path.exists()


def test_kept_constants_are_shown(run, tmp_path: Path) -> None:
    path, model = tmp_path / "constants.json", CostModel(1e-6, 2e9, 3e-8, 4e9)
    save_constants(path, host_facts(), model)
    assert "1.00 us" in run("bench", "--constants", path).stdout
    found = json.loads(run("bench", "--constants", path, "--json").stdout)
    assert (found["source"], CostModel(**found["constants"])) == ("measured", model)


def test_a_file_that_is_none_is_refused(run, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text("{}")
    result = run("bench", "--constants", tmp_path / "odd.json")
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_calibration_measures_and_keeps(run, tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    measured = json.loads(run("bench", "--calibrate", "--constants", path, "--json").stdout)
    assert json.loads(run("bench", "--constants", path, "--json").stdout)["constants"] == measured["constants"]
    assert all(value > 0 for value in measured["constants"].values())
