"""`kvreshard verify`: moves the cache of a model from one engine to another and compares every byte of it.

1. Describe both engines, scaled to fit (`scale`), and make requests: fragmented block tables, several requests in flight, some with a prefix
   that the decode engine has already, a partial last page.
2. Start the ranks: one process each over NIXL, or all in this process for `--transport memory`. Their memory is the processor's, or a
   device's for `--device`.
3. Move all requests at once and compare all memory of the decode ranks with the slow oracle (`testing.trial`).
4. Print what moved and the verdict. Exit with 1 if anything is wrong, with the first wrong field, rank and token.

Refused: NIXL that is not installed, more than `RANKS_PER_CORE` processes per core without confirmation, `--way staged` with `--push`,
`--device` with `--transport memory`, a device that does not exist, more memory than this machine has, and whatever the engines refuse.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from kvreshard.catalog import EngineSpec, load, parse_engine
from kvreshard.cli.cells import find_cell
from kvreshard.cli.inputs import (
    AsJson,
    CostModelFile,
    Draft,
    InputError,
    engine_option,
    judge,
    model_option,
    read_cost_model,
    warn,
)
from kvreshard.cli.output import bytes_text, seconds_text, show_line, show_table, tell, write_json
from kvreshard.cli.plan import WayOption
from kvreshard.cli.scale import ScaledPair, check_room, fit
from kvreshard.model import EngineLayout, KvReshardError
from kvreshard.model.tables import Request
from kvreshard.model.text import counted, escaped
from kvreshard.testing.ranks import LocalRanks, ProcessRanks, RankDiedError, Ranks
from kvreshard.testing.scenario import make_requests
from kvreshard.testing.trial import Progress as Report
from kvreshard.testing.trial import TrialResult, memory_needed, run_trial
from kvreshard.transport.memory import Fabric, MemoryTransport

TransportName = Literal["nixl", "memory"]
STAGES = {
    "start": "starting the ranks",
    "fill": "filling their memory",
    "values": "writing the values",
    "compile": "compiling and proving routes",
    "transfer": "moving the cache",
    "oracle": "comparing with the oracle",
}
EXIT_WRONG = 1
# Further wrong places say the same again.
MAX_FINDINGS = 8
RANKS_PER_CORE = 8
USUAL_PREFILL, USUAL_DECODE = parse_engine("tp=4"), parse_engine("tp=8")


class VerifyError(KvReshardError):
    """The verification could not be finished, so there is no verdict."""


def verify(
    model: Annotated[str, model_option()] = "gemma-4-26b-a4b",
    prefill: Annotated[
        EngineSpec, engine_option("--prefill", "Prefill engine, as in tp=4,pp=2,page=16.")
    ] = USUAL_PREFILL,
    decode: Annotated[EngineSpec, engine_option("--decode", "Decode engine, as in tp=8,order=HND.")] = USUAL_DECODE,
    requests: Annotated[int, typer.Option(min=1, help="Requests in flight at once.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest request.")] = 512,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers; as many as fit 2 GiB if not given.")
    ] = None,
    transport: Annotated[TransportName, typer.Option(help="One process per rank over NIXL, or one for all.")] = "nixl",
    device: Annotated[
        str, typer.Option(help="Where the caches are: cpu, or a device that torch sees, as cuda:0; all ranks share it.")
    ] = "cpu",
    push: Annotated[bool, typer.Option("--push", help="Prefill ranks write, instead of decode ranks reading.")] = False,
    way: WayOption = None,
    cost_model: CostModelFile = None,
    draft: Draft = None,
    seed: Annotated[int, typer.Option(min=0, help="Of tables, lengths and contents.")] = 0,
    yes: Annotated[bool, typer.Option("--yes", help="Start however many processes it takes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move a model's cache between two engines over NIXL and compare every byte with a slow oracle."""
    if push and way == "staged":
        raise InputError("--push writes directly and cannot be staged; drop --way staged or --push")
    cost = read_cost_model(cost_model, device)
    if device != "cpu" and transport == "memory":
        raise InputError(f"--device {device} with --transport memory, which copies host memory only; drop one of them")
    found = load(model, draft)
    fitted = fit(found, prefill, decode, requests, tokens, layers)
    if layers is not None and fitted.num_layers != layers:
        tell(
            f"note: {fitted.num_layers} layers are taken, not {layers}: each sort of layer is among them at least once"
        )
    num_ranks = len(fitted.prefill.ranks) + len(fitted.decode.ranks)
    check_room(fitted, num_ranks if transport == "nixl" else 0)
    if transport == "nixl" and not yes:
        confirm_processes(num_ranks, len(os.sched_getaffinity(0)))
    warnings = tuple(dict.fromkeys((*judge(found, prefill, "prefill"), *judge(found, decode, "decode"))))
    warn(warnings)
    made = make_requests(fitted.prefill, fitted.decode, requests, tokens, seed)
    started_s = time.monotonic()
    what = f"verifying {model}: {prefill} -> {decode}, {counted(num_ranks, 'rank')} with {bytes_text(fitted.pool_bytes)} of pages together"
    with show_stages(what) as report:
        try:
            report("start", 0, num_ranks)
            with make_ranks(transport, num_ranks, memory_needed(fitted.prefill, fitted.decode), device) as ranks:
                ranks.connect_all()
                report("start", num_ranks, num_ranks)
                result = run_trial(
                    ranks, fitted.prefill, fitted.decode, made,
                    push=push, way=way, cost=cost, seed=seed, progress=report,
                )  # fmt: skip
        except RankDiedError as error:
            raise VerifyError(f"the verification could not be finished: {error}") from None
    document = {
        "passed": result.passed,
        "model": model,
        "engines": f"{prefill} -> {decode}",
        "transport": transport,
        "device": device,
        "push": push,
        "seed": seed,
        "num_layers": fitted.num_layers,
        "model_layers": found.num_layers,
        "num_tokens": tokens,
        **measured(result),
        "total_seconds": time.monotonic() - started_s,
        "findings": find_wrong(fitted.decode, made, result),
        "warnings": warnings,
    }
    if as_json:
        write_json(document)
    else:
        show_run(Console(), document, fitted)
    if not result.passed:
        raise typer.Exit(EXIT_WRONG)


