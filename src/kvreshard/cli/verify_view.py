"""How is the outcome of a verification shown: lines for a person, a document for a program?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from kvreshard.cli.find_cell import find_cell
from kvreshard.cli.scale import Fitted
from kvreshard.cli.terminal import Column, Sheet, bytes_text, seconds_text, show_line, show_sheet
from kvreshard.model.tables import Request
from kvreshard.model.text import counted
from kvreshard.testing.trial import TrialResult

# Further wrong places say the same over again.
MAX_FINDINGS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """One verification: what was asked for, what was compared, and what came out."""

    model: str
    engines: str
    transport: str
    device: str
    push: bool
    num_tokens: int
    seed: int
    model_layers: int
    fitted: Fitted
    requests: Sequence[Request]
    result: TrialResult
    total_s: float
    warnings: tuple[str, ...] = ()


def show_run(console: Console, run: Run) -> None:
    """What moved, and the verdict."""
    result = run.result
    show_sheet(console, Sheet(f"{run.model}: {run.engines}", (Column("what"), Column("how much")), tuple(_rows(run))))
    for line in findings(run)[:MAX_FINDINGS]:
        show_line(console, f"wrong: {line}")
    if result.passed:
        show_line(
            console,
            f"right: every byte of {counted(len(run.fitted.decode.ranks), 'decode rank')} is as the oracle says; other pages and "
            "prefix hits are untouched",
        )


def _rows(run: Run) -> list[tuple[str, str]]:
    result = run.result
    who = f"{len(run.fitted.prefill.ranks)} prefill and {counted(len(run.fitted.decode.ranks), 'decode rank')}"
    where = "" if run.device == "cpu" else f" on {run.device}"
    kind = f"one process each{where}, " if run.transport == "nixl" else "in one process, "
    rate = result.num_bytes / result.transfer_s if result.transfer_s else 0.0
    return [
        ("ranks", f"{who}, {kind}{run.transport} {'WRITE' if run.push else 'READ'}"),
        ("layers", f"{run.fitted.num_layers} of {run.model_layers}"),
        ("requests", f"{result.num_requests} in flight, up to {counted(run.num_tokens, 'token')}, seed {run.seed}"),
        ("moved", f"{bytes_text(result.num_bytes)} of cache, {bytes_text(result.num_staged_bytes)} of it staged"),
        ("descriptors", f"{result.num_copies:,}, for {bytes_text(result.num_read_bytes)} on the wire"),
        ("transfer", f"{seconds_text(result.transfer_s)}, {bytes_text(int(rate))} per second"),
        ("plain copy", f"{seconds_text(result.plain_copy_s)} for the same bytes; the transfer has {_share(result)} of its speed"),
        ("compile, proof", f"{seconds_text(result.compile_s)} on the slowest rank"),
        ("compared", f"{bytes_text(result.num_bytes_compared)}, byte for byte"),
        ("whole run", seconds_text(run.total_s)),
    ]  # fmt: skip


def _share(result: TrialResult) -> str:
    return f"{100 * _share_of_plain_copy(result):.2g} %"


def _share_of_plain_copy(result: TrialResult) -> float:
    return result.plain_copy_s / result.transfer_s if result.transfer_s else 0.0


def findings(run: Run) -> list[str]:
    """What is wrong, worst first, each as a sentence; empty if the run passed."""
    result = run.result
    found = [f"transfer: {error}" for error in result.errors]
    for wrong in result.wrong:
        num_bytes = sum(stop - start for start, stop in wrong.ranges)
        first = wrong.ranges[0][0]
        where = find_cell(run.fitted.decode, run.requests, wrong.rank, wrong.region, first)
        found.append(
            f"decode rank {wrong.rank}: {counted(num_bytes, 'byte')}; the first is {where} (byte {first} of region '{wrong.region}')"
        )
    return [*found, *(f"reports: {missing}" for missing in result.missing_reports)]


def run_document(run: Run) -> dict[str, Any]:
    """The same as plain data."""
    result = run.result
    return {
        "passed": result.passed,
        "model": run.model,
        "engines": run.engines,
        "transport": run.transport,
        "device": run.device,
        "push": run.push,
        "seed": run.seed,
        "num_layers": run.fitted.num_layers,
        "model_layers": run.model_layers,
        "num_requests": result.num_requests,
        "num_tokens": run.num_tokens,
        "num_bytes": result.num_bytes,
        "num_read_bytes": result.num_read_bytes,
        "num_staged_bytes": result.num_staged_bytes,
        "num_descriptors": result.num_copies,
        "num_bytes_compared": result.num_bytes_compared,
        "compile_seconds": result.compile_s,
        "transfer_seconds": result.transfer_s,
        "plain_copy_seconds": result.plain_copy_s,
        "share_of_plain_copy": _share_of_plain_copy(result),
        "total_seconds": run.total_s,
        "findings": findings(run),
        "warnings": run.warnings,
    }
