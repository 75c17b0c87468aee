"""Writes the table and the machine of `bench/results.json` into `docs/performance.md`: `python -m bench.page`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- results: written by bench/page.py -->\n", "<!-- end of results -->"


def main() -> None:
    body = json.loads((HERE / "results.json").read_text())
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    PAGE.write_text(before + BEGIN + "\n" + describe(body["machine"]) + table(body["results"]) + "\n" + END + after)


def describe(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"Measured on {machine['cores']} cores ({machine['processor']}), {machine['memory_gib']} GiB, Python {machine['python']}; "
        f"{versions}. Load when the run began: {machine['load_at_start']} (on a busy machine believe the ratios, not the times).\n\n"
    )


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| row | what | ours | theirs | ratio (95 %) | limit | bar | |", "|---|---|---|---|---|---|---|---|"]
    for result in results:
        sides = [
            "" if result[side] is None else f"{_short(result[side])} {result['unit']}" for side in ("ours", "theirs")
        ]
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.2f}"
        if result["interval"] is not None:
            ratio += f" ({result['interval'][0]:.2f} to {result['interval'][1]:.2f})"
        limit = "" if result.get("limit") is None else f"{result['limit']:.2f}"
        met = {True: "met", False: "**not met**", None: result["note"]}[result["met"]]
        lines.append(
            f"| {result['row'][0]} | {result['name']} | {sides[0]} | {sides[1]} | {ratio} | {limit} | {result['bar']} | {met} |"
        )
    return "\n".join(lines) + "\n"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.3g}"


if __name__ == "__main__":
    main()
