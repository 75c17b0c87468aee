"""Is a person told of an engine that can be described, and that vLLM would not run?"""

import json
from pathlib import Path

import pytest

from kvreshard.catalog import MODELS
from kvreshard.catalog.entries import CONFIGS

LLAMA = ("--model", "llama-3.1-8b")
ODD = ("--prefill", "tp=3", "--decode", "tp=8,page=7")
TOLD = [
    "vLLM 0.32 would not run engine 'prefill': tp=3 does not divide the 32 query heads; use a divisor",
    "vLLM 0.32 would not run engine 'prefill': tp=3 and the 8 KV heads of 'full' layers do not divide one another; use a divisor or a multiple of 8",
    "vLLM 0.32 would not run engine 'decode': page=7: attention over heads needs a multiple of 16 tokens",
]
QUICK = ("--transport", "memory", "--tokens", "40", "--requests", "1", "--layers", "1")
COMMANDS = [("plan", *LLAMA, *ODD), ("verify", *LLAMA, *ODD, *QUICK)]


@pytest.mark.parametrize("words", COMMANDS, ids=["plan", "verify"])
def test_each_is_told_once_and_changes_nothing_else(run, words: tuple[str, ...]) -> None:
    result = run(*words)
    assert result.exit_code == 0
    assert [line for line in result.stderr.splitlines() if not line.startswith("verifying ")] == [
        f"warning: {told}" for told in TOLD
    ]
    assert "would not run" not in result.stdout
    assert json.loads(run(*words, "--json").stdout)["warnings"] == TOLD


def test_a_description_is_told_of_too(run, tmp_path: Path) -> None:
    words = ("describe", *LLAMA, "--engine", "tp=3", "--name", "prefill")
    result = run(*words)
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [f"warning: {told}" for told in TOLD[:2]]
    assert "warnings" not in json.loads(result.stdout)
    summary = json.loads(run(*words, "--output", tmp_path / "a.json", "--json").stdout)
    assert summary["warnings"] == TOLD[:2]


@pytest.mark.parametrize(("dtype", "is_told"), [("", True), (",dtype=fp32", False)])
def test_what_is_assumed_of_an_engine_is_told(run, tmp_path: Path, dtype: str, *, is_told: bool) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads((CONFIGS / "llama-3.1-8b.json").read_text()), "torch_dtype": "float32"}))
    result = run(
        "plan", "--model", config, "--prefill", f"tp=1{dtype}", "--decode", f"tp=2{dtype or ',dtype=bf16'}", "--json"
    )
    told = "engine 'prefill': the model's file says float32, which vLLM 0.32 runs as bfloat16, on GPUs before SM80 as another; "
    assert [line.startswith(told) for line in json.loads(result.stdout)["warnings"]] == [True] * is_told
    assert result.exit_code == 0  # bfloat16 is what it is read as


@pytest.mark.parametrize("model", MODELS)
def test_usual_pairs_are_told_nothing(run, model: str) -> None:
    result = run("plan", "--model", model, "--prefill", "tp=1", "--decode", "tp=2")
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("architecture", "told"),
    [
        ("LlamaForCausalLM", ""),
        ("DeepseekV3ForCausalLM", "deepseek_v3"),
        ("Qwen3ForCausalLM", "qwen3"),
        ("NewForCausalLM", ""),
    ],
)
def test_architectures_of_another_type_are_told(run, tmp_path: Path, architecture: str, told: str) -> None:
    config = tmp_path / "config.json"
    content = {**json.loads((CONFIGS / "llama-3.1-8b.json").read_text()), "architectures": [architecture]}
    config.write_text(json.dumps(content))
    result = run("plan", "--model", config, "--prefill", "tp=1", "--decode", "tp=2", "--json")
    found = [line for line in json.loads(result.stdout)["warnings"] if "architectures" in line]
    says = (
        f"the file's architectures say {architecture}, which is of model type '{told}', and its model_type says 'llama'"
    )
    # Once: both engines run the same model.
    assert [says in line for line in found] == ([True] if told else [])
    assert result.exit_code == 0
