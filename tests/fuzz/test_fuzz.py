"""Does every kept input still do no harm, and do some fresh ones? The many are tried by `python -m tests.fuzz.run`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fuzz.corpus import ROOT, load, seeds
from tests.fuzz.run import run_random
from tests.fuzz.targets import TARGETS

KEPT = [(name, file) for name in TARGETS for file in load(name)]
FRESH = {"route": 40, "layout": 300, "layout_json": 300}
# `make test-ci` gives it a minute.
SECONDS = float(os.environ.get("KVRESHARD_FUZZ_SECONDS", "0"))


def test_there_are_seeds_for_every_target_and_they_are_the_ones_that_the_code_writes() -> None:
    assert {path.name for path in ROOT.iterdir()} == set(TARGETS)
    for name, messages in seeds().items():
        kept = load(name)
        assert {file: kept[file] for file in messages} == messages, "python -m tests.fuzz.corpus writes them"


@pytest.mark.parametrize(("name", "file"), KEPT)
def test_a_kept_input_does_no_harm(name: str, file: str) -> None:
    outcome = TARGETS[name](load(name)[file])
    assert outcome == ("refused" if file.startswith("crash") else "accepted")


@pytest.mark.parametrize("name", TARGETS)
def test_fresh_inputs_do_no_harm(name: str, run_seed: int) -> None:
    tally = run_random(name, FRESH.get(name, 3000), 300.0, run_seed)
    assert tally.findings == []
    assert tally.inputs
    assert tally.refused


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "route"])
@settings(max_examples=4 * settings.default.max_examples)
@given(data=st.binary(max_size=300))
def test_noise_does_no_harm(name: str, data: bytes) -> None:
    TARGETS[name](data)


@pytest.mark.slow
@pytest.mark.skipif(not SECONDS, reason="KVRESHARD_FUZZ_SECONDS says for how long")
def test_many_inputs_do_no_harm(run_seed: int) -> None:
    for name in TARGETS:
        tally = run_random(name, sys.maxsize, SECONDS / len(TARGETS), run_seed)
        print(name, tally)
        assert tally.findings == []


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_the_steered_run_starts_and_counts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", "--coverage", "--inputs", "200", "--target", "note"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT.parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["note"]["inputs"] >= 200
