"""Are measured constants kept per host, and refused where they are not what they should be?"""

import json
from pathlib import Path

import pytest

from kvreshard.model import KvReshardError
from kvreshard.plan.cost import MEASURED_SPEEDUP, CostModel
from kvreshard.session.constants import (
    VERSION,
    default_path,
    host_description,
    load_constants,
    require_constants,
    save_constants,
)

# What was measured on a host is believed for a smaller gain.
MODEL = CostModel(1e-6, 2e9, 3e-8, 4e9, 5e9, min_speedup=MEASURED_SPEEDUP)


def test_constants_are_kept_per_host(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "constants.json"
    assert load_constants(path, "here") is None
    save_constants(path, "here", MODEL)
    save_constants(path, "there", CostModel())
    assert load_constants(path, "here") == MODEL
    assert load_constants(path, "there") == CostModel(min_speedup=MEASURED_SPEEDUP)
    assert load_constants(path, "elsewhere") is None


def test_the_place_follows_the_environment() -> None:
    assert default_path({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/kvreshard/constants.json")
    assert default_path({"HOME": "/h"}) == Path("/h/.cache/kvreshard/constants.json")


def test_the_key_names_the_host_the_same_way_each_time() -> None:
    assert host_description() == host_description()
    assert "cores" in host_description()


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_another_version_is_as_good_as_none_and_is_not_kept(tmp_path: Path, version: int) -> None:
    """Whatever its constants are called and mean."""
    path = tmp_path / "constants.json"
    save_constants(path, "here", MODEL)
    text = path.read_text().replace(f'"version": {VERSION}', f'"version": {version}').replace("copy_s", "post_s")
    path.write_text(text)
    assert load_constants(path, "here") is None
    with pytest.raises(KvReshardError, match=rf"is of version {version}, this kvreshard uses version {VERSION}"):
        require_constants(path, "here")
    save_constants(path, "there", MODEL)
    assert load_constants(path, "there") == MODEL
    assert load_constants(path, "here") is None


@pytest.mark.parametrize("content", ["", "{}", "[]", "\udcff", '{"form": "other", "version": 1, "hosts": {}}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "constants.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(KvReshardError, match=r"constants\.json"):
        load_constants(path, "here")


def test_an_error_about_another_host_or_form_is_short(tmp_path: Path) -> None:
    """A file may have the constants of a whole fleet."""
    path = tmp_path / "constants.json"
    hosts = {f"host {number}": {} for number in range(5)}
    path.write_text(json.dumps({"form": "kvreshard.constants", "version": VERSION, "hosts": hosts}))
    with pytest.raises(KvReshardError, match=r"but of \(host 0\); \(host 1\); \(host 2\) and 2 more; `kvreshard bench"):
        require_constants(path, "mine")
    path.write_text(json.dumps({"form": "x" * 5000, "version": VERSION, "hosts": {}}))
    with pytest.raises(KvReshardError, match=r"is a 'x+\.\.\. \(5000 characters\)', not a") as found:
        require_constants(path, "mine")
    assert len(str(found.value)) < 1000


def test_constants_that_are_not_positive_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    save_constants(path, "here", MODEL)
    path.write_text(path.read_text().replace("2000000000.0", "-2.0"))
    with pytest.raises(KvReshardError, match="calibrate"):
        load_constants(path, "here")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KvReshardError, match=r"file/constants\.json cannot be written: .*; name another"):
        save_constants(tmp_path / "file" / "constants.json", "here", MODEL)
