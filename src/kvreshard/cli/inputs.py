"""Inputs of the commands: options that several commands share, files, and the engines of a pair.

A path that cannot be read or written is an `InputError` with the path and the reason. A result is written whole or not at all.
"""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvreshard.catalog import MODELS, EngineSpec, Model, assumed, describe, load, parse_engine, warnings
from kvreshard.catalog.spec import engine_keys
from kvreshard.cli.output import tell
from kvreshard.model import EngineLayout, KvReshardError, LayoutMismatch, WireError, wire
from kvreshard.model.changed import replace
from kvreshard.model.text import MAX_NAME, counted, escaped
from kvreshard.model.wire import MAX_MESSAGE_BYTES
from kvreshard.plan.cost import CostModel, usual_cost
from kvreshard.plan.coverage import find_unheld
from kvreshard.session.constants import host_description, require_constants
from kvreshard.testing.scenario import pages_needed
from kvreshard.transport.base import is_device

Side = Literal["prefill", "decode"]
STDOUT = 1
SIDES: tuple[Side, Side] = ("prefill", "decode")


def complete_model(incomplete: str) -> list[str]:
    """Ids of the catalog that complete a word."""
    return [name for name in MODELS if name.startswith(incomplete)]


def complete_engine(incomplete: str) -> list[str]:
    """Keys that complete an engine.

    >>> complete_engine("tp=4,pp")
    ['tp=4,pp=']
    """
    before, comma, key = incomplete.rpartition(",")
    return [f"{before}{comma}{name}=" for name in engine_keys() if name.startswith(key) and name.isalpha()]


def model_option(help_text: str = "Id of the catalog, or path of a config.json.") -> Any:
    """`--model` of a command, or `--draft`."""
    return typer.Option(help=help_text, autocompletion=complete_model)


def engine_option(name: str, help_text: str) -> Any:
    """An option that takes an engine, as a text for `parse_engine`. Every error names the option."""

    def read(given: str | EngineSpec) -> EngineSpec:
        """Typer parses what an option is by default, too."""
        try:
            return given if isinstance(given, EngineSpec) else parse_engine(given)
        except KvReshardError as error:
            raise type(error)(f"{name}: {error}") from None

    return typer.Option(name, help=help_text, autocompletion=complete_engine, parser=read, metavar="ENGINE")


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Draft = Annotated[str | None, model_option("Model of a draft whose caches come behind: id or path.")]
Pages = Annotated[int | None, typer.Option(help="Pages of each pool, page 0 among them, which is never used.")]
CostModelFile = Annotated[
    Path | None,
    typer.Option(help="Constants of this host, from `kvreshard bench --calibrate`; not given: the defaults."),
]


class InputError(KvReshardError):
    """Options that do not go together, or a file that cannot be read or written."""


UNNAMED_MODELS = "layout files name no model: whether both engines run the same one is not checked"


@dataclass(frozen=True, slots=True)
class DescribedEngine:
    """An engine's layout. `warnings`: why vLLM would not run it as written, and what is assumed. `notes`: surprising effects of the options.
    Both are empty for a layout from a file.
    """

    layout: EngineLayout
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines, a title for both, and the warnings and notes of each."""

    prefill: EngineLayout
    decode: EngineLayout
    title: str
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def read_bytes(path: Path, max_bytes: int, what: str) -> bytes:
    """A file's content. Raises InputError if it cannot be read or is larger than `max_bytes`."""
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise InputError(f"{what} '{path}' cannot be read: {error.strerror}; check the path") from None
    if len(content) > max_bytes:
        raise InputError(f"{what} '{path}' has more than {max_bytes} bytes; this is no {what}")
    return content


def read_layout(path: Path, side: Side | None = None) -> EngineLayout:
    """The layout that `kvreshard describe` wrote. Every error names the file, and its side of a pair."""
    what = "layout file" if side is None else f"{side} layout file"
    content = read_bytes(path, MAX_MESSAGE_BYTES, what)
    try:
        return wire.decode(content, "json")
    except WireError as error:
        raise WireError(
            f"{what} '{path}': {error}; `kvreshard describe` writes one, and a config.json goes with --model"
        ) from None
    except KvReshardError as error:
        raise type(error)(f"{what} '{path}': {error}") from None


