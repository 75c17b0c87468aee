"""The models of the catalog, with the sources of their numbers, and the loading of any other from its config.json.

`configs/<id>.json` has the fields of a model's config.json that shape its caches, `configs/<id>.draft.json` those of its draft,
`configs/SOURCES.json` the sources and what could not be confirmed.

`load` takes an id, the path of a config.json (a pipe too, which is read once), or a directory with one. If a config.json declares no
quantisation, `hf_quant_config.json` beside it does, as in vLLM 0.32 (`transformers_utils/config.py:894`). Refused: an unknown name (the error
has the nearest id), a file that is no JSON object.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kvreshard.catalog.drafts import read_draft
from kvreshard.catalog.layers import Model, ModelLayer, as_draft
from kvreshard.catalog.read import read_model
from kvreshard.catalog.spec import MAX_SHOWN
from kvreshard.kinds import (
    Attention,
    GatedDelta,
    Latent,
    LinearState,
    Mamba1,
    Mamba2,
    Ring,
    ScaledRows,
    ShortConv,
    Style,
)
from kvreshard.model import LayoutError
from kvreshard.model.expect import expect
from kvreshard.model.text import counted, escaped

CONFIGS = resources.files("kvreshard.catalog") / "configs"
# A config.json has some kilobytes; whatever is far larger is another file.
MAX_CONFIG_BYTES = 16 << 20
QUANTISATION, QUANTISATION_FILE = "quantization_config", "hf_quant_config.json"
JSON_NAMES: Mapping[type, str] = {
    list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalog. `unconfirmed`: field -> why its value could not be confirmed."""

    id: str
    model: str
    sources: tuple[str, ...]
    unconfirmed: Mapping[str, str]
    notes: tuple[str, ...]

    def load(self) -> Model:
        model = read_model(self.id, self.read())
        if not (CONFIGS / f"{self.id}.draft.json").is_file():
            return model
        return as_draft(model, read_draft(f"{self.id} draft", _packaged(f"{self.id}.draft.json"), model))

    def read(self) -> dict[str, Any]:
        """The fields of its file."""
        return _packaged(f"{self.id}.json")


def load(model: str, draft: str | None = None) -> Model:
    """The model of an id or a path, with the caches of `draft` (an id or a path too) behind its own. Raises LayoutError."""
    expect(model, str, "a model", "an id of `kvreshard models` or the path of a config.json")
    found = MODELS[model].load() if model in MODELS else _from_path(model, read_model)
    if draft is None:
        return found
    expect(draft, str, "a draft", "an id of `kvreshard models` or the path of a config.json")
    if draft in MODELS:
        return as_draft(found, read_draft(draft, MODELS[draft].read(), found))
    return as_draft(found, _from_path(draft, lambda name, raw: read_draft(name, raw, found), "draft"))


def geometry(model: Model) -> str:
    """Distinct caches with how often they occur: `25 x window 1024, 8 heads x 256; 5 x full, 2 heads x 512`."""
    counts: dict[str, int] = {}
    for layer in model.layers:
        text = f"{'draft ' if layer.optional else ''}{layer.family}{_sizes(layer)}"
        counts[text] = counts.get(text, 0) + 1
    return "; ".join(f"{count} x {text}" for text, count in counts.items())


def _sizes(layer: ModelLayer) -> str:
    kind = layer.kind
    window = f" {kind.window_tokens}" if kind.window_tokens else ""
    match kind:
        case Attention():
            values = "" if kind.value_size in (0, kind.head_size) else f" and {kind.value_size} of V"
            return f"{window}, {counted(kind.num_kv_heads, 'head')} x {kind.head_size}{values}"
        case Latent() | ScaledRows():
            size = kind.cell_bytes if isinstance(kind, Latent) else kind.row_bytes + kind.scale_bytes
            per = f" per {kind.tokens_per_state} tokens" if kind.tokens_per_state > 1 else " per token"
            return f"{window}, {size} bytes{per}"
        case Mamba2():
            return f", Mamba-2 {kind.num_heads} heads x {kind.head_size} x {kind.state_size}, {counted(kind.num_groups, 'group')}"
        case Mamba1():
            return f", Mamba-1 {kind.num_channels} channels x {kind.state_size}"
        case GatedDelta():
            return f", delta {kind.num_key_heads} x {kind.key_size} keys, {kind.num_value_heads} x {kind.value_size} values"
        case LinearState():
            return f", linear {kind.num_heads} heads x {kind.head_size} x {kind.head_size}"
        case ShortConv():
            return f", convolution {kind.num_channels} channels x {kind.conv_kernel - 1}"
        case Ring():
            return f" of {kind.capacity(Style())} tokens, {len(kind.parts)} x {kind.channels} channels"
        case _:
            return ""


def _from_path(model: str, read: Callable[[str, Mapping[str, Any]], Model], what: str = "model") -> Model:
    path = Path(model)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            raise _unknown(what, model, path)
        raw = _read(path)
        beside = path.with_name(QUANTISATION_FILE)
        if path.name == "config.json" and raw.get(QUANTISATION) is None and beside.is_file():
            raw = {**raw, QUANTISATION: _read(beside)}
        # Of `config.json` and `.` the folder's name is in no part of the path as it was given.
        name = Path(os.path.abspath(path)).parent.name if path.name == "config.json" else path.stem
        return read(name if name and path.is_file() else str(path), raw)
    except RecursionError:
        raise LayoutError(f"config '{path}': is nested too deep for a config.json; give another file") from None
    except OSError as error:
        where = error.filename or path
        raise LayoutError(f"config '{where}': cannot be read ({error.strerror}); check the path") from error


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        content = file.read(MAX_CONFIG_BYTES + 1)
    if len(content) > MAX_CONFIG_BYTES:
        raise LayoutError(f"config '{path}': more than {MAX_CONFIG_BYTES} bytes are no config.json; give another path")
    return _parse(str(path), content)


def _unknown(what: str, model: str, path: Path) -> LayoutError:
    """The error for a model, or a draft, that is nowhere. Of `organisation/name`, as hubs write it, the name is compared."""
    if not model:
        return LayoutError(
            f"the {what}'s name is empty; give an id or the path of a config.json, and check whether a shell variable is unset"
        )
    name = model.rstrip("/").rpartition("/")[2].casefold()
    near = difflib.get_close_matches(name, MODELS, 1, 0.5)
    text = f"{what} '{escaped(model, MAX_SHOWN)}' is not known, nor is there a file '{escaped(path, MAX_SHOWN)}'"
    if near:
        return LayoutError(
            f"{text}; did you mean '{near[0]}'? `kvreshard models` lists all; for others give the path of a config.json"
        )
    return LayoutError(f"{text}; give the path of a config.json, or one of {', '.join(MODELS)}")


def _packaged(name: str) -> dict[str, Any]:
    return _parse(name, (CONFIGS / name).read_bytes())


def _parse(name: str, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise LayoutError(f"config '{name}': is not JSON ({error}); give a model's config.json") from error
    if not isinstance(found, dict):
        raise LayoutError(
            f"config '{name}': holds {JSON_NAMES[type(found)]}; it must be a JSON object with named fields"
        )
    return found


MODELS: Mapping[str, Entry] = {
    name: Entry(name, known["model"], tuple(known["sources"]), known["unconfirmed"], tuple(known.get("notes", ())))
    for name, known in _packaged("SOURCES.json").items()
}
"""Every model of the catalog, by id."""
