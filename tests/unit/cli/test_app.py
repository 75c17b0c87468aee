"""Is every failure one line and an exit code, whoever fails?"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

import kvreshard
from kvreshard.cli import app as commands

KVRESHARD = [sys.executable, "-c", "from kvreshard.cli import main; main()"]
LLAMA = ("--model", "llama-3.1-8b")

BAD = [
    (["plan", "--modle", "x"], "No such option: --modle"),
    (["pln"], "No such command 'pln'"),
    (["plan", *LLAMA, "--prefill", "tp=4"], "the decode engine is missing"),
    (["plan", "--prefill", "tp=4", "--decode", "tp=2"], "needs a model"),
    (["plan", *LLAMA, "--prefill", "tq=4", "--decode", "tp=2"], "did you mean 'tp'?"),
    (["plan", *LLAMA, "--prefill", "tp=0", "--decode", "tp=2"], "--prefill: engine option 'tp': 0"),
    (["plan", *LLAMA, "--prefill", "tp=2", "--decode", "tp=0"], "--decode: engine option 'tp': 0"),
    (["doctor", "--decode", "tp=-1"], "--decode: engine option 'tp': -1"),
    (["plan", *LLAMA, "--prefill", "tp=1,page=0", "--decode", "tp=2"], "engine option 'page': 0"),
    (
        ["plan", *LLAMA, "--prefill", "tp=1,order=HDN", "--decode", "tp=2"],
        "engine option 'order': value 'HDN' is not known",
    ),
    (["plan", *LLAMA, "--prefill", "tp=1", "--decode", "tp=1", "--pages", "0"], "--pages"),
    (["plan", *LLAMA, "--prefill", "tp=1", "--decode", "tp=1,dtype=fp8"], "encoding is 'bfloat16' in engine 'prefill'"),
    (["plan", *LLAMA, "--prefill", "tp=1", "--decode", "tp=1", "--rank", "1"], "has no rank 1; its ranks are [0]"),
    (["plan", *LLAMA, "--prefill", "tp=1", "--decode", "tp=1", "--copies"], "--tables FILE"),
    (
        ["plan", "--model", "deepseek-v3", "--prefill", "tp=1", "--decode", "tp=2,pcp=4"],
        "write dcp=4 too, or leave pcp out",
    ),
    (["plan", *LLAMA, "--prefill", "tp=1", "--decode", "tp=1", "--way", "fast"], "'fast' is not one of"),
    (["plan", "a.json"], "arguments: 'a.json', taken as 1 layout file; give two, prefill then decode"),
    (["plan", "llama-3.1-8b", "tp=1", "tp=2"], "Engines of a model go with --model, --prefill and --decode"),
    (["plan", "a", "b", "c", "d"], "'a', 'b', 'c', ..., taken as 4 layout files"),
    (["plan", "a.json", "b.json"], "layout file 'a.json' cannot be read: No such file"),
    (["describe"], "Missing option '--model'"),
    (["describe", "--model", "lama-3.1-8b"], "did you mean 'llama-3.1-8b'"),
    (
        ["describe", "--model", "Llama-3.1-8B"],
        "`kvreshard models` lists all; for others give the path of a config.json",
    ),
    (["describe", "--model", "meta-llama/Llama-3.1-8B-Instruct"], "did you mean 'llama-3.1-8b'?"),
    (["describe", "--model", "zzz"], "give the path of a config.json, or one of llama-3.1-8b, "),
    (["plan", *LLAMA, "--prefill", "tp=2,\x1b[31mfoo=3", "--decode", "tp=2"], "option '\\x1b[31mfoo' (value '3')"),
    (["plan", *LLAMA, "--prefill", "tp=2", "--decode", "tp=2", "--tables", "a\nb", "--copies"], "'a\\nb'"),
    (["describe", "--model", "no/such/config.json"], "no/such/config.json"),
    (["verify", "--requests", "0"], "'0'"),
    (["verify", "--requests", "-1"], "-1"),
    (["verify", "--requests", "many"], "'many'"),
    (["verify", "--layers", "31"], "has 30 decoder layers"),
    (["verify", "--prefill", "tp=1,pp=4", "--layers", "3"], "fewer than the 4 pipeline stages"),
    (["verify", "--push", "--way", "staged"], "cannot be staged"),
    (["verify", "--prefill", "tp=1,pages=3", "--transport", "memory"], "free pages"),
    (["verify", "--transport", "carrier-pigeon"], "'carrier-pigeon' is not one of"),
    (["verify", "--requests", "9999", "--tokens", "99999"], "give fewer --requests or --tokens"),
    (["models", "--sort"], "No such option: --sort"),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(run, words: list[str], told: str) -> None:
    result: Result = run(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr


@pytest.mark.parametrize("words", [words for words, _ in BAD if words[0] != "pln"], ids=" ".join)
def test_with_json_the_failure_is_the_one_document(run, words: list[str]) -> None:
    result: Result = run(*words, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"]
    assert f"error: {error['message']}\n" == result.stderr


@pytest.mark.parametrize("opening", ["[", '{"a":'], ids=["lists", "objects"])
@pytest.mark.parametrize("option", ["--model", "--cost-model"])
def test_a_file_of_nothing_but_openings_is_refused(run, tmp_path: Path, opening: str, option: str) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text(opening * 5_000)
    result: Result = run("plan", *LLAMA, "--prefill", "tp=1", "--decode", "tp=1", option, deep)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert str(deep) in result.stderr


def test_a_json_option_with_a_value_still_asks_for_json(run) -> None:
    result: Result = run("verify", "--json=true")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"]["message"] == "Option '--json' does not take a value."


def test_version_and_help(run) -> None:
    assert run("--version").stdout == f"kvreshard {kvreshard.__version__}\n"
    assert run("--help").exit_code == 0
    assert "verify" in run().stdout
    for command in ("verify", "plan", "describe", "models", "doctor", "replay", "keys", "bench"):
        told = run(command, "--help")
        assert (told.exit_code, "<bool>" in told.stdout) == (0, False)
        assert ("docs/howto/engines.md" in told.stdout) == (command in ("verify", "plan", "describe"))


@pytest.mark.parametrize("command", [(), ("plan",), ("models",)])
def test_the_short_form_of_help(run, command: tuple[str, ...]) -> None:
    assert run(*command, "-h").stdout == run(*command, "--help").stdout


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("kvreshard pl", "plan"),
        ("kvreshard plan --pref", "--prefill"),
        ("kvreshard plan --model gemma-4-2", "gemma-4-26b-a4b"),
        ("kvreshard models jamba", "jamba-1.5-mini"),
        ("kvreshard plan --prefill tp=4,pag", "tp=4,page="),
    ],
)
def test_a_shell_completes_words(words: str, wanted: str) -> None:
    environment = {"_KVRESHARD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "kvreshard"], check=False, capture_output=True, text=True, env=os.environ | environment
    )
    assert (wanted in done.stdout.split(), done.stderr) == (True, "")


def test_text_that_no_encoding_writes_is_escaped(tmp_path: Path) -> None:
    """Half of a pair of surrogates, in a file's text and in its name."""
    path = tmp_path / os.fsdecode(b"\xff.json")
    fields = (
        '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "dtype": "float16"'
    )
    path.write_text(f'{{"model_type": "\\ud800x", {fields}}}')
    for words in ([], ["--json"]):
        done = subprocess.run(
            [*KVRESHARD, "models", path, *words],
            check=False,
            capture_output=True,
            env=os.environ | {"PYTHONIOENCODING": "utf-8:strict"},
        )
        assert (b"\\ud800x" in done.stdout, b"\\udcff.json" in done.stdout) == (True, True)
        assert done.stderr.startswith(b"warning: model '\\udcff': model type '\\ud800x' is not known")
    assert json.loads(done.stdout)[0]["model_type"] == "\ud800x"


