"""Does a test notice every way in which `mutants.py` breaks the code?

    python tests/mutations/run.py              all of them; `make mutants` does this
    python tests/mutations/run.py fuse ring    those whose name or file has one of the words
    python tests/mutations/run.py session/     those of a room; `--json FILE` keeps what came out

1. Every mutant's text must be found exactly once, or the script stops: a mutant of code that is gone proves nothing.
2. The unbroken copy must pass.
3. Each mutant is tried in a copy of the tree: a few random pairs, then the unit tests and golden plans, then many pairs; one of
   the session its unit tests, then its random histories. What fails first is named in the table.

Exits with 1 if a mutant survives, or the copy fails unbroken.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutant import Mutant
from mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
UNITS = [
    "tests/unit/kinds",
    "tests/golden",
    "tests/unit/plan",
    "tests/unit/model",
    "tests/property/test_plain_places.py",
]
PAIRS = ["tests/property/test_pairs.py"]
SESSION_UNITS = ["tests/unit/session", "tests/unit/transport", "-m", "not nixl and not slow"]
HISTORIES = ["tests/property/test_session.py", "--hypothesis-profile=ci"]
TIMEOUT_S = 300
# Without what was compiled: the mutants are of the Python beside it.
KEPT = shutil.ignore_patterns("__pycache__", ".hypothesis", "*.so")


@dataclass(frozen=True)
class Verdict:
    """By which test a mutant was killed; None if it lives."""

    mutant: Mutant
    killer: str | None


def check_texts(mutants: list[Mutant]) -> list[str]:
    """Mutants whose text is not found exactly once, or that change nothing."""
    wrong = []
    for mutant in mutants:
        found = (ROOT / "src" / "kvreshard" / mutant.path).read_text(encoding="utf-8").count(mutant.old)
        if found != 1 or mutant.old == mutant.new:
            wrong.append(f"'{mutant.name}' in {mutant.path}: its text is found {found} times, must be once")
    return wrong


def copy_tree(to: Path) -> None:
    shutil.copytree(ROOT / "src", to / "src", ignore=KEPT)
    shutil.copytree(ROOT / "tests", to / "tests", ignore=KEPT)
    shutil.copy(ROOT / "pyproject.toml", to)


def failing_test(tree: Path, seed: int, path: str) -> str | None:
    """The first test that fails in this tree, None if none does. A wrong kind is not wrong to the oracle: units first."""
    few, units, many = (PAIRS, 25), (UNITS, 0), (PAIRS, 500)
    rounds = (units, few, many) if path.startswith("kinds/") else (few, units, many)
    if path.startswith(("session/", "transport/")):
        rounds = ((SESSION_UNITS, 0), (HISTORIES, 0))
    for tests, num_pairs in rounds:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "KVRESHARD_PAIRS": str(num_pairs),
            "KVRESHARD_PAIR_SEED": str(seed),
            "KVRESHARD_PAIR_WORKERS": "1",
        }
        environment.pop("KVRESHARD_RESULTS", None)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
        if rounds[0][0] is SESSION_UNITS:
            command.append(f"--hypothesis-seed={seed}")
        try:
            done = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"{tests[0]}: no end in {TIMEOUT_S} s"
        if done.returncode:
            named = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE)
            return named.group(1) if named else f"{' '.join(tests)}: pytest exits with {done.returncode}"
    return None


def try_mutant(mutant: Mutant, seed: int) -> Verdict:
    with tempfile.TemporaryDirectory(prefix="kvreshard-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        file = tree / "src" / "kvreshard" / mutant.path
        file.write_text(file.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        verdict = Verdict(mutant, failing_test(tree, seed, mutant.path))
    print(
        f"{'SURVIVED' if verdict.killer is None else 'killed':9} {mutant.path:22} {mutant.name:58} {verdict.killer or ''}",
        flush=True,
    )
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(description="Break the code in many ways and see whether the tests notice.")
    parser.add_argument("words", nargs="*", help="only mutants whose name or file has one of these words")
    parser.add_argument("--seed", type=int, default=1, help="of the random pairs")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="where to keep what came out")
    options = parser.parse_args()
    mutants = [m for m in MUTANTS if not options.words or any(w in f"{m.path} {m.name}" for w in options.words)]
    wrong = check_texts(mutants)
    if wrong:
        print("\n".join(wrong))
        return 1
    with tempfile.TemporaryDirectory(prefix="kvreshard-mutant-") as folder:
        copy_tree(Path(folder))
        rooms = dict.fromkeys("session/" if m.path.startswith(("session/", "transport/")) else "" for m in mutants)
        failed = next(filter(None, (failing_test(Path(folder), options.seed, room) for room in rooms)), None)
    if failed:
        print(f"the tests fail without a mutant: {failed}")
        return 1
    with ThreadPoolExecutor(options.workers) as pool:
        verdicts = list(pool.map(lambda mutant: try_mutant(mutant, options.seed), mutants))
    alive = [verdict for verdict in verdicts if verdict.killer is None]
    if options.json:
        rows = [{"name": v.mutant.name, "path": v.mutant.path, "killer": v.killer} for v in verdicts]
        options.json.write_text(json.dumps({"kind": "mutants", "seed": options.seed, "rows": rows}, indent=1) + "\n")
    print(f"{len(verdicts) - len(alive)} of {len(verdicts)} mutants killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
