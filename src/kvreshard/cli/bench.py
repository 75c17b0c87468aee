"""`kvreshard bench`: what does moving bytes cost on this machine, as the planner's cost model counts it?

With `--calibrate` two rank processes are started, seven constants are measured and kept in a file under this host's facts; without
it, those in the file are shown. Commands and connectors use them only when they are told to (`--cost-model`, `cost_model`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvreshard.cli.inputs import check_device
from kvreshard.cli.terminal import write_json
from kvreshard.plan.cost import CostModel, usual_cost
from kvreshard.session.constants import default_path, host_facts, load_constants, require_constants, save_constants
from kvreshard.testing.calibrate import MEMORY_BYTES, calibrate
from kvreshard.testing.ranks import ProcessRanks


def bench(
    calibrate_now: Annotated[
        bool, typer.Option("--calibrate", help="Measure the constants, some ten seconds, and keep them.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="Where the caches are: cpu, or a device that torch sees, as cuda:0.")
    ] = "cpu",
    constants: Annotated[
        Path | None, typer.Option(help="File of constants, instead of the one in the user's cache.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Measure or show what copies cost on this machine."""
    check_device(device)
    path = constants or default_path(os.environ)
    host = host_facts(device)
    # A file that somebody names is meant; only the one in the cache may have nothing of this host yet.
    read = load_constants if constants is None or calibrate_now else require_constants
    model, source = read(path, host), "measured"
    if calibrate_now:
        with ProcessRanks(2, MEMORY_BYTES, devices=[device] * 2) as ranks:
            ranks.connect_all()
            model = calibrate(ranks)
        save_constants(path, host, model)
    if model is None:
        model, source = usual_cost(device), "default"
    if as_json:
        write_json({"host": host, "file": str(path), "source": source, "constants": asdict(model)})
        return
    sys.stdout.write(_told(model, source, path, device))


def _told(model: CostModel, source: str, path: Path, device: str) -> str:
    option = "" if device == "cpu" else f" --device {device}"
    kept = f"kept in {path}" if source == "measured" else f"not measured here: kvreshard bench --calibrate{option}"
    return (
        f"constants ({source}; {kept})\n"
        f"  a posted copy       {model.copy_s * 1e6:8.2f} us\n"
        f"  reading many copies {model.read_bytes_per_s / 1e9:8.2f} GB/s\n"
        f"  reading to stage    {model.stage_bytes_per_s / 1e9:8.2f} GB/s\n"
        f"  a locally moved run {model.move_run_s * 1e9:8.1f} ns\n"
        f"  moving locally      {model.move_bytes_per_s / 1e9:8.2f} GB/s\n"
        f"  hidden of the two   {model.hidden_share * 100:8.0f} % of the shorter, in many batches\n"
        f"  a staging batch     {model.batch_s * 1e6:8.2f} us beside its bytes\n"
        f"  gaps up to {model.max_gap_bytes} bytes are cheaper read than left out\n"
    )
