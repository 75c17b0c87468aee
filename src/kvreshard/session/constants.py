"""Where do the cost model's constants of this machine come from, between one process and the next?

`kvreshard bench --calibrate` measures them (`testing.calibrate`) and writes a small JSON file; a command or a connector that
wants them reads it and hands the `CostModel` on. Nothing else looks for the file.

1. The file holds one set of constants per host and kind of device, under the facts that they depend on: processor, cores, package versions.
2. `load_constants` gives those of this host, or None: no file, another host, or constants of a kind that a newer planner does
   not mean any more (`VERSION`).

Refused with KvReshardError: a file that is not ours, or whose constants are not positive.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from kvreshard.model.errors import KvReshardError
from kvreshard.plan.cost import MEASURED_SPEEDUP, CostModel

FORM = "kvreshard.constants"
VERSION = 4
# Constants of thousands of hosts take less.
MAX_BYTES = 1 << 20
FILE_NAME = "constants.json"


class _Constants(msgspec.Struct, forbid_unknown_fields=True):
    copy_s: float
    read_bytes_per_s: float
    move_run_s: float
    move_bytes_per_s: float
    stage_bytes_per_s: float
    hidden_share: float
    batch_s: float


class _Head(msgspec.Struct):
    form: str
    version: int


class _File(_Head):
    hosts: dict[str, _Constants]


def default_path(environ: Mapping[str, str]) -> Path:
    """The file in the user's cache: under `XDG_CACHE_HOME`, else `.cache` in the home."""
    root = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", "."), ".cache")
    return Path(root) / "kvreshard" / FILE_NAME


def host_description(device: str = "cpu") -> str:
    """What the constants of this host depend on, as one key. `device`: where the caches are, "cpu", "cuda:0", ..."""
    versions = [] if device == "cpu" else [f"caches on {device.partition(':')[0]}"]
    for package in ("nixl", "nixl-cu12", "nixl-cu13", "numpy"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return "; ".join([platform.machine(), _processor(), f"{os.cpu_count()} cores", *versions])


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def load_constants(path: Path, host: str) -> CostModel | None:
    """The constants of a host, None if the file has none that hold. Raises KvReshardError for a file that is not one."""
    if not path.exists():
        return None
    constants = _read(path).hosts.get(host)
    if constants is None:
        return None
    try:
        return CostModel(**msgspec.structs.asdict(constants), min_speedup=MEASURED_SPEEDUP)
    except ValueError as error:
        raise KvReshardError(f"constants file {path}: {error}; run `kvreshard bench --calibrate` again") from error


def require_constants(path: Path, host: str) -> CostModel:
    """The constants of a host that somebody asked for by name. Raises KvReshardError where the file has none that hold."""
    found = load_constants(path, host)
    if found is not None:
        return found
    remedy = f"`kvreshard bench --calibrate --constants {path}` measures them"
    if not path.exists():
        raise KvReshardError(f"there is no constants file {path}; {remedy}")
    kept = _read(path)
    if kept.version != VERSION:
        raise KvReshardError(
            f"constants file {path} is of version {kept.version}, this kvreshard uses version {VERSION}; {remedy} here"
        )
    known = "; ".join(f"({name})" for name in kept.hosts) or "none"
    raise KvReshardError(f"constants file {path} has none of this host ({host}) but of {known}; {remedy} here")


def save_constants(path: Path, host: str, model: CostModel) -> None:
    """Add or replace the constants of one host; those of another version mean something else, and go.

    Raises KvReshardError if the place holds another kind of file.
    """
    hosts = dict(_read(path).hosts) if path.exists() else {}
    hosts[host] = _Constants(**{name: getattr(model, name) for name in _Constants.__struct_fields__})
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_bytes(msgspec.json.format(msgspec.json.encode(_File(FORM, VERSION, hosts)), indent=1) + b"\n")
    written.replace(path)  # never half a file, whoever reads meanwhile


def _read(path: Path) -> _File:
    """The file, without hosts if it is of another version."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)  # one that is longer is cut, and so no JSON
        head = msgspec.json.decode(content, type=_Head)
        is_ours = head.form == FORM and head.version == VERSION
        found = msgspec.json.decode(content, type=_File) if is_ours else _File(head.form, head.version, {})
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KvReshardError(f"constants file {path} cannot be read: {error}; remove it or name another") from error
    if found.form != FORM:
        raise KvReshardError(f"constants file {path} is a '{found.form}', not a '{FORM}'; name another")
    return found