def check_device(device: str) -> None:
    """Raises InputError unless this names a device."""
    if not is_device(device):
        raise InputError(f"--device {device}: no device has that name; give cpu, or cuda: and a number, as cuda:0")


def read_cost_model(path: Path | None, device: str = "cpu") -> CostModel:
    """The constants of this host in a file of `kvreshard bench --calibrate`; without a file the defaults. Raises KvReshardError."""
    check_device(device)
    return usual_cost(device) if path is None else require_constants(path, host_description(device), device)


def write_whole(path: Path, content: bytes) -> bool:
    """Write a file whole or not at all: under a temporary name beside what a link leads to, then renamed. Raises InputError.

    Returns whether the content went to stdout, which then takes nothing else.
    """
    if not path.name or str(path) == "-":
        raise InputError(f"output file '{path}' is no name of a file; give one, or /dev/stdout to have it on stdout")
    try:
        number = _find_descriptor(path)
        if number is None:
            _replace(path, content)
        elif number != STDOUT:
            with open(os.dup(number), "wb") as file:
                file.write(content)
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is a link to itself"
        raise InputError(f"output file '{path}' cannot be written: {why}; nothing was written") from None
    if number == STDOUT:
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
    return number == STDOUT


def _replace(path: Path, content: bytes) -> None:
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        path.write_bytes(content)  # a pipe cannot be replaced
        return
    path = path.resolve() if path.is_symlink() else path
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _find_descriptor(path: Path) -> int | None:
    """The open descriptor that a path names, as /dev/stdout and /dev/fd/3 do: opened by such a name, a file would be written anew."""
    open_files = Path("/proc/self/fd").resolve()
    for _ in range(8):  # links
        if path.parent.resolve() == open_files and path.name.isdecimal():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


def describe_engine(
    model: Model, spec: EngineSpec, name: str, pages: int | None = None, num_tokens: int | None = None
) -> DescribedEngine:
    """The layout of an engine. Pools without a size hold at least `num_tokens` tokens."""
    if pages is not None:
        if spec.pages is not None and spec.pages != pages:
            raise InputError(
                f"--pages {pages} and pages={spec.pages} of engine '{name}' are two sizes; give one of them"
            )
        try:
            spec = replace(spec, pages=pages)
        except KvReshardError as error:
            raise InputError(f"--pages {pages}: {error}") from None
    layout = describe(model, spec, name)
    if num_tokens is not None and spec.pages is None:
        needed = pages_needed(layout, 1, num_tokens)
        if needed > min(group.num_pages for group in layout.groups):
            layout = describe(model, spec, name, needed)
    return DescribedEngine(layout, judge(model, spec, name), tuple(_explain_pages(model, spec, layout)))


def check_decode(spec: EngineSpec) -> None:
    """Raises InputError for a decode engine that our connector refuses (`kvreshard.vllm.start_check`)."""
    if spec.pcp > 1 and spec.dcp == 1:
        raise InputError(
            f"--decode {escaped(spec, 60)}: the {spec.pcp} ranks of pcp={spec.pcp} hold the same, and the connector could load only one of them; write "
            f"dcp={spec.pcp} too, or leave pcp out"
        )


def judge(model: Model, spec: EngineSpec, name: str) -> tuple[str, ...]:
    """Why vLLM would not run an engine, and what is assumed of it and of its model's file, each as a sentence."""
    refused = (f"vLLM 0.32 would not run engine '{name}': {found}" for found in warnings(model, spec))
    doubts = (f"model '{escaped(model.name, MAX_NAME)}': {found}" for found in model.doubts)
    return (*refused, *doubts, *(f"engine '{name}': {found}" for found in assumed(model, spec)))