def measured(result: TrialResult) -> dict[str, float]:
    """Counts, bytes and seconds of a trial, for its document."""
    return {
        "num_requests": result.num_requests,
        "num_bytes": result.num_bytes,
        "num_read_bytes": result.num_read_bytes,
        "num_staged_bytes": result.num_staged_bytes,
        "num_descriptors": result.num_copies,
        "num_bytes_compared": result.num_bytes_compared,
        "compile_seconds": result.compile_s,
        "transfer_seconds": result.transfer_s,
        "plain_copy_seconds": result.plain_copy_s,
        "share_of_plain_copy": result.plain_copy_s / result.transfer_s if result.transfer_s else 0.0,
    }


def find_wrong(decode: EngineLayout, requests: Sequence[Request], result: TrialResult) -> list[str]:
    """What is wrong, worst first, each as a sentence; empty if the trial passed."""
    found = [f"transfer: {error}" for error in result.errors]
    for wrong in result.wrong:
        num_bytes = sum(stop - start for start, stop in wrong.ranges)
        first = wrong.ranges[0][0]
        where = find_cell(decode, requests, wrong.rank, wrong.region, first)
        found.append(
            f"decode rank {wrong.rank}: {counted(num_bytes, 'byte')}; the first is {where} (byte {first} of region '{wrong.region}')"
        )
    return [*found, *(f"reports: {missing}" for missing in result.missing_reports)]


def show_run(console: Console, run: dict[str, Any], fitted: ScaledPair) -> None:
    """What moved, and the verdict. `run`: the document."""
    title, columns = f"{run['model']}: {run['engines']}", (Column("what"), Column("how much"))
    show_table(console, title, columns, list(_rows(run, fitted)))
    for line in run["findings"][:MAX_FINDINGS]:
        show_line(console, f"wrong: {line}")
    if run["passed"]:
        ranks = counted(len(fitted.decode.ranks), "decode rank")
        text = f"right: every byte of {ranks} is as the oracle says; other pages and prefix hits are untouched"
        show_line(console, text)


