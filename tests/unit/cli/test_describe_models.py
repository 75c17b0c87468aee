"""`kvreshard describe` and `kvreshard models`: is what they write whole, right, or not there at all?"""

import json
from pathlib import Path

import pytest

from kvreshard.catalog import MODELS, describe, load, parse_engine
from kvreshard.cli import inputs
from kvreshard.model import wire


def test_what_is_described_is_what_the_catalog_says(run, tmp_path: Path) -> None:
    words = ("describe", "--model", "gemma-4-26b-a4b", "--engine", "tp=2,pp=2", "--name", "left", "--pages", "9")
    expected = describe(load("gemma-4-26b-a4b"), parse_engine("tp=2,pp=2"), "left", 9)
    assert wire.decode(run(*words).stdout.encode(), "json") == expected
    result = run(*words, "--output", tmp_path / "left.json")
    assert "engine 'left', 4 ranks, 60 fields, 6 groups" in result.stdout
    assert wire.decode((tmp_path / "left.json").read_bytes(), "json") == expected
    assert json.loads(run(*words, "--output", tmp_path / "left.json", "--json").stdout)["ranks"] == 4


def test_a_config_file_works_like_an_id(run, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        assert len(json.loads(run("describe", "--model", path).stdout)["fields"]) == 4


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "llama"}'])
def test_a_bad_config_names_the_file_or_model(run, tmp_path: Path, content: str) -> None:
    (tmp_path / "odd.json").write_text(content)
    result = run("describe", "--model", tmp_path / "odd.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "odd" in result.stderr


def test_an_output_that_cannot_be_written_leaves_nothing(run, tmp_path: Path) -> None:
    result = run("describe", "--model", "llama-3.1-8b", "--output", tmp_path / "no" / "such.json")
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory; nothing was written" in result.stderr
    assert run("describe", "--model", "llama-3.1-8b", "--output", tmp_path).exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "layout.json").write_text("old")

    def full_disk(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(inputs.InputError, match="No space left on device; nothing was written"):
        inputs.write_whole(tmp_path / "layout.json", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("layout.json", "old")]


def test_models_lists_all_with_their_doubts(run) -> None:
    document = {entry["id"]: entry for entry in json.loads(run("models", "--json").stdout)}
    assert list(document) == list(MODELS)
    assert document["llama-3.1-8b"]["bytes_per_token"] == 131_072
    gemma = document["gemma-4-31b"]
    assert gemma["bytes_per_token"] == 10 * 4 * 512 * 2 * 2
    assert gemma["window_bytes_per_request"] == 50 * 16 * 256 * 2 * 2 * 1024
    assert document["deepseek-v3"]["window_bytes_per_request"] == 0
    assert document["deepseek-v3"]["sources"]
    assert document["jamba-1.5-mini"]["state_bytes_per_request"] > 0
    table = run("models").stdout
    for name, entry in MODELS.items():
        line = next(line for line in table.splitlines() if line.startswith(f"{name} "))
        assert line.startswith(f"{name} ? ") == bool(entry.unconfirmed)


def test_one_model_is_shown_with_all_that_is_known_of_it(run, tmp_path: Path) -> None:
    out = run("models", "deepseek-v3.2").stdout
    assert "61 x latent, 132 bytes per token" in out
    assert all(" ".join(source.split()) in " ".join(out.split()) for source in MODELS["deepseek-v3.2"].sources)
    assert [entry["id"] for entry in json.loads(run("models", "gemma-4-31b", "--json").stdout)] == ["gemma-4-31b"]
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "2 x full, 4 heads x 16" in run("models", tmp_path / "config.json").stdout
    assert "did you mean 'gemma-4-31b'?" in run("models", "gemma-4-31").stderr


@pytest.mark.parametrize(
    "name", ["left\n", "\x1b[31mleft", "x" * 257, "", "  "], ids=["line break", "colour", "long", "empty", "blank"]
)
def test_a_name_that_plan_would_refuse_is_not_written(run, tmp_path: Path, name: str) -> None:
    result = run("describe", "--model", "llama-3.1-8b", "--name", name, "--output", tmp_path / "left.json")
    assert (result.exit_code, result.stderr.count("\n"), "\x1b" in result.stderr) == (2, 1, False)
    assert "must have 1 to 256 characters, all of them visible" in result.stderr
    assert list(tmp_path.iterdir()) == []


PLAIN = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
QWEN = {
    **PLAIN,
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 2,
    "use_sliding_window": True,
    "sliding_window": 64,
    "max_window_layers": 1,
}


def test_a_model_without_a_dtype_is_shown_with_an_assumed_one(run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PLAIN))
    result = run("models", tmp_path, "--json")
    (found,) = json.loads(result.stdout)
    assert (result.exit_code, found["bytes_per_token"]) == (0, 2 * 2 * 4 * 16 * 2)
    assert "sizes are those of caches in bfloat16, which is assumed: " in found["notes"][0]
    assert "field 'dtype': is missing" in found["notes"][0]
    assert "bfloat16, which is assumed" in run("models", tmp_path).stdout


def test_models_warns_as_plan_does(run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    told = "1 of 2 layers have a window (use_sliding_window, max_window_layers 1); vLLM 0.32 does not start"
    result = run("models", tmp_path, "--json")
    assert told in result.stderr
    assert told in json.loads(result.stdout)[0]["warnings"][0]
    assert told in run("plan", "--model", tmp_path, "--prefill", "tp=1", "--decode", "tp=2").stderr
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "max_window_layers": 2}))
    assert run("models", tmp_path).stderr == ""


def test_the_known_types_are_listed_and_named_where_one_is_not_known(run, tmp_path: Path) -> None:
    listed = run("models", "--types").stdout.splitlines()
    assert json.loads(run("models", "--types", "--json").stdout) == listed
    assert {"llama", "qwen2_vl_text", "gpt_oss"} <= set(listed)
    (tmp_path / "config.json").write_text(json.dumps({**PLAIN, "model_type": "odd", "torch_dtype": "bfloat16"}))
    assert "`kvreshard models --types` lists the known ones" in run("models", tmp_path).stderr
    assert "leave 'llama-3.1-8b' or --types out" in run("models", "llama-3.1-8b", "--types").stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--engine", "pages=100", "--pages", 200), "--pages 200 and pages=100 of engine 'engine' are two sizes"),
        (("--pages", 1), "a pool has at least 2"),
        (("--output", "-"), "give one, or /dev/stdout"),
        (("--output", "{tmp}/loop"), "it is a link to itself; nothing was written"),
    ],
)
def test_what_cannot_be_meant_is_one_error(run, tmp_path: Path, options: tuple[object, ...], told: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    result = run("describe", "--model", "llama-3.1-8b", *(str(word).format(tmp=tmp_path) for word in options))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert told in result.stderr


def test_a_layout_that_no_command_would_read_is_not_written(run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**PLAIN, "torch_dtype": "bfloat16", "num_hidden_layers": 9_000}))
    result = run("describe", "--model", config, "--output", tmp_path / "layout.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no engine and no command would read this layout" in result.stderr
    assert not (tmp_path / "layout.json").exists()
