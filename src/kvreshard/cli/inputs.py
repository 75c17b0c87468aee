"""What may a person hand to a command, and what is said when it does not work?

Models and engines go through the catalog, layouts through the wire codec. This file adds only what is about files: a path that
cannot be read or written is an `InputError` with the path and the reason, and a result is written whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvreshard.catalog import EngineSpec, Model, assumed, describe, load, parse_engine, warnings
from kvreshard.cli.output import tell
from kvreshard.model import EngineLayout, KvReshardError, LayoutMismatch, wire
from kvreshard.model.changed import replace
from kvreshard.model.text import MAX_NAME, counted, escaped, is_name
from kvreshard.model.wire import MAX_MESSAGE_BYTES
from kvreshard.plan.cost import CostModel, usual_cost
from kvreshard.plan.coverage import find_unheld
from kvreshard.session.constants import host_facts, require_constants
from kvreshard.transport.base import is_device

Side = Literal["prefill", "decode"]
CostModelFile = Annotated[
    Path | None,
    typer.Option(help="Constants of this host, from `kvreshard bench --calibrate`; not given: the defaults."),
]


class InputError(KvReshardError):
    """Options that do not go together, or a file that cannot be read or written."""


@dataclass(frozen=True, slots=True)
class Described:
    """An engine's layout. `warnings`: why vLLM would not run it as it was written, and what is assumed; empty for one that came from a file."""

    layout: EngineLayout
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines, a line about each for people, and why vLLM would not run them."""

    prefill: EngineLayout
    decode: EngineLayout
    title: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """What the options say about one side: an engine of the model, or the file of a layout."""

    side: Side
    engine: str | None
    layout_file: Path | None


def read_bytes(path: Path, max_bytes: int, what: str) -> bytes:
    """A file's content. Raises InputError if it cannot be read or is larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror}; check the path") from None
    if len(content) > max_bytes:
        raise InputError(f"{what} '{path}' has more than {max_bytes} bytes; that is no {what}")
    return content


def read_layout(path: Path, side: Side | None = None) -> EngineLayout:
    """The layout that `kvreshard describe` wrote. Every error names the file, and its side of a pair."""
    what = "layout file" if side is None else f"{side} layout file"
    content = read_bytes(path, MAX_MESSAGE_BYTES, what)
    try:
        return wire.decode(content, "json")
    except KvReshardError as error:
        raise type(error)(f"{what} '{path}': {error}") from None


def check_device(device: str) -> None:
    """Raises InputError unless this names a device."""
    if not is_device(device):
        raise InputError(f"--device {device}: no device has that name; give cpu, or cuda: and a number, as cuda:0")


