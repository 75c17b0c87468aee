"""Scales a model down until its verification fits this machine. Heads, widths and page sizes stay; there are fewer layers and pages.

1. Pools are as large as the requests need (`testing.scenario.pages_needed`), unless an engine says how many pages it has.
2. If all layers take more than the budget, fewer are taken (`catalog.shrink`): at least one of each sort, and one per
   pipeline stage. Field names stay.

Raises InputError: fewer layers than pipeline stages, more layers than the model has, requests that do not fit with the fewest layers, and
a trial that takes more memory than this machine has available (`check_room`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvreshard.catalog import EngineSpec, Model, describe, fit_stages, shrink
from kvreshard.catalog.engine import stage_of_layers
from kvreshard.cli.inputs import InputError
from kvreshard.cli.output import bytes_text
from kvreshard.model import EngineLayout
from kvreshard.model.text import counted
from kvreshard.testing.scenario import pages_needed
from kvreshard.testing.trial import trial_bytes

# Filling and comparing take about 10 s per GiB on one core: 2 GiB keep a run below a minute.
BUDGET_BYTES = 2 << 30
# Measured: 1,450 MiB for 32 ranks, small pools included.
PROCESS_BYTES = 45 << 20
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class ScaledPair:
    """Both engines, of `num_layers` of the model's decoder layers."""

    prefill: EngineLayout
    decode: EngineLayout
    num_layers: int

    @property
    def pool_bytes(self) -> int:
        """Memory of all ranks' pools."""
        layouts = (self.prefill, self.decode)
        return sum(region.size_bytes for layout in layouts for rank in layout.ranks for region in rank.regions)


def fit(
    model: Model, prefill: EngineSpec, decode: EngineSpec, num_requests: int, num_tokens: int, num_layers: int | None
) -> ScaledPair:
    """Both layouts, with `num_layers` layers or as many as the budget allows. Raises InputError or LayoutError."""
    for spec in (prefill, decode):
        stage_of_layers(model, spec)  # raises for stages that do not add up, before they are scaled
    num_stages = max(prefill.pp, decode.pp)
    if num_layers is not None:
        if num_layers > model.num_layers:
            raise InputError(f"--layers {num_layers}, but model '{model.name}' has {model.num_layers} decoder layers")
        if num_layers < num_stages:
            raise InputError(
                f"--layers {num_layers}: fewer than the {num_stages} pipeline stages; give at least that many"
            )
        return _fitted(model, prefill, decode, num_requests, num_tokens, num_layers)
    wanted = model.num_layers
    while True:
        fitted = _fitted(model, prefill, decode, num_requests, num_tokens, wanted)
        if fitted.pool_bytes <= BUDGET_BYTES:
            return fitted
        if wanted <= num_stages or fitted.num_layers > wanted:
            raise InputError(
                f"{counted(num_requests, 'request')} of {counted(num_tokens, 'token')} need {bytes_text(fitted.pool_bytes)} even with "
                f"{fitted.num_layers} of {model.num_layers} layers, and {bytes_text(BUDGET_BYTES)} are the most that is taken by default: give "
                "fewer --requests or --tokens, or say how many --layers"
            )
        wanted = max(num_stages, min(wanted - 1, wanted * BUDGET_BYTES // fitted.pool_bytes))


def check_room(fitted: ScaledPair, num_processes: int = 0) -> None:
    """Raises InputError if a trial of both engines would take more memory than is available here. `num_processes`: of ranks."""
    needed, available = trial_bytes(fitted.prefill, fitted.decode), available_bytes()
    if available is not None and needed > available:
        raise InputError(
            f"pools of {bytes_text(fitted.pool_bytes)} on all ranks, with what they are compared with, take "
            f"{bytes_text(needed)} of memory, and {bytes_text(available)} are available here: give fewer pages=, --layers, "
            "--requests or --tokens"
        )
    processes_bytes = num_processes * PROCESS_BYTES
    if available is not None and needed + processes_bytes > available:
        raise InputError(
            f"{counted(num_processes, 'rank')}, each a process of its own, take {bytes_text(processes_bytes)} of memory beside "
            f"{bytes_text(needed)} for the pools, and {bytes_text(available)} are available here: give fewer ranks, or "
            "--transport memory"
        )


def _fitted(
    model: Model, prefill: EngineSpec, decode: EngineSpec, num_requests: int, num_tokens: int, num_layers: int
) -> ScaledPair:
    part = model if num_layers == model.num_layers else shrink(model, num_layers)
    layouts = []
    for spec, name in ((prefill, "prefill"), (decode, "decode")):
        scaled = spec if part is model else fit_stages(spec, part.num_layers)
        layout = describe(part, scaled, name)
        if spec.pages is None:
            layout = describe(part, scaled, name, pages_needed(layout, num_requests, num_tokens))
        layouts.append(layout)
    return ScaledPair(layouts[0], layouts[1], part.num_layers)


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Bytes of memory that this process can take without swapping, or None if unknown.

    The smaller of the kernel's estimate (`MemAvailable`) and what the process's control group allows: its limit, less what its members use
    except for page cache that can be dropped (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    bounds = [bound for bound in (_of_machine(meminfo), _of_group(cgroup)) if bound is not None]
    return max(0, min(bounds)) if bounds else None


def _of_machine(meminfo: Path) -> int | None:
    kibibytes = _values(meminfo).get("MemAvailable:")
    return None if kibibytes is None else kibibytes * 1024


def _of_group(cgroup: Path) -> int | None:
    try:
        limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no such file, or "max"
        return None
    return limit - used + _values(cgroup / "memory.stat").get("inactive_file", 0)


def _values(path: Path) -> dict[str, int]:
    """Lines of a name, a number and perhaps a unit; empty if the file cannot be read."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {found[0]: int(found[1]) for found in words if len(found) > 1 and found[1].isdigit()}
