"""Draws what `bench/results.json` says, for `docs/performance.md`: `python -m bench.plots`. Needs matplotlib (extra `bench`).

- `ratios.png`: transfers and first tokens beside in-tree's, with their intervals.
- `growth.png`: cost against tokens, against the size of the pool, and of an event against what waits beside it.
- `ways.png`: the ways that were taken against the others.
- `early.png`: compute and transfer of one request, sequential and early (`draw_early`, of `early_timeline.json`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"


def main() -> None:
    """All plots that there are results for."""
    results = json.loads((HERE / "results.json").read_text())["results"]
    IMAGES.mkdir(exist_ok=True)
    draw_ratios([r for r in results if r["interval"] is not None and r["row"][0] in "cf"])
    draw_growth([r["details"] for r in results if r["row"][0] == "e" and r["details"]])
    draw_ways([r for r in results if r["row"][0] == "m" and r["ours"] is not None])
    if (HERE / "early_timeline.json").exists():
        draw_early(json.loads((HERE / "early_timeline.json").read_text()))


def draw_ratios(results: list[dict[str, Any]]) -> None:
    """One line per comparison, on a logarithmic axis; 1 is equal speed."""
    if not results:
        return
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.22 * len(results)), layout="constrained")
    for line, result in enumerate(reversed(results)):
        low, high = result["interval"]
        verdicts = {bar["holds"] for bar in result["bars"]}
        colour = "#b03030" if False in verdicts else "#777777" if None in verdicts else "#2a7f3f"
        axes.plot([low, high], [line, line], color=colour, linewidth=2.5, alpha=0.6)
        axes.plot([result["ratio"]], [line], "o", color=colour, markersize=5)
    axes.axvline(1.0, color="black", linewidth=0.8)
    names = [f"{result['name']}, {result['beside'].removeprefix('NixlConnector ')}" for result in reversed(results)]
    axes.set_yticks(range(len(results)), names, fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("in-tree's time / ours, 95 % interval; green: its bars hold, grey: undecided")
    axes.set_title("Transfer and first token")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(IMAGES / "ratios.png", dpi=110)
    plt.close(figure)


def draw_growth(curves: list[dict[str, Any]]) -> None:
    """Three curves side by side."""
    figure, (tokens, pools, events) = plt.subplots(1, 3, figsize=(14, 3.8), layout="constrained")
    for curve in curves:
        if "tokens" in curve:
            for kind, values in curve["ms"].items():
                tokens.plot(curve["tokens"], values, "o-", label=kind)
        elif "pools" in curve:
            pools.plot(curve["pools"], curve["ms"], "o-")
        else:
            events.plot(curve["counts"], curve["us"], "o-", label=curve["event"])
    tokens.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms CPU", title="One request, by its length")
    tokens.legend(title="block tables")
    pools.set(xscale="log", xlabel="pages in the pool", ylabel="ms CPU", title="8k tokens, by the size of the pool")
    pools.set_ylim(bottom=0)
    events.set(
        xscale="log",
        yscale="log",
        xlabel="others that wait",
        ylabel="us CPU",
        title="One event, by what waits beside it",
    )
    events.legend(fontsize=7)
    for axes in (tokens, pools, events):
        axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "growth.png", dpi=110)
    plt.close(figure)


def draw_early(ways: dict[str, list[dict[str, Any]]]) -> None:
    """One strip per way: what is computed above, what is on the link below, until the first token."""
    figure, axes = plt.subplots(figsize=(10, 0.9 + 1.1 * len(ways)), layout="constrained")
    names = []
    for line, (name, events) in enumerate(reversed(ways.items())):
        ends_s = [one["at_s"] for one in events if one["event"] == "computed"]
        begins_s = [0.0, *ends_s[:-1]]
        axes.broken_barh(
            [(low, high - low) for low, high in zip(begins_s, ends_s, strict=True)],
            (line + 0.1, 0.3), facecolor="#4a6fa5", edgecolor="white",
        )  # fmt: skip
        moving = [(one["at_s"], one["until_s"]) for one in events if one["event"] == "moving"]
        axes.broken_barh([(low, high - low) for low, high in moving], (line - 0.3, 0.3), facecolor="#c98a3c")
        first_s = next(one["at_s"] for one in events if one["event"] == "first token")
        axes.plot([first_s], [line + 0.05], "k|", markersize=34, markeredgewidth=2)
        axes.text(first_s + 0.04, line, f"first token\n{first_s:.2f} s", fontsize=8, va="center")
        names.append(name)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.5, len(names) - 0.4)
    axes.set_xlim(0, 1.15 * max(one["at_s"] for events in ways.values() for one in events))
    axes.set_xlabel("seconds from the client's send; blue: chunks computed, brown: bytes on the link")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(IMAGES / "early.png", dpi=110)
    plt.close(figure)


def draw_ways(results: list[dict[str, Any]]) -> None:
    """Each case as a point: direct against staged, a cross where a bar does not hold."""
    if not results:
        return
    figure, axes = plt.subplots(figsize=(5.6, 5), layout="constrained")
    drawn = []
    for way, other, colour in (("direct", "staged", "#1f5fa8"), ("staged", "direct", "#c07020")):
        for holds in (True, False):
            chosen = [
                r
                for r in results
                if r["beside"] == other and all(bar["holds"] is not False for bar in r["bars"]) == holds
            ]
            points = [(r["ours"], r["theirs"]) if way == "direct" else (r["theirs"], r["ours"]) for r in chosen]
            drawn += points
            if points:
                label = f"{way} was taken{'' if holds else ', wrongly'}"
                axes.scatter(*zip(*points, strict=True), marker="o" if holds else "x", color=colour, label=label)
    ends = [min(map(min, drawn)), max(map(max, drawn))]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="direct, ms", ylabel="staged, ms", title="Direct or staged: measured and taken"
    )  # fmt: skip
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "ways.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