def test_a_bug_is_not_dressed_up_as_bad_input() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        commands._run(broken, as_json=False)


def test_interrupted(capsys) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    try:
        assert commands._run(interrupted, as_json=False) == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # the next one changes nothing
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted\n"


def start(*words: str) -> subprocess.Popen[str]:
    """The command in a process of its own. Unbuffered, Python drops what a closing pipe does not take, without an error.

    A shell lets what it starts in the background ignore interrupts, and whatever that starts: here they count.
    """
    env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*KVRESHARD, *words],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=env,
        preexec_fn=heed_interrupts,  # noqa: PLW1509
    )


def heed_interrupts() -> None:
    """In the new process, before the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    process = start("describe", "--model", "llama-3.1-70b", "--engine", "tp=16")  # far more than a pipe holds
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 141


def interrupt(process: subprocess.Popen[str], every_s: float) -> tuple[str, str]:
    """Ctrl-C, and what was printed. One that comes just before a blocking read is not seen until another comes, as by a person."""
    for _ in range(int(60 / every_s)):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=every_s)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError("the process goes on after a minute of interrupts")


@pytest.mark.parametrize("every_s", [2.0, 0.01])
def test_an_interrupted_process_says_so(every_s: float, tmp_path: Path) -> None:
    """Whether by one interrupt or by some more, which come while it ends."""
    pipe = tmp_path / "tables.json"
    os.mkfifo(pipe)
    process = start("plan", *LLAMA, "--prefill", "tp=1", "--decode", "tp=1", "--copies", "--tables", str(pipe))
    with pipe.open("w"):  # opens once the command reads, and it waits for more
        out, err = interrupt(process, every_s)
    assert (out, err, process.returncode) == ("", "interrupted\n", 130)


INTERRUPTED_AT_NUMPY = """
import os, signal, sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "numpy":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from kvreshard.cli import main
main()
"""


def test_an_interrupt_during_the_imports_is_told_like_a_later_one() -> None:
    words = [sys.executable, "-c", INTERRUPTED_AT_NUMPY, "models"]
    done = subprocess.run(words, check=False, capture_output=True, text=True, preexec_fn=heed_interrupts)
    assert (done.stdout, done.stderr, done.returncode) == ("", "interrupted\n", 130)


def test_the_console_script_is_this_app() -> None:
    done = start("plan", *LLAMA, "--prefill", "tp=x", "--decode", "tp=1")
    out, err = done.communicate(timeout=60)
    assert (out, err, done.returncode) == ("", "error: --prefill: engine option 'tp': 'x' is not a whole number\n", 2)
