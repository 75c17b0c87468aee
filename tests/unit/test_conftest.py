"""Is a run of the suite really random, and can it be repeated?"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import core, settings

ROOT = Path(__file__).resolve().parents[2]

SAMPLE = """
from hypothesis import given, strategies as st

drawn = []

@given(number=st.integers(0, 2**60))
def test_draw(number):
    drawn.append(number)

def test_show():
    print("drawn", sum(drawn))
"""


def test_the_seed_of_this_run_is_the_one_that_hypothesis_uses(run_seed: int) -> None:
    assert core.global_force_seed == run_seed


@pytest.mark.parametrize("profile", ["dev", "ci", "deep"])
def test_no_profile_repeats_the_same_examples_each_time(profile: str) -> None:
    assert not settings.get_profile(profile).derandomize


def drawn_by_a_run(folder: Path, *options: str) -> str:
    """The closing sum of SAMPLE's examples, from a run of its own under this suite's conftest, as on CI."""
    (folder / "test_sample.py").write_text(SAMPLE)
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-c", os.devnull, *options, "."]
    env = os.environ | {"CI": "true", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(line for line in done.stdout.splitlines() if "drawn" in line)


def test_the_same_seed_draws_the_same_examples_and_another_seed_does_not(tmp_path: Path) -> None:
    first = drawn_by_a_run(tmp_path, "--hypothesis-seed=1")
    assert drawn_by_a_run(tmp_path, "--hypothesis-seed=1") == first
    assert drawn_by_a_run(tmp_path, "--hypothesis-seed=2") != first


def test_processes_side_by_side_have_the_seed_that_is_told(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(
        "def test_one(run_seed): assert run_seed < 0\ndef test_two(run_seed): assert run_seed < 0\n"
    )
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-c", os.devnull, "."]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    told = re.findall(r"seed: (\d+)", done.stdout)
    assert len(told) == 1, done.stdout + done.stderr
    assert set(re.findall(r"assert (\d+) < 0", done.stdout)) == set(told)
