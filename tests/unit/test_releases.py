"""Is every pair of vLLM releases that the connector accepts one that was run and exact, and do the pages say what was run?"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests import resolves
from tests.e2e import releases_table
from tests.e2e.releases import MODELS, rows
from tests.releases import INSTALLED, RELEASES, full_name

from kvreshard.vllm.versions import EXCHANGES, TESTED, minor

ROOT = Path(__file__).parents[2]
OUTCOMES = json.loads(releases_table.OUTCOMES.read_text())
RESOLVED = json.loads(resolves.OUTCOMES.read_text())


@pytest.mark.parametrize("pair", sorted(map(sorted, EXCHANGES)), ids="-".join)
def test_a_pair_that_is_accepted_was_exact_both_ways(pair: list[str]) -> None:
    cases = [case for case in rows() if {case.prefill.vllm, case.decode.vllm} == set(pair)]
    assert len(cases) == 2 * len(MODELS)
    assert {case.name: OUTCOMES.get(case.name) for case in cases} == dict.fromkeys(
        [case.name for case in cases], "exact"
    )


def test_a_release_that_is_supported_was_run() -> None:
    assert set(TESTED) == set(RELEASES)
    for release in set(TESTED) - {INSTALLED}:
        own = [case.name for case in rows() if case.prefill.vllm == case.decode.vllm == release]
        assert [OUTCOMES.get(name) for name in own] == ["exact"] * len(MODELS)


def test_the_page_shows_what_was_run() -> None:
    page = (ROOT / "docs/versions.md").read_text()
    again = releases_table.fill(page, "pairs of releases", releases_table.pairs(OUTCOMES))
    assert again == page
    assert releases_table.fill(page, "parts of releases", releases_table.parts()) == page
    assert releases_table.fill(page, "what resolves", resolves.table(RESOLVED)) == page


def test_the_extra_resolves_with_every_release_for_every_python() -> None:
    assert set(RESOLVED) == set(RELEASES)
    assert {python for by_python in RESOLVED.values() for python in by_python} == set(resolves.PYTHONS)
    assert not [found for by_python in RESOLVED.values() for found in by_python.values() if "error" in found]


def test_the_distribution_asks_for_the_supported_releases() -> None:
    low, high = re.search(r'"vllm>=([\d.]+),<([\d.]+)"', (ROOT / "pyproject.toml").read_text()).groups()  # type: ignore[union-attr]
    first, last = minor(TESTED[0]), minor(TESTED[-1])
    assert tuple(map(int, low.split("."))) == first
    assert tuple(map(int, high.split("."))) == (last[0], last[1] + 1)


def test_ci_runs_parts_of_vllm_with_every_release() -> None:
    others = re.search(r"^OTHER_RELEASES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert others is not None
    assert {*others[1].split(), INSTALLED} == set(RELEASES)
    in_ci = [(case.prefill.vllm, case.decode.vllm) for case in rows() if case.ci]
    for release in set(RELEASES) - {INSTALLED}:
        assert in_ci.count((release, release)) == 2
        assert (release, INSTALLED) in in_ci
        assert (INSTALLED, release) in in_ci


def test_a_release_is_named_by_its_minor_version() -> None:
    assert full_name("0.31") == full_name("0.31.0") == "0.31.0"
    with pytest.raises(SystemExit, match=r"vLLM 0\.29 is none of 0\.30\.0"):
        full_name("0.29")
