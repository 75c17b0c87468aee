"""Does `kvreshard keys` write what engines read, and refuse in words?"""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreshard.cli.app import app
from kvreshard.session.keys import read_keys, write_keys

LONG = "x" * 300


def test_the_files_are_named_and_are_keys(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["keys", str(tmp_path / "room"), "--name", "p-0"]).stdout
    assert f"{tmp_path / 'room' / 'p-0.key_secret'}: for engines only (curve_secret_key_file)" in shown
    assert read_keys(tmp_path / "room" / "p-0.key_secret", tmp_path / "room").public


def test_json_names_the_files(tmp_path: Path) -> None:
    document = json.loads(CliRunner().invoke(app, ["keys", str(tmp_path), "--json"]).stdout)
    assert document["secret_key_file"] == str(tmp_path / "kvreshard.key_secret")


def test_files_that_are_not_what_they_should_be_are_called_what_they_are(run, tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path, "room")
    for words, told in (
        (["keys", tmp_path / "room.key"], "is a file; name the directory"),
        (["doctor", "--peer", "a:1", "--key", public], "has no secret key"),
        (["doctor", "--peer", "a:1", "--key", tmp_path / "none"], "there is no key file"),
        # No stat of them answers yes or no, as of paths in a directory of somebody else.
        (["keys", tmp_path / LONG], "cannot write keys to"),
        (["keys", "/proc/keys-of-mine"], "No such file or directory; name a directory that you may write to"),
        (["doctor", "--peer", "a:1", "--key", tmp_path / LONG], "cannot read a key from"),
        (
            ["doctor", "--peer", "a:1", "--key", secret, "--trusted", tmp_path / LONG],
            "not a directory that can be read",
        ),
    ):
        result = run(*words)
        assert (result.exit_code, told in result.stderr) == (2, True), result.stderr


def test_a_name_that_is_a_path_and_a_second_pair_are_refused(tmp_path: Path) -> None:
    for arguments, told in ((["--name", "../x"], "is no name for key files"), ([], ""), ([], "already")):
        result = CliRunner().invoke(app, ["keys", str(tmp_path), *arguments])
        assert (result.exit_code, told in result.output) == (2 if told else 0, True)


def test_a_directory_without_a_name_is_refused() -> None:
    result = CliRunner().invoke(app, ["keys", ""])
    assert (result.exit_code, "the directory is empty" in result.output) == (2, True)


def test_without_pyzmq_both_ends_say_what_to_install(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = write_keys(tmp_path, "e")[1]
    monkeypatch.setitem(sys.modules, "zmq", None)
    for words in (["keys", tmp_path / "more"], ["doctor", "--peer", "localhost:1", "--key", secret, "--no-loopback"]):
        result = run(*words)
        assert (result.exit_code, "keys need pyzmq" in result.output) == (2, True)
