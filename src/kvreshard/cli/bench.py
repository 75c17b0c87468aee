"""`kvreshard bench`: the cost of moving bytes on this machine, as the planner's cost model counts it.

With `--calibrate` two rank processes start, the constants are measured and saved in a file under this host's description. Without it, those in
the file are shown. Commands and connectors use them only with `--cost-model` or `cost_model`.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column

from kvreshard.cli.inputs import AsJson, check_device
from kvreshard.cli.output import bytes_text, number_column, seconds_text, show_table, write_json
from kvreshard.plan.cost import CostModel, usual_cost
from kvreshard.session.constants import (
    default_path,
    host_description,
    load_constants,
    require_constants,
    save_constants,
)
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
    as_json: AsJson = False,
) -> None:
    """Measure or show what copies cost on this machine."""
    check_device(device)
    path = constants or default_path(os.environ)
    host = host_description(device)
    # A file given by option must have constants of this host; the one in the cache may not have them yet.
    is_optional = constants is None or calibrate_now
    model = load_constants(path, host) if is_optional else require_constants(path, host, device)
    source = "measured"
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
    option = "" if device == "cpu" else f" --device {device}"
    where = (
        f"kept in {path}; used where it is named: --cost-model {path}"
        if source == "measured"
        else f"not measured here: kvreshard bench --calibrate{option}"
    )
    columns = (Column("what"), number_column("cost"))
    show_table(Console(), f"constants ({source}; {where})", columns, _rows(model))


def _rows(model: CostModel) -> list[tuple[str, str]]:
    return [
        ("a posted copy", seconds_text(model.copy_s)),
        ("reading many copies", f"{bytes_text(int(model.read_bytes_per_s))}/s"),
        ("reading to stage", f"{bytes_text(int(model.stage_bytes_per_s))}/s"),
        ("a locally moved run", seconds_text(model.move_run_s)),
        ("moving locally", f"{bytes_text(int(model.move_bytes_per_s))}/s"),
        ("share of the shorter of the two that is hidden, in many batches", f"{model.hidden_share:.0%}"),
        ("a staging batch beside its bytes", seconds_text(model.batch_s)),
        ("gaps that are cheaper read than left out", f"up to {bytes_text(model.max_gap_bytes)}"),
    ]