def _rows(run: dict[str, Any], fitted: ScaledPair) -> Iterator[tuple[str, str]]:
    who = f"{len(fitted.prefill.ranks)} prefill and {counted(len(fitted.decode.ranks), 'decode rank')}"
    where = "" if run["device"] == "cpu" else f" on {run['device']}"
    kind = f"one process each{where}, " if run["transport"] == "nixl" else "in one process, "
    seconds, staged = run["transfer_seconds"], bytes_text(run["num_staged_bytes"])
    moved, rate = bytes_text(run["num_bytes"]), bytes_text(int(run["num_bytes"] / seconds) if seconds else 0)
    how = f"{staged} of the cache through staging" if run["num_staged_bytes"] else "all of it directly"
    yield "ranks", f"{who}, {kind}{run['transport']} {'WRITE' if run['push'] else 'READ'}"
    yield "layers", f"{run['num_layers']} of {run['model_layers']}, heads and page sizes as in the model"
    yield (
        "requests",
        f"{run['num_requests']} in flight, up to {counted(run['num_tokens'], 'token')}, seed {run['seed']}",
    )
    yield "moved", f"{moved} of cache in {seconds_text(seconds)}, {rate}/s"
    yield "operations", f"{run['num_descriptors']:,} that read {bytes_text(run['num_read_bytes'])}, {how}"
    copy_text = seconds_text(run["plain_copy_seconds"])
    yield "memory copy", f"{copy_text} for as many bytes, by one core that does nothing else"
    yield "compiled, proved", f"in {seconds_text(run['compile_seconds'])} on the slowest rank, once per pair of engines"
    yield "compared", f"{bytes_text(run['num_bytes_compared'])} of the decode ranks, byte for byte"
    yield "whole run", seconds_text(run["total_seconds"])


def confirm_processes(num_ranks: int, num_cores: int) -> None:
    """Confirm a number of processes that may stall this machine. Raises InputError where stdin is no terminal."""
    if num_ranks <= RANKS_PER_CORE * num_cores:
        return
    fact = f"{num_ranks} ranks are {num_ranks} processes on {counted(num_cores, 'core')}, which may take very long"
    if not sys.stdin.isatty():
        raise InputError(f"{fact}; give --yes to start them, fewer ranks, or --transport memory")
    typer.confirm(f"{fact}. Start them?", abort=True, err=True)


def make_ranks(transport: TransportName, num_ranks: int, memory_bytes: int, device: str = "cpu") -> Ranks:
    """All ranks of both engines, not connected yet."""
    if transport == "memory":
        fabric = Fabric()
        return LocalRanks(num_ranks, memory_bytes, lambda rank: MemoryTransport(fabric, f"rank{rank}"))
    if importlib.util.find_spec("nixl") is None:
        raise InputError("NIXL is not installed; `pip install nixl pyzmq`, or give --transport memory")
    return ProcessRanks(num_ranks, memory_bytes, devices=[device] * num_ranks)


@contextmanager
def show_stages(what: str) -> Iterator[Report]:
    """A bar for each stage on stderr, or one line if that is no terminal. Yields a function of a stage, steps done and steps in all."""
    console = Console(stderr=True)
    if not console.is_terminal:
        tell(escaped(what))
        yield lambda stage, done, total: None
        return
    tasks: dict[str, TaskID] = {}
    columns = (
        SpinnerColumn(finished_text="[green]+[/]"),
        TextColumn("{task.description:28}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:

        def report(stage: str, done: int, total: int) -> None:
            for task in progress.tasks:  # the start of a stage is the end of the one before
                if task.id != tasks.get(stage):
                    progress.update(task.id, completed=task.total)
            if stage not in tasks:
                tasks[stage] = progress.add_task(STAGES.get(stage, stage), total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report
    console.print()
