"""The entry point that vLLM calls in each of its processes, where there is no vLLM. `tests/vllm/test_names.py` has the rest."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvreshard.vllm import plugin

ROOT = Path(__file__).parents[3]


def test_the_project_names_a_function_that_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = project["entry-points"]["vllm.general_plugins"]
    assert named == {"kvreshard": "kvreshard.vllm.plugin:register"}
    module, _, function = named["kvreshard"].partition(":")
    assert getattr(importlib.import_module(module), function) is plugin.register


def test_without_vllm_it_does_nothing_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    with caplog.at_level(logging.INFO):
        plugin.register()
    assert not caplog.records


def test_loading_it_loads_little() -> None:
    code = "import sys, kvreshard.vllm.plugin; print(*sorted(name for name in sys.modules if name.startswith('kvreshard')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["kvreshard", "kvreshard.vllm", "kvreshard.vllm.plugin"]
