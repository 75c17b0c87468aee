"""Which releases of vLLM is the connector loaded with, which file says what differs there, and which exchange caches?"""

from __future__ import annotations

import itertools
import logging

import pytest

from kvreshard.vllm import versions
from kvreshard.vllm.versions import EXCHANGES, OVERRIDE, TESTED, check_version, exchanged_with, minor, release


@pytest.mark.parametrize("version", [*TESTED, f"{TESTED[0]}+cpu"])
def test_tested_versions_pass(version: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version(version)
    assert not caplog.text


@pytest.mark.parametrize("version", ["0.99.1", "0.29.0", "1.32.0", "0.3", "dev", "0.320.0"])
def test_another_minor_version_is_refused_with_both_and_the_way_out(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    with pytest.raises(
        ImportError, match=rf"tested with vLLM {', '.join(TESTED)}, and this is {version}.*{OVERRIDE}=1"
    ):
        check_version(version)
    monkeypatch.setenv(OVERRIDE, "1")
    check_version(version)


def test_another_patch_version_is_let_through_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_version("0.32.7")
    assert "and this is 0.32.7" in caplog.text


@pytest.mark.parametrize(
    ("version", "file"),
    [
        ("0.30.0", "v0_30"),
        ("0.31.4+cpu", "v0_31"),
        ("0.32.0", "v0_32"),
        ("0.33.0+cu129", "v0_33"),
        ("0.29.9", "v0_30"),
        ("0.100.0", "v0_33"),
        ("1.0.0", "v0_33"),
        ("dev", "v0_30"),
    ],
)
def test_a_version_has_its_own_file_or_the_nearest(version: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "find_version", lambda: version)
    assert type(release.__wrapped__()).__module__.rpartition(".")[2] in (file, "release")
    assert release.__wrapped__() is __import__(f"kvreshard.vllm.versions.{file}", fromlist=["RELEASE"]).RELEASE


def test_every_tested_minor_version_has_a_file() -> None:
    assert len({minor(version) for version in TESTED}) == len(TESTED)
    for version in TESTED:
        major, number = minor(version)
        assert __import__(f"kvreshard.vllm.versions.v{major}_{number}", fromlist=["RELEASE"]).RELEASE


def test_versions_exchange_caches_both_ways_and_not_with_others() -> None:
    for one, other in itertools.permutations(TESTED, 2):
        assert (
            (other in exchanged_with(one)) == (one in exchanged_with(other)) == (frozenset((one, other)) in EXCHANGES)
        )
    assert exchanged_with("0.32.1") == exchanged_with("0.29.0") == []
    assert all(version not in exchanged_with(version) for version in TESTED)
