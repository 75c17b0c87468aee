"""Draws what `bench/results.json` says, for `docs/performance.md`: `python -m bench.plots`. Needs matplotlib (extra `bench`).

- `ratios.png`: every comparison with its interval, and its bar.
- `growth.png`: cost against tokens and against the size of the pool.
- `ways.png`: the cost model's choices against the two ways as they were measured.
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
    draw_ratios(
        [r for r in results if r["interval"] is not None and r["row"][0] in "ac"],
        "ratios.png",
        "Handshake and transfer",
    )
    draw_ratios(
        [r for r in results if r["interval"] is not None and r["row"][0] == "b"],
        "preparation.png",
        "Preparation of a request",
    )
    draw_growth([r for r in results if r["row"] == "e growth"])
    draw_ways([r for r in results if r["row"] == "m model"])


def draw_ratios(results: list[dict[str, Any]], name: str, title: str) -> None:
    """One line per comparison, on a logarithmic axis; 1 is equal speed."""
    if not results:
        return
    figure, axes = plt.subplots(figsize=(10, 1.4 + 0.27 * len(results)), layout="constrained")
    for line, result in enumerate(reversed(results)):
        low, high = result["interval"]
        colour = {True: "#2a7f3f", False: "#b03030", None: "#777777"}[result["met"]]
        axes.plot([low, high], [line, line], color=colour, linewidth=2.5, alpha=0.6)
        axes.plot([result["ratio"]], [line], "o", color=colour, markersize=5)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(results)), [result["name"] for result in reversed(results)], fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("theirs / ours, 95 % interval; green: bar met")
    axes.set_title(title)
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(IMAGES / name, dpi=110)
    plt.close(figure)


def draw_growth(results: list[dict[str, Any]]) -> None:
    """Both curves side by side."""
    curves = [result["details"] for result in results if result["details"]]
    if len(curves) < 2:
        return
    figure, (tokens, pools) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for kind, values in curves[0]["ms"].items():
        tokens.plot(curves[0]["tokens"], values, "o-", label=kind)
    tokens.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms CPU", title="One request, by its length")
    tokens.legend(title="block tables")
    pools.plot(curves[1]["pools"], curves[1]["ms"], "o-")
    pools.set(xscale="log", xlabel="pages in the pool", ylabel="ms CPU", title="8k tokens, by the size of the pool")
    pools.set_ylim(bottom=0)
    for axes in (tokens, pools):
        axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "growth.png", dpi=110)
    plt.close(figure)


def draw_ways(results: list[dict[str, Any]]) -> None:
    """Each case as a point: direct against staged, filled where the model was right."""
    cases = [case for result in results for case in result["details"].get("cases", [])]
    if not cases:
        return
    figure, axes = plt.subplots(figsize=(5.6, 5), layout="constrained")
    for way, colour in (("direct", "#1f5fa8"), ("staged", "#c07020")):
        for is_right in (True, False):
            chosen = [case for case in cases if case["took"] == way and (case["loss"] <= 1.10) == is_right]
            label = f"model took {way}{'' if is_right else ', wrong by more than 10 %'}"
            marker = {"marker": "o" if is_right else "x", "color": colour, "label": label}
            if chosen:
                axes.scatter([case["direct_ms"] for case in chosen], [case["staged_ms"] for case in chosen], **marker)
    ends = [min(case["direct_ms"] for case in cases), max(case["direct_ms"] for case in cases)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="direct, ms",
        ylabel="staged, ms",
        title="Direct or staged: measured and chosen",
    )
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    figure.savefig(IMAGES / "ways.png", dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
