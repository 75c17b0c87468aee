"""The measured table, ours beside vLLM's own connector.

    python -m tests.e2e.table [--results results.jsonl] [--newest results-0.33.0.jsonl] [--into docs/pairs.md] [--json table.json]

The column of the newest release of vLLM is of a run of its own, `make test-e2e VLLM=0.33`.

Says nothing that was not run: a row without a result is marked as such. `--into` puts the table between two comments of a file,
`<!-- table of pairs -->` and `<!-- end of the table of pairs -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.e2e import results
from tests.e2e.cases import CASES, IN_TREE, OURS, Case
from tests.releases import INSTALLED, NEWEST

Found = Mapping[tuple[str, str], Mapping[str, Any]]
LONGEST = 110
BEGIN, END = "<!-- table of pairs -->", "<!-- end of the table of pairs -->"


def shape(case: Case) -> str:
    return " -> ".join(str(side).replace("-", " ") for side in (case.prefill, case.decode))


def cell(found: Found, case: Case, connector: str) -> str:
    """The outcome and, if it is not exact, the first reason."""
    result = found.get((case.name, connector))
    if result is None:
        return "not run"
    if is_not_started(result):
        return "not run: these engines do not start here"
    if result["outcome"] == "exact":
        return "exact"
    reasons = [detail for detail in result["details"] if "Error" in detail] or result["details"]
    reasons.sort(key=lambda detail: "EngineDeadError" in detail)  # what ended the engine says more than that it ended
    reason = "; ".join(reasons[:2])
    if result["outcome"] == "refused":  # the innermost exception says why
        reason = [line for line in reasons[0].splitlines() if "Error" in line or line][-1].split("Connector: ", 1)[-1]
    else:
        reason = plain(reason)
    reason = reason.replace("|", "/").replace("\n", " ")
    return f"**{result['outcome']}**: {reason if len(reason) <= LONGEST else reason[: LONGEST - 1] + '…'}"


def is_not_started(result: Mapping[str, Any]) -> bool:
    """Whether vLLM's worker failed before there was a connector: 0.33's files over 0.32's operators count the cores of data-parallel ranks wrongly."""
    return result["outcome"] == "refused" and any("[cpu_worker.py" in detail for detail in result["details"])


def plain(reason: str) -> str:
    """What was wrong, in few words: texts only where some differ, log-probabilities as people write them, fields left to the log."""
    reason = re.sub(r"^0 of \d+ texts differ, ", "", reason)
    reason = reason.replace(", log-probabilities off by inf", "")
    reason = re.sub(r"off by (\d\S+?)(?=[;,]|$)", lambda found: f"off by {float(found[1]):.2g}", reason)
    return re.sub(
        r"loaded pages are not the prefill engine's.*", "loaded pages differ from the prefill engine's", reason
    )


def markdown(found: Found, newest: Found) -> str:
    """The table. `newest`: the run with the newest release, of which NixlConnector's outcomes are a column, if there was one."""
    in_tree = {INSTALLED: found} | ({NEWEST: newest} if newest else {})
    names = [f"NixlConnector (vLLM {release})" for release in in_tree]
    lines = [row("model", "prefill -> decode", *names, "ReshardConnector", "log-probabilities, noise")]
    lines.append("|---" * (4 + len(names)) + "|")
    family = ""
    for case in CASES:
        ours = found.get((case.name, OURS))
        noise = f"{ours['logprob_gap']:.0e}, {ours['floor']:.0e}" if ours else ""
        label, family = ("" if case.family == family else case.family), case.family
        cells = [cell(outcomes, case, IN_TREE) for outcomes in in_tree.values()]
        lines.append(row(label, shape(case), *cells, cell(found, case, OURS), noise))
    lines.append("")
    for release, outcomes in in_tree.items():
        ours, theirs = (count_exact(outcomes, connector) for connector in (OURS, IN_TREE))
        lines.append(f"Exact with vLLM {release}: {ours} with ReshardConnector, {theirs} with NixlConnector.")
    return "\n".join(lines) + "\n"


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def count_exact(found: Found, connector: str) -> str:
    """Of how many rows that were run."""
    ran = [found[case.name, connector] for case in CASES if (case.name, connector) in found]
    ran = [result for result in ran if not is_not_started(result)]
    return f"{sum(result['outcome'] == 'exact' for result in ran)} of {len(ran)}"


def as_json(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "family": case.family,
            "model": case.model,
            "prefill": str(case.prefill),
            "decode": str(case.decode),
            "in_tree": found.get((case.name, IN_TREE)),
            "ours": found.get((case.name, OURS)),
        }
        for case in CASES
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.table", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=None, help=f"default: {results.path()}")
    parser.add_argument("--newest", type=Path, default=None, help=f"of vLLM {NEWEST}; default: {results.path(NEWEST)}")
    parser.add_argument("--into", type=Path, help="file that has a place for the table; default: standard output")
    parser.add_argument("--json", type=Path, help="file to write")
    chosen = parser.parse_args(arguments)
    found, newest = results.read(chosen.results), results.read(chosen.newest or results.path(NEWEST))
    if chosen.into:
        before, _, rest = chosen.into.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        if not end:
            parser.error(f"{chosen.into} has no lines '{BEGIN}' and '{END}'")
        chosen.into.write_text(f"{before}{BEGIN}\n\n{markdown(found, newest)}\n{END}{after}")
    else:
        print(markdown(found, newest), end="")
    if chosen.json:
        chosen.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
