"""How the outcome of a verification is shown: lines for a person, a document for a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Column

from kvreshard.cli.cells import find_cell
from kvreshard.cli.output import bytes_text, seconds_text, show_line, show_table
from kvreshard.cli.scale import Fitted
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

    @property
    def findings(self) -> list[str]:
        """What is wrong, worst first, each as a sentence; empty if the run passed."""
        result = self.result
        found = [f"transfer: {error}" for error in result.errors]
        for wrong in result.wrong:
            num_bytes = sum(stop - start for start, stop in wrong.ranges)
            first = wrong.ranges[0][0]
            where = find_cell(self.fitted.decode, self.requests, wrong.rank, wrong.region, first)
            found.append(
                f"decode rank {wrong.rank}: {counted(num_bytes, 'byte')}; the first is {where} (byte {first} of region '{wrong.region}')"
            )
        return [*found, *(f"reports: {missing}" for missing in result.missing_reports)]


def show_run(console: Console, run: Run) -> None:
    """What moved, and the verdict."""
    show_table(console, f"{run.model}: {run.engines}", (Column("what"), Column("how much")), list(_rows(run)))
    for line in run.findings[:MAX_FINDINGS]:
        show_line(console, f"wrong: {line}")
    if run.result.passed:
        show_line(
            console,
            f"right: every byte of {counted(len(run.fitted.decode.ranks), 'decode rank')} is as the oracle says; other pages and "
            "prefix hits are untouched",
        )


def _rows(run: Run) -> Iterator[tuple[str, str]]:
    result = run.result
    who = f"{len(run.fitted.prefill.ranks)} prefill and {counted(len(run.fitted.decode.ranks), 'decode rank')}"
    where = "" if run.device == "cpu" else f" on {run.device}"
    kind = f"one process each{where}, " if run.transport == "nixl" else "in one process, "
    rate = result.num_bytes / result.transfer_s if result.transfer_s else 0.0
    yield "ranks", f"{who}, {kind}{run.transport} {'WRITE' if run.push else 'READ'}"
    yield "layers", f"{run.fitted.num_layers} of {run.model_layers}, heads and page sizes as in the model"
    yield "requests", f"{result.num_requests} in flight, up to {counted(run.num_tokens, 'token')}, seed {run.seed}"
    yield (
        "moved",
        f"{bytes_text(result.num_bytes)} of cache in {seconds_text(result.transfer_s)}, {bytes_text(int(rate))}/s",
    )
    yield "operations", f"{result.num_copies:,} that read {bytes_text(result.num_read_bytes)}, {_staged(result)}"
    yield "memory copy", f"{seconds_text(result.plain_copy_s)} for as many bytes, by one core that does nothing else"
    yield "compiled, proved", f"in {seconds_text(result.compile_s)} on the slowest rank, once per pair of engines"
    yield "compared", f"{bytes_text(result.num_bytes_compared)} of the decode ranks, byte for byte"
    yield "whole run", seconds_text(run.total_s)


def _staged(result: TrialResult) -> str:
    return (
        f"{bytes_text(result.num_staged_bytes)} of the cache through staging"
        if result.num_staged_bytes
        else "all of it directly"
    )


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
        "share_of_plain_copy": result.plain_copy_s / result.transfer_s if result.transfer_s else 0.0,
        "total_seconds": run.total_s,
        "findings": run.findings,
        "warnings": run.warnings,
    }
