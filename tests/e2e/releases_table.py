"""What was run with which release of vLLM, for `docs/versions.md`.

    python -m tests.e2e.releases_table [--results results.jsonl] [--into docs/versions.md]

1. The outcomes of the rows of `tests.e2e.releases` are kept in `tests/results/releases.json`: a row that was not run this time stays as it was.
2. The tables are made of that file, and of `tests/results/vllm-RELEASE.json`, which runs of `tests/vllm` leave (`tests.outcomes`).

A pair of releases that `kvreshard.vllm.versions` accepts must be exact there for every model, both ways (`tests/unit/test_releases.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.e2e import results
from tests.e2e.cases import OURS
from tests.e2e.releases import MODELS, rows
from tests.releases import INSTALLED, RELEASES, ROOT

HOME = ROOT / "tests" / "results"
OUTCOMES = HOME / "releases.json"
NAMES = {"llama": "full attention", "gemma3": "sliding windows", "granite-hybrid-bf16": "Mamba-2 states"}
Outcomes = Mapping[str, str]
"""Row -> its outcome, as in `verdicts`."""


def gather(source: Path | None) -> Outcomes:
    """What was kept before, with the rows of `source`."""
    known = json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}
    found = results.read(source)
    names = [case.name for case in rows()]
    new = {name: found[name, OURS]["outcome"] for name in names if (name, OURS) in found}
    return {name: outcome for name, outcome in {**known, **new}.items() if name in names}


def pairs(outcomes: Outcomes) -> str:
    """Rows of prefill engines' releases, columns of decode engines'; a cell counts the models that were exact."""
    lines = [f"| prefill, decode: | {' | '.join(RELEASES)} |", f"|---|{'---|' * len(RELEASES)}"]
    for prefill in RELEASES:
        cells = []
        for decode in RELEASES:
            found = [
                outcomes.get(case.name, "not run")
                for case in rows()
                if (case.prefill.vllm, case.decode.vllm) == (prefill, decode)
            ]
            cells.append(cell(found) if found else "[the table of pairs](pairs.md)")
        lines.append(f"| {prefill} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(found: Sequence[str]) -> str:
    """'exact' where all are; otherwise each outcome with its number of models."""
    if set(found) == {"exact"}:
        return "exact"
    return ", ".join(f"{found.count(outcome)} {outcome}" for outcome in dict.fromkeys(found))


def parts() -> str:
    """What `tests/vllm` says with each release."""
    lines = ["| release | passed | failed | skipped |", "|---|---|---|---|"]
    for release in RELEASES:
        file = HOME / f"vllm-{release}.json"
        files = json.loads(file.read_text())["files"].values() if file.exists() else None
        counts = [
            "not run" if files is None else f"{sum(one.get(key, 0) for one in files):,}"
            for key in ("passed", "failed", "skipped")
        ]
        lines.append(f"| {release}{' (all)' if release == INSTALLED else ''} | {' | '.join(counts)} |")
    return "\n".join(lines) + "\n"


def fill(page: str, name: str, table: str) -> str:
    """The page with the table between its two comments. Raises ValueError without them."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if begin not in page or end not in page:
        raise ValueError(f"no lines '{begin}' and '{end}'")
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    return re.sub(pattern, lambda _: f"{begin}\n\n{table}\n{end}", page, flags=re.DOTALL)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.releases_table", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--results", type=Path, default=None, help=f"default: {results.path()}")
    parser.add_argument("--into", type=Path, help="page that has places for the tables; default: standard output")
    chosen = parser.parse_args(arguments)
    outcomes = gather(chosen.results)
    OUTCOMES.write_text(json.dumps(outcomes, indent=1) + "\n")
    models = ", ".join(f"{NAMES[model]} TP {prefill} -> {decode}" for model, (prefill, decode) in MODELS.items())
    if not chosen.into:
        print(models, pairs(outcomes), parts(), sep="\n\n", end="")
        return 0
    page = fill(fill(chosen.into.read_text(), "pairs of releases", pairs(outcomes)), "parts of releases", parts())
    chosen.into.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
