"""Writes the verdicts, the tables, the machine and the commits of `bench/results.json` into `docs/performance.md`: `python -m bench.page`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- results: written by bench/page.py -->\n", "<!-- end of results -->"
TITLES = {
    "a": "Handshake: meeting a prefill engine of 8 ranks, up to the first request's posts",
    "b": "Preparation of a request: ours / in-tree's, ratio",
    "c": "Transfer of a request: ours / in-tree's, ratio",
    "d": "An idle rank, and a busy one",
    "e": "Growth",
    "f": "First token of two real engines",
    "g": "Real engines under load: so many requests at a time",
    "n": "Early reads: exposed time and first token, compute and link paced",
    "o": "Memory order: pages outermost on both sides, beside the order that is asked of vLLM",
    "m": "Direct or staged: the way taken beside the other",
}
MAX_NAMED = 3
# Their results have one name per block table, which becomes a column.
BY_BLOCK_TABLE = "bc"
Entry = dict[str, Any]


def main() -> None:
    body = json.loads((HERE / "results.json").read_text())
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    results = describe(body["machine"], body["commits"]) + tables(body["results"])
    PAGE.write_text(f"{before}{BEGIN}\n{results}\n{END}{after}")


def describe(machine: dict[str, Any], commits: Mapping[str, str]) -> str:
    """The machine of the last run, and the commit of every row, by its letter."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    by_commit: dict[str, list[str]] = {}
    for letter, commit in commits.items():
        by_commit.setdefault(commit or "unknown", []).append(TITLES[letter].partition(":")[0].lower())
    rows = "".join(f"- {commit}: {'; '.join(titles)}.\n" for commit, titles in by_commit.items())
    return (
        f"The last run: {machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, Python {machine['python']}; "
        f"{versions}. Load when it began: {machine['load_at_start']} (on a busy machine believe the ratios, not the times). A million additions in Python "
        f"take {machine['million_additions_ms']} ms there: by this, absolute times compare between machines.\n\n"
        f"Rows are measured one by one. The commit of each:\n\n{rows}\n"
    )


def tables(results: Sequence[Entry]) -> str:
    """The verdicts, then one table per row."""
    lines = ["### Verdicts", "", *verdicts(results)]
    for letter in sorted({result["row"][0] for result in results}):
        alike = [result for result in results if result["row"][0] == letter]
        lines += ["", f"### {TITLES[letter]}", ""]
        measured = [result for result in alike if result["ours"] is not None]
        if measured:
            lines += by_block_table(measured) if letter in BY_BLOCK_TABLE else one_by_one(measured)
        gone = [result for result in alike if result["ours"] is None]
        lines += [f"\n{result['beside'] or result['name']}: {result['note']}" for result in gone]
    return "\n".join(lines) + "\n"


def verdicts(results: Sequence[Entry]) -> list[str]:
    """One line per bar: in how many of its cases it holds, in which not, and in which the interval does not say."""
    cases: dict[str, list[tuple[bool | None, Entry]]] = {}
    for result in results:
        for bar in result["bars"]:
            cases.setdefault(bar["text"], []).append((bar["holds"], result))
    lines = ["| bar | holds in | does not hold in | undecided |", "|---|---|---|---|"]
    for text, found in cases.items():
        missed, undecided = (
            _cases([result for holds, result in found if holds is verdict]) for verdict in (False, None)
        )
        held = f"{sum(holds is True for holds, _ in found)} of {len(found)}"
        lines.append(f"| {text} | {f'**{held}**' if missed else held} | {missed} | {undecided} |")
    return lines


def one_by_one(results: Sequence[Entry]) -> list[str]:
    """One line per result."""
    lines = ["| what | ours | beside | theirs | theirs / ours (95 %) | |", "|---|---|---|---|---|---|"]
    for result in results:
        ours, theirs = _figure(result, "ours"), _figure(result, "theirs")
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f}"
        if result["interval"] is not None:
            ratio += f" ({result['interval'][0]:.2f} to {result['interval'][1]:.2f})"
        cells = (result["name"], ours, result["beside"], theirs, ratio, result["note"])
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def by_block_table(results: Sequence[Entry]) -> list[str]:
    """One line per case and release, one column per block table; bold where a bar does not hold."""
    kinds = list(dict.fromkeys(result["name"].rpartition(", ")[2] for result in results))
    lines = [f"| what | beside | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        name, _, kind = result["name"].rpartition(", ")
        cell = f"{_short(result['ours'])} / {_short(result['theirs'])} {result['unit']}, {result['ratio']:.2f}"
        is_held = all(bar["holds"] is not False for bar in result["bars"])
        cells.setdefault((name, result["beside"]), {})[kind] = cell if is_held else f"**{cell}**"
    order = {name: number for number, name in enumerate(dict.fromkeys(name for name, _ in cells))}
    for (name, beside), row in sorted(cells.items(), key=lambda item: order[item[0][0]]):
        lines.append(f"| {name} | {beside} | {' | '.join(row.get(kind, '') for kind in kinds)} |")
    return lines


def _cases(results: Sequence[Entry]) -> str:
    """The first few by name; all of them are bold in the table of their row."""
    named = [_case(result) for result in results[:MAX_NAMED]]
    return "; ".join(named) + (f"; and {len(results) - MAX_NAMED} more" if len(results) > MAX_NAMED else "")


def _case(result: Entry) -> str:
    """The figures stand in the table of the row."""
    beside = result["beside"].removeprefix("NixlConnector ")
    return f"{result['name']} ({beside})" if beside else str(result["name"])


def _figure(result: Entry, side: str) -> str:
    return "" if result[side] is None else f"{_short(result[side])} {result['unit']}".strip()


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


if __name__ == "__main__":
    main()
