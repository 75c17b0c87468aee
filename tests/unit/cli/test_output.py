"""Is a stdout that takes nothing told in one line, whatever was to be written?"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KVRESHARD = [sys.executable, "-m", "kvreshard"]
COMMANDS = [
    ["--help"],
    ["describe", "--model", "llama-3.1-8b"],
    ["plan", "--json"],
]
FULL = "error: stdout cannot be written: No space left on device; give the result another place\n"
CLOSED = "error: stdout is closed: there is no place for the result; > /dev/null drops it\n"


def run_shell(words: list[str], redirection: str) -> subprocess.CompletedProcess[str]:
    """The command with its stdout elsewhere. Unbuffered, Python drops what a closing pipe does not take, without an error."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    line = f'"$@" {redirection}'
    return subprocess.run(
        ["bash", "-c", line, "-", *KVRESHARD, *words], check=False, capture_output=True, text=True, env=env
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(("redirection", "told"), [("> /dev/full", FULL), (">&-", CLOSED)], ids=["full", "closed"])
def test_a_stdout_that_takes_nothing_is_one_line(words: list[str], redirection: str, told: str) -> None:
    done = run_shell(words, redirection)
    assert (done.stderr, done.returncode) == (told, 2)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_pipe_without_a_reader_is_exit_code_141(words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    done = subprocess.run([*KVRESHARD, *words], check=False, stdout=write, stderr=subprocess.PIPE, text=True, env=env)
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 141)


@pytest.mark.parametrize("redirection", ["> {}", ">> {}", "| cat > {}", "| cat >> {}"])
def test_dev_stdout_is_stdout_wherever_it_leads(redirection: str, tmp_path: Path) -> None:
    """A refusal of `--output -` advises it. What a file has is kept where it is appended to, and nothing else comes behind."""
    kept = tmp_path / "layouts"
    kept.write_text("kept\n")
    describe = ["describe", "--model", "llama-3.1-8b"]
    done = run_shell([*describe, "--json", "--output", "/dev/stdout"], redirection.format(kept))
    assert (done.stderr, done.returncode) == ("", 0)
    before = "kept\n" if ">>" in redirection else ""
    assert kept.read_text() == before + run_shell(describe, "").stdout


def test_an_output_may_be_a_pipe_of_the_shell() -> None:
    words = ["describe", "--model", "llama-3.1-8b"]
    done = run_shell(words, "--output >(cat >&2)")
    assert (done.stderr, done.returncode) == (run_shell(words, "").stdout, 0)


def test_a_stderr_that_takes_nothing_leaves_the_exit_code() -> None:
    assert run_shell(["plan", "a.json"], "2> /dev/full").returncode == 2
    assert run_shell(["plan", "a.json"], "2>&-").returncode == 2


def test_characters_that_stdout_lacks_are_escaped(tmp_path: Path) -> None:
    config = tmp_path / "m\u00fc.json"
    config.write_text(
        '{"model_type": "llama", "torch_dtype": "bfloat16", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}'
    )
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    for options in ([], ["--json"]):
        command = [*KVRESHARD, "models", str(config), *options]
        done = subprocess.run(command, check=False, capture_output=True, env=env)
        assert (done.returncode, done.stderr) == (0, b"")
        assert (b"m\\u00fc.json" if options else b"m\\xfc.json") in done.stdout


def test_an_error_is_told_on_a_terminal_said_to_have_no_columns() -> None:
    ours, its = os.openpty()
    env = {**os.environ, "COLUMNS": "0", "TERM": "xterm"}
    done = subprocess.run([*KVRESHARD, "plan", "a.json", "b.json"], check=False, stdout=its, stderr=its, env=env)
    os.close(its)
    assert (done.returncode, b"cannot be read" in os.read(ours, 4096)) == (2, True)
    os.close(ours)
