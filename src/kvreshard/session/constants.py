"""The file of measured cost constants, per host: `kvreshard bench --calibrate` writes it, commands and connectors read it.

It is JSON. A host's constants stand under what they depend on: processor, cores, device, package versions. Constants of another `VERSION` mean
something else and count as none.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from kvreshard.model.errors import KvReshardError, UsageError
from kvreshard.model.text import MAX_NAME, escaped
from kvreshard.plan.cost import MEASURED_SPEEDUP, CostModel

FORM = "kvreshard.constants"
VERSION = 4
# Constants of thousands of hosts take less.
MAX_BYTES = 1 << 20
FILE_NAME = "constants.json"
# Of the hosts in a file, in an error.
SHOWN_HOSTS = 3


class _Constants(msgspec.Struct, forbid_unknown_fields=True):
    copy_s: float
    read_bytes_per_s: float
    move_run_s: float
    move_bytes_per_s: float
    stage_bytes_per_s: float
    hidden_share: float
    batch_s: float


class _File(msgspec.Struct):
    form: str
    version: int
    hosts: dict[str, msgspec.Raw]


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
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def load_constants(path: Path, host: str) -> CostModel | None:
    """The constants of a host, None if there are none. Raises KvReshardError for another file, or constants that are not positive."""
    found = _read(path).get(host)
    if found is None:
        return None
    try:
        constants = msgspec.json.decode(found, type=_Constants)
        return CostModel(**msgspec.structs.asdict(constants), min_speedup=MEASURED_SPEEDUP)
    except (UsageError, ValueError, msgspec.MsgspecError) as error:
        raise KvReshardError(f"constants file {path}: {error}; run `kvreshard bench --calibrate` again") from error


def require_constants(path: Path, host: str, device: str = "cpu") -> CostModel:
    """The constants of a host for caches on `device`. Raises KvReshardError, also if there are none."""
    found = load_constants(path, host)
    if found is not None:
        return found
    option = "" if device == "cpu" else f" --device {device}"
    remedy = f"`kvreshard bench --calibrate --constants {path}{option}` measures them"
    file = _read_file(path)
    if file is None:
        raise KvReshardError(f"there is no constants file {path}; {remedy}")
    if file.version != VERSION:
        raise KvReshardError(
            f"constants file {path} is of version {file.version}, this kvreshard uses version {VERSION}; {remedy} here"
        )
    others = [f"({escaped(name, MAX_NAME)})" for name in file.hosts]
    more = f" and {len(others) - SHOWN_HOSTS} more" if len(others) > SHOWN_HOSTS else ""
    known = "; ".join(others[:SHOWN_HOSTS]) + more or "none"
    raise KvReshardError(f"constants file {path} has none of this host ({host}) but of {known}; {remedy} here")


def save_constants(path: Path, host: str, model: CostModel) -> None:
    """Add or replace the constants of one host, and drop those of another version. Raises KvReshardError for another kind of file."""
    constants = _Constants(**{name: getattr(model, name) for name in _Constants.__struct_fields__})
    hosts = {**_read(path), host: msgspec.Raw(msgspec.json.encode(constants))}
    content = msgspec.json.format(msgspec.json.encode(_File(FORM, VERSION, hosts)), indent=1) + b"\n"
    written = path.with_suffix(".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(content)
        written.replace(path)  # a reader never finds half a file
    except OSError as error:
        raise KvReshardError(
            f"constants file {path} cannot be written: {error.strerror}; name another with --constants"
        ) from error


def _read(path: Path) -> dict[str, msgspec.Raw]:
    """Constants by host: none if there is no file, or one of another version."""
    file = _read_file(path)
    return file.hosts if file is not None and file.version == VERSION else {}


def _read_file(path: Path) -> _File | None:
    """None if there is no file. Raises KvReshardError for one that cannot be read, and for another kind of file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES)  # a longer file is cut, and so no JSON
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise KvReshardError(f"constants file {path} cannot be read: {error.strerror}; check the path") from error
    try:
        found = msgspec.json.decode(content, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KvReshardError(
            f"constants file {path} cannot be read: {error}; `kvreshard bench --calibrate` writes such a file anew"
        ) from error
    if found.form != FORM:
        raise KvReshardError(
            f"constants file {path} is a '{escaped(found.form, MAX_NAME)}', not a '{FORM}'; name another"
        )
    return found
