"""`kvreshard models`: the models of the catalog, the sizes of their caches, and the sources of the numbers.

Sizes are those of the whole model in its own dtype: bytes per token over all caches, a draft's too; and bytes per request that do not grow
with it, of states and of full windows. One model, an id or the path of a `config.json`, is shown with all details, and with the warnings of
`plan`. Where the file does not decide the dtype of the caches, sizes are those of bfloat16, and a note says so.
"""

from __future__ import annotations

import sys
from collections import Counter
from fractions import Fraction
from math import prod
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column

from kvreshard.catalog import MODELS, EngineSpec, load
from kvreshard.catalog import describe as describe_engine
from kvreshard.catalog.config import FLAT
from kvreshard.catalog.entries import geometry
from kvreshard.catalog.families import FAMILIES
from kvreshard.catalog.layers import ModelLayer
from kvreshard.catalog.spec import MAX_SHOWN
from kvreshard.cli.inputs import AsJson, complete_model, judge, warn
from kvreshard.cli.output import bytes_text, number, number_column, show_table, write_json
from kvreshard.model.text import escaped

ASSUMED_DTYPE = "bfloat16"
ASSUMED = f"sizes are those of caches in {ASSUMED_DTYPE}, which is assumed"


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show all of this one: id of the catalog, or path of a config.json.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None,
    types: Annotated[bool, typer.Option("--types", help="List the model types that a config.json may have.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the models that the catalog knows, or show one of them."""
    if types:
        if model is not None:
            raise typer.BadParameter(f"--types lists all model types; leave '{escaped(model, 100)}' or --types out")
        list_types(as_json)
        return
    documents = [read_model(name) for name in ([model] if model is not None else MODELS)]
    warn(tuple(found for document in documents for found in document["warnings"]) if model is not None else ())
    if as_json:
        write_json(documents)
    elif model is None:
        show_models(Console(), documents)
    else:
        show_model(Console(), documents[0])


def list_types(as_json: bool) -> None:
    """The model types that have rules of their own."""
    known = sorted({*FLAT, *(name for name, row in FAMILIES.items() if row.layers is not None)})
    if as_json:
        write_json(known)
    else:
        sys.stdout.write("".join(f"{name}\n" for name in known))


def read_model(name: str) -> dict[str, Any]:
    """The document of one model, measured on an engine of one rank. Raises LayoutError."""
    model, entry = load(name), MODELS.get(name)
    per_token, in_windows, in_states = Fraction(0), Fraction(0), 0
    undecided = next((layer.undecided for layer in model.layers if layer.undecided), "")
    spec = EngineSpec(dtype=ASSUMED_DTYPE) if undecided else EngineSpec()
    layout = describe_engine(model, spec, "engine")
    windows = {group.name: group.window_tokens for group in layout.groups}
    group_of = {shard.field: shard.geometry.group for rank in layout.ranks for shard in rank.shards}
    for field in layout.fields:
        window = windows[group_of[field.name]]
        num_bytes = prod(axis.extent for axis in field.axes if axis.extent is not None) * field.element_bytes
        if field.sequence is None:
            in_states += num_bytes
        elif window is None:
            per_token += Fraction(num_bytes, field.sequence.tokens_per_index)
        else:
            in_windows += Fraction(num_bytes * window, field.sequence.tokens_per_index)
    layers = Counter(f"{_role(layer)}{layer.family}" for layer in model.layers)
    notes = [*(entry.notes if entry else ()), *([f"{ASSUMED}: {undecided}"] if undecided else ())]
    if any(layer.predicts for layer in model.layers):
        notes.append("sizes are without the MTP layers, which have caches in an engine with spec=1 or more")
    return {
        "id": name,
        "model": model.name if entry is None else entry.model,
        "model_type": model.model_type,
        "layers": ", ".join(f"{count} {what}" for what, count in layers.items()),
        "caches": geometry(model),
        "bytes_per_token": number(per_token),
        "window_bytes_per_request": round(in_windows),
        "state_bytes_per_request": in_states,
        "sources": list(entry.sources) if entry else [],
        "unconfirmed": dict(entry.unconfirmed) if entry else {},
        "notes": notes,
        "warnings": list(judge(model, spec, escaped(name, MAX_SHOWN))),
    }


def show_models(console: Console, documents: list[dict[str, Any]]) -> None:
    """A line per model, in 80 columns."""
    columns = Column("model", no_wrap=True), Column("layers"), number_column("per token"), number_column("per request")
    cells = [
        (
            f"{found['id']} ?" if found["unconfirmed"] else found["id"],
            _shorten(found["layers"]),
            bytes_text(Fraction(found["bytes_per_token"])),
            _size(found["window_bytes_per_request"] + found["state_bytes_per_request"]),
        )
        for found in documents
    ]
    notes = (
        "?: not all of its config.json could be confirmed; (+ MTP): not in the sizes",
        "Details of a model: kvreshard models MODEL",
    )
    show_table(console, "", columns, cells, notes)


def show_model(console: Console, found: dict[str, Any]) -> None:
    """All details of one model."""
    cells = [
        ("model type", found["model_type"]),
        *(("caches", text) for text in found["caches"].split("; ")),
        ("per token", bytes_text(Fraction(found["bytes_per_token"]))),
        ("windows, full", _size(found["window_bytes_per_request"])),
        ("states", _size(found["state_bytes_per_request"])),
        *(("source", source) for source in found["sources"]),
        *((f"unsure: {name}", why) for name, why in found["unconfirmed"].items()),
        *(("note", note) for note in found["notes"]),
    ]
    title = f"{found['id']}: {found['model']}" if found["id"] in MODELS else found["id"]
    show_table(console, title, (Column("what"), Column("value")), cells)


def _size(num_bytes: int) -> str:
    return bytes_text(num_bytes) if num_bytes else "-"


def _role(layer: ModelLayer) -> str:
    """Before the family of a layer that is none of the decoder's: of its prediction layers, or of a draft model."""
    return "MTP " if layer.predicts else "draft " if layer.optional else ""


def _shorten(layers: str) -> str:
    """Caches per family without those of a draft. Prediction layers are not in the sizes beside it, a draft model is.

    >>> _shorten("25 window, 5 full, 1 draft full"), _shorten("61 latent, 1 MTP latent")
    ('25 window, 5 full + draft', '61 latent (+ MTP)')
    """
    main = [count for count in layers.split(", ") if "draft " not in count and "MTP " not in count]
    return ", ".join(main) + (" + draft" if "draft " in layers else "") + (" (+ MTP)" if "MTP " in layers else "")