def read_cost_model(path: Path | None, device: str = "cpu") -> CostModel:
    """The constants of this host in a file of `kvreshard bench --calibrate`; without a file the defaults. Raises KvReshardError.

    `device`: where the caches are; refused if it is none.
    """
    check_device(device)
    return usual_cost(device) if path is None else require_constants(path, host_facts(device))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: beside its place first, then moved there. Raises InputError."""
    temporary: str | None = None
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(content)  # a pipe or /dev/stdout cannot be replaced
            return
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise InputError(f"output file '{path}' cannot be written: {error.strerror}; nothing was written") from None


def describe_engine(model: str, engine: str, name: str, pages: int | None, draft: str | None) -> Described:
    """An engine as a person writes it, of a model of the catalog or a path."""
    if not is_name(name) or not name.strip():
        raise InputError(
            f"engine name '{escaped(name, 60)}': must have 1 to {MAX_NAME} characters, all of them visible; choose another"
        )
    return _describe(load(model, draft), engine, name, pages)


def describe_side(model: Model, side: Side, engine: str, pages: int | None) -> Described:
    """One side of a pair. Raises InputError for a decode engine that our connector refuses (`kvreshard.vllm.start_check`)."""
    spec = parse_engine(engine)
    if side == "decode" and spec.pcp > 1 and spec.dcp == 1:
        raise InputError(
            f"--decode {escaped(engine, 60)}: the {spec.pcp} ranks of pcp={spec.pcp} hold the same, and the connector could load only one of "
            f"them; write dcp={spec.pcp} too, or leave pcp out"
        )
    return _describe(model, engine, side, pages)


def _describe(model: Model, engine: str, name: str, pages: int | None) -> Described:
    spec = parse_engine(engine)
    return Described(describe(model, spec, name, pages), judge(model, spec, name))


def judge(model: Model, spec: EngineSpec, name: str) -> tuple[str, ...]:
    """Why vLLM would not run an engine, and what is assumed of it, each as a sentence."""
    refused = (f"vLLM 0.32 would not run engine '{name}': {found}" for found in warnings(model, spec))
    return (*refused, *(f"engine '{name}': {found}" for found in assumed(model, spec)))


def warn(found: tuple[str, ...]) -> None:
    """On stderr: the result stays what it is."""
    for warning in found:
        tell(f"warning: {warning}")


def read_pair(
    model: str | None, prefill: Asked, decode: Asked, pages: int | None, draft: str | None, *, may_lack: bool = False
) -> Pair:
    """Both engines, each from a model and an engine or from a layout file. `may_lack`: a decode layout need not be all of its engine."""
    for option, value in (("model", model), ("draft", draft), ("pages", pages)):
        if value is not None and prefill.layout_file and decode.layout_file:
            raise InputError(
                f"--{option} {value}: both engines are layout files, which say all there is; drop --{option}"
            )
    # Once for both: it may be a pipe.
    read_model = cache(lambda: load(model, draft)) if model is not None else None
    layouts: list[EngineLayout] = []
    words: list[str] = []
    found: list[str] = []
    for asked in (prefill, decode):
        described = _read_side(read_model, asked, pages)
        layout = described.layout
        layouts.append(layout)
        found += described.warnings
        words.append(f"{asked.side} ({asked.engine or asked.layout_file}, {counted(len(layout.ranks), 'rank')})")
    if decode.layout_file is not None:
        found += _check_whole(layouts[1], may_lack)
    title = " -> ".join(words)
    return Pair(layouts[0], layouts[1], f"{model}: {title}" if model else title, tuple(found))


def called(layout: EngineLayout, what: str, path: Path) -> EngineLayout:
    """The layout of a file by a name for messages: the one inside may be any other file's too."""
    return replace(layout, engine=f"{what} ({escaped(path, MAX_NAME // 2)})")


def find_lacking(decode: EngineLayout) -> tuple[str, ...]:
    """What a decode engine's ranks lack together, which a proof of the others would not show."""
    return tuple(f"engine '{decode.engine}': {found}" for found in find_unheld(decode))


def _check_whole(decode: EngineLayout, may_lack: bool) -> tuple[str, ...]:
    """What is lacking, to be told. Raises LayoutMismatch unless it may."""
    lacking = find_lacking(decode)
    if lacking and not may_lack:
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise LayoutMismatch(
            f"{lacking[0]}{more}: its ranks {sorted(decode.rank_by_number)} are not a whole engine; add what is missing, or give --incomplete "
            "to plan what is there"
        )
    return lacking


def _read_side(read_model: Callable[[], Model] | None, asked: Asked, pages: int | None) -> Described:
    side = asked.side
    if asked.layout_file is not None and asked.engine is not None:
        raise InputError(f"both --{side} and --{side}-layout are given; give one of them")
    if asked.layout_file is not None:
        return Described(called(read_layout(asked.layout_file, side), side, asked.layout_file))
    if asked.engine is None:
        raise InputError(f"nothing is known of the {side} engine; give --{side} tp=... with --model, or a layout file")
    if read_model is None:
        raise InputError(f"--{side} {asked.engine} needs a model; give --model ID or --model config.json")
    return describe_side(read_model(), side, asked.engine, pages)
