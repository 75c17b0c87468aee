"""Identity of adapters: equal wherever the files lie, different for other weights under the same name."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.schedulers import TOKENS, Decode, full, groups, producer, request
from vllm.config.lora import LoRAConfig
from vllm.lora.request import LoRARequest

from kvreshard.vllm.adapters import PIECE_BYTES, PIECES, WHOLE_BYTES, Adapters

pytestmark = pytest.mark.vllm

RANK_8 = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
LARGE = 2 * WHOLE_BYTES


def adapter(
    folder: Path, weights: bytes = b"weights", config: dict[str, Any] = RANK_8, file: str = "safetensors"
) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / f"adapter_model.{file}").write_bytes(weights)
    return folder


def asked(folder: Path | str, name: str = "sql", number: int = 1, **more: Any) -> LoRARequest:
    return LoRARequest(name, number, str(folder), **more)


def count_loadable(theirs: LoRARequest | None, mine: LoRARequest | None) -> int:
    """How much of a prompt of 300 tokens a decode engine would load."""
    side, prompt = producer(groups(full(64))), request("p-1", TOKENS, lora_request=theirs)
    side.arrive(prompt)
    list(side.schedule(prompt))
    params, _ = side.finish(prompt, [[1, 2, 3, 4, 5]])
    assert params is not None
    decode = Decode(full(128))
    return decode.side.count_loadable(decode.arrive(params, TOKENS, lora_request=mine), 0)


def test_one_adapter_is_loaded_wherever_it_lies_and_however_it_is_numbered(tmp_path: Path) -> None:
    here, there = adapter(tmp_path / "here"), adapter(tmp_path / "there")
    assert count_loadable(asked(there, number=1), asked(here, number=7)) == 299


@pytest.mark.parametrize(
    "change",
    [
        {"weights": b"newer weights"},
        {"weights": b"WEIGHTS"},
        {"config": {**RANK_8, "lora_alpha": 8}},
    ],
    ids=["another size", "another value", "another scale"],
)
def test_another_adapter_of_the_same_name_is_not_loaded(change: dict[str, Any], tmp_path: Path) -> None:
    theirs, mine = adapter(tmp_path / "theirs"), adapter(tmp_path / "mine", **change)
    assert count_loadable(asked(theirs), asked(mine)) == 0


def test_another_name_is_another_adapter(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "sql")
    assert count_loadable(asked(folder, "sql"), asked(folder, "law")) == 0
    assert count_loadable(None, asked(folder)) == count_loadable(asked(folder), None) == 0


def test_of_large_files_pieces_are_read_everywhere(tmp_path: Path) -> None:
    """Training writes all of a file's tensors, so whatever lies between two pieces has neighbours that changed."""
    stride = LARGE // PIECES
    weights = os.urandom(LARGE)
    first = Adapters().identify(asked(adapter(tmp_path / "first", weights)))
    for number, begin in enumerate(range(0, LARGE - stride, stride)):
        changed = bytearray(weights)
        changed[begin : begin + stride + PIECE_BYTES] = bytes(stride + PIECE_BYTES)
        other = adapter(tmp_path / f"changed-{number}", bytes(changed[:LARGE]))
        assert Adapters().identify(asked(other)) != first
        (other / "adapter_model.safetensors").unlink()
    (tmp_path / "first" / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize("file", ["bin", "pt"])
def test_the_file_that_vllm_reads_is_read(file: str, tmp_path: Path) -> None:
    first, second = adapter(tmp_path / "a", b"1", file=file), adapter(tmp_path / "b", b"2", file=file)
    assert Adapters().identify(asked(first)) != Adapters().identify(asked(second))
    for folder in (first, second):
        adapter(folder, b"safe")  # comes first in vLLM, and the other is not looked at
    assert Adapters().identify(asked(first)) == Adapters().identify(asked(second))


def test_what_was_loaded_keeps_its_digest_until_it_is_loaded_again(tmp_path: Path) -> None:
    """A worker reads an adapter once; where it is replaced in place, with every batch."""
    known, folder = Adapters(), adapter(tmp_path / "sql", b"old")
    old, in_place = known.identify(asked(folder)), known.identify(asked(folder, load_inplace=True))
    assert old == in_place
    adapter(folder, b"newer")
    assert known.identify(asked(folder)) == old
    newer = known.identify(asked(folder, load_inplace=True))
    assert newer != old
    assert known.identify(asked(folder, number=2)) == newer  # unloaded and loaded again


def test_what_the_engine_makes_of_adapters_counts() -> None:
    model: Any = SimpleNamespace(dtype="bfloat16", runner_type="generate", is_lora_supported=True)

    def settings(**options: Any) -> str:
        config = LoRAConfig(**options)
        config.verify_with_model_config(model)
        return Adapters(config).settings

    usual = settings()
    assert settings(max_loras=4, max_lora_rank=64, fully_sharded_loras=True) == usual
    assert settings(target_modules=["o_proj"]) != usual
    assert settings(target_modules=["q_proj", "o_proj"]) == settings(target_modules=["o_proj", "q_proj"])
    assert settings(enable_tower_connector_lora=True) != usual
    assert settings(lora_dtype="float16") != usual


def test_an_adapter_that_cannot_be_read_here_is_known_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    known = Adapters()
    for path in (tmp_path / "elsewhere", "some/repository", "s3://bucket/adapter", "~nobody-of-this-name/adapter"):
        assert known.identify(asked(path)) == Adapters().identify(asked(path, number=3))
    assert known.identify(asked(tmp_path / "one")) != known.identify(asked(tmp_path / "two"))
    caplog.clear()
    known.identify(asked(tmp_path / "elsewhere"))
    assert not caplog.records  # told once