def _explain_pages(model: Model, spec: EngineSpec, layout: EngineLayout) -> Iterator[str]:
    """A note for each length of attention pages that is not the requested one, because a page must hold a state."""
    wanted = spec.page or model.default_page
    if spec.page_of or all(group.tokens_per_page is not None for group in layout.groups):
        return
    lengths = {group.tokens_per_page // spec.dcp for group in layout.groups if group.tokens_per_page is not None}
    for length in sorted(lengths - {wanted}):
        yield (
            f"{layout.engine} pages hold {length:,} tokens, not {wanted:,}: beside states, vLLM makes an attention page as large as a "
            "state"
        )


def warn(found: tuple[str, ...]) -> None:
    """Write warnings to stderr."""
    for warning in found:
        tell(f"warning: {warning}")


def read_pair(
    model: str | None,
    engines: Sequence[EngineSpec | None],
    files: Sequence[Path | None] = (None, None),
    pages: int | None = None,
    draft: str | None = None,
    *,
    may_lack: bool = False,
    num_tokens: int | None = None,
) -> Pair:
    """Prefill and decode, each an engine of the model or from a layout file.

    `may_lack`: a decode layout need not be a whole engine. `num_tokens`: see `describe_engine`.
    """
    for option, value in (("model", model), ("draft", draft), ("pages", pages)):
        if value is not None and all(files):
            raise InputError(
                f"--{option} {value}: both engines are layout files, which need nothing else; drop --{option}"
            )
    # Once for both sides: it may be a pipe.
    read_model = cache(lambda: load(model, draft)) if model is not None else None
    prefill, decode = sides = [
        _read_side(read_model, side, engine, file, pages, num_tokens)
        for side, engine, file in zip(SIDES, engines, files, strict=True)
    ]
    if may_lack and files[1] is None:
        raise InputError("--incomplete is about a decode layout from a file, and the decode engine is none; drop it")
    lacking = _check_whole(decode.layout, may_lack) if files[1] is not None else ()
    title = " -> ".join(
        f"{side} {engine or file} ({counted(len(found.layout.ranks), 'rank')})"
        for side, engine, file, found in zip(SIDES, engines, files, sides, strict=True)
    )
    return Pair(
        prefill.layout,
        decode.layout,
        f"{model}: {title}" if model else title,
        tuple(dict.fromkeys((*prefill.warnings, *decode.warnings, *lacking))),
        (*prefill.notes, *decode.notes, *([UNNAMED_MODELS] if any(files) else ())),
    )


def called(layout: EngineLayout, what: str, path: Path) -> EngineLayout:
    """The layout of a file, named after the file in messages: two files may have one engine name."""
    return replace(layout, engine=f"{what} ({escaped(path, MAX_NAME // 2)})")


def find_lacking(decode: EngineLayout) -> tuple[str, ...]:
    """What a decode engine's ranks lack together. A proof of the other ranks does not show it."""
    return tuple(f"engine '{decode.engine}': {found}" for found in find_unheld(decode))


def _check_whole(decode: EngineLayout, may_lack: bool) -> tuple[str, ...]:
    """What is lacking, as warnings. Raises LayoutMismatch instead unless `may_lack`."""
    lacking = find_lacking(decode)
    if lacking and not may_lack:
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise LayoutMismatch(
            f"{lacking[0]}{more}: its ranks {sorted(decode.rank_by_number)} are not a whole engine; add what is missing, or give --incomplete "
            "to plan what is there"
        )
    return lacking


def _read_side(
    read_model: Callable[[], Model] | None,
    side: Side,
    engine: EngineSpec | None,
    file: Path | None,
    pages: int | None,
    num_tokens: int | None,
) -> DescribedEngine:
    if file is not None and engine is not None:
        raise InputError(f"both --{side} and --{side}-layout are given; give one of them")
    if file is not None:
        return DescribedEngine(called(read_layout(file, side), side, file))
    if engine is None:
        raise InputError(f"the {side} engine is missing; give --{side} tp=... with --model, or a layout file")
    if read_model is None:
        raise InputError(f"--{side} {engine} needs a model; give --model ID or --model config.json")
    if side == "decode":
        check_decode(engine)
    return describe_engine(read_model(), engine, side, pages, num_tokens)
