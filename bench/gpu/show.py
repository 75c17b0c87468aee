"""The results as a text that a person reads: what failed first, then every check with its figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

WIDTH = 118
MARKS = {"passed": "+", "failed": "!", "skipped": "-"}


def as_text(document: Mapping[str, Any]) -> str:
    """All of `gpu-results.json`."""
    return "\n".join(_lines(document)) + "\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    machine, parts = document["machine"], document["parts"]
    gpu = machine.get("gpu", {})
    where = (
        "the processor (a rehearsal)"
        if document["is_rehearsal"]
        else f"{gpu.get('name', 'unknown GPU')} as {document['device']}"
    )
    counts = {verdict: sum(found["verdict"] == verdict for found in parts) for verdict in MARKS}
    yield f"kvreshard's GPU kit on {where}, {document['when']}, {document['seconds']:.0f} s"
    yield f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
    yield ", ".join(f"{name} {value}" for name, value in machine.get("packages", {}).items())
    if gpu:
        yield f"driver {gpu.get('driver_version')}, NVLinks seen: {machine.get('nvlinks', 'unknown')}, {machine['cores']} cores"
    if counts["failed"]:
        yield from ("", "what failed")
        for found in parts:
            if found["verdict"] == "failed":
                yield from _check(found, f"{found['part']}: ")
    last = ""
    for found in parts:
        if found["part"] != last:
            last = found["part"]
            yield from ("", last)
        yield from _check(found)


def _check(found: Mapping[str, Any], before: str = "") -> Iterator[str]:
    figures = ", ".join(f"{name} {_value(value)}" for name, value in found.get("figures", {}).items())
    ratio = f"ratio {found['ratio']:.3g}" if "ratio" in found else ""
    words = "; ".join(filter(None, (ratio, figures, found.get("text", ""))))
    head = f"  {MARKS[found['verdict']]} {before}{found['check']}"
    yield from textwrap.wrap(f"{head}: {words}" if words else head, WIDTH, subsequent_indent="      ")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
