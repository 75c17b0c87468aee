"""Do the extras of this package resolve: with each release of vLLM, for each Python?

    python -m tests.resolves [--into docs/versions.md]

`uv` resolves for an interpreter that is not installed, from the metadata of packages alone. Nothing is installed. It needs an index of
packages, so it is run by hand before a release. What it found is kept in `tests/results/resolves.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.releases_table import fill
from tests.releases import RELEASES, ROOT

UV = "uv==0.13.9"
PYTHONS = ("3.11", "3.12", "3.13")
OUTCOMES = ROOT / "tests" / "results" / "resolves.json"
SHOWN = ("torch", "nixl")
Outcomes = dict[str, dict[str, dict[str, str]]]
"""Release -> Python -> versions of what is shown, or `error`."""


def resolve(uv: Path, release: str, python: str) -> dict[str, str]:
    """The versions that `kvreshard[vllm]` comes to with this release."""
    wanted = f"kvreshard[vllm] @ {ROOT.as_uri()}\nvllm=={release}\n"
    command = [str(uv), "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", python, "-"]
    found = subprocess.run(command, input=wanted, capture_output=True, text=True, check=False)
    if found.returncode:
        return {"error": found.stderr.strip().splitlines()[-1]}
    versions = dict(line.split("==", 1) for line in found.stdout.splitlines() if "==" in line)
    assert versions["vllm"] == release
    return {name: versions[name].partition(" ")[0] for name in SHOWN}


def table(outcomes: Outcomes) -> str:
    """One line per release, one column per Python."""
    lines = [f"| vLLM | {' | '.join(f'Python {python}' for python in PYTHONS)} |", f"|---{'|---' * len(PYTHONS)}|"]
    for release, by_python in outcomes.items():
        cells = [_cell(by_python[python]) for python in PYTHONS]
        lines.append(f"| {release} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, str]) -> str:
    return f"**no**: {found['error']}" if "error" in found else ", ".join(f"{name} {found[name]}" for name in SHOWN)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.resolves", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--into", type=Path, help="page that has a place for the table; default: standard output")
    chosen: Any = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV], check=True)
        outcomes = {
            release: {wanted: resolve(python.with_name("uv"), release, wanted) for wanted in PYTHONS}
            for release in RELEASES
        }
    OUTCOMES.write_text(json.dumps(outcomes, indent=1) + "\n")
    if chosen.into:
        chosen.into.write_text(fill(chosen.into.read_text(), "what resolves", table(outcomes)))
    else:
        print(table(outcomes))
    return int(any("error" in found for by_python in outcomes.values() for found in by_python.values()))


if __name__ == "__main__":
    sys.exit(main())
