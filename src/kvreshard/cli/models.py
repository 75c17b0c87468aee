"""`kvreshard models`: the models of the catalog, the sizes of their caches, and the sources of the numbers.

Sizes are those of the whole model in its own dtype: bytes per token over all caches, a draft's too; and bytes per request that do not grow
with it, of states and of full windows. One model, an id or the path of a `config.json`, is shown with all details.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column

from kvreshard.catalog import MODELS, EngineSpec, Entry, Model, load
from kvreshard.catalog import describe as describe_engine
from kvreshard.catalog.entries import geometry
from kvreshard.cli.inputs import AsJson, complete_model
from kvreshard.cli.output import bytes_text, number, number_column, show_table, write_json


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model with its sizes. `entry`: its sources in the catalog, None for a file."""

    name: str
    entry: Entry | None
    model: Model
    bytes_per_token: Fraction
    window_bytes: int
    state_bytes: int


def models(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Show all of this one: id of the catalog, or path of a config.json.",
            show_default=False,
            autocompletion=complete_model,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the models that the catalog knows, or show one of them."""
    rows = [read_row(name) for name in ([model] if model is not None else MODELS)]
    if as_json:
        write_json([_document(row) for row in rows])
    elif model is None:
        show_models(Console(), rows)
    else:
        show_model(Console(), rows[0])


def read_row(name: str) -> ModelRow:
    """A model, measured on an engine of one rank. Raises LayoutError."""
    model = load(name)
    per_token, in_windows, per_request = Fraction(0), Fraction(0), 0
    layout = describe_engine(model, EngineSpec(), "engine")
    windows = {group.name: group.window_tokens for group in layout.groups}
    group_of = {shard.field: shard.geometry.group for rank in layout.ranks for shard in rank.shards}
    for field in layout.fields:
        window = windows[group_of[field.name]]
        num_bytes = prod(axis.extent for axis in field.axes if axis.extent is not None) * field.element_bytes
        if field.sequence is None:
            per_request += num_bytes
        elif window is None:
            per_token += Fraction(num_bytes, field.sequence.tokens_per_index)
        else:
            in_windows += Fraction(num_bytes * window, field.sequence.tokens_per_index)
    return ModelRow(name, MODELS.get(name), model, per_token, round(in_windows), per_request)


def show_models(console: Console, rows: list[ModelRow]) -> None:
    """A line per model, in 80 columns."""
    columns = (
        Column("model", no_wrap=True),
        Column("layers"),
        number_column("per token"),
        number_column("per request"),
    )
    cells = [
        (
            f"{row.name} ?" if row.entry and row.entry.unconfirmed else row.name,
            _layers(row.model),
            bytes_text(row.bytes_per_token),
            _size(row.window_bytes + row.state_bytes),
        )
        for row in rows
    ]
    notes = ("?: not all of its config.json could be confirmed. Details of a model: kvreshard models MODEL",)
    show_table(console, "", columns, cells, notes)


def show_model(console: Console, row: ModelRow) -> None:
    """All details of one model."""
    cells = [
        ("model type", row.model.model_type),
        *(("caches", text) for text in geometry(row.model).split("; ")),
        ("per token", bytes_text(row.bytes_per_token)),
        ("windows, full", _size(row.window_bytes)),
        ("states", _size(row.state_bytes)),
    ]
    if row.entry is not None:
        cells += [("source", source) for source in row.entry.sources]
        cells += [(f"unsure: {name}", why) for name, why in row.entry.unconfirmed.items()]
        cells += [("note", note) for note in row.entry.notes]
    title = row.name if row.entry is None else f"{row.name}: {row.entry.model}"
    show_table(console, title, (Column("what"), Column("value")), cells)


def _size(num_bytes: int) -> str:
    return bytes_text(num_bytes) if num_bytes else "-"


def _layers(model: Model) -> str:
    """Caches per family: `25 window, 5 full`; those of a draft are not counted."""
    counts = Counter(layer.family for layer in model.layers if not layer.optional)
    has_draft = any(layer.optional for layer in model.layers)
    return ", ".join(f"{count} {family}" for family, count in counts.items()) + (" + draft" if has_draft else "")


def _document(row: ModelRow) -> dict[str, Any]:
    entry = row.entry
    layers = Counter(f"{'draft ' if layer.optional else ''}{layer.family}" for layer in row.model.layers)
    return {
        "id": row.name,
        "model": row.model.name if entry is None else entry.model,
        "model_type": row.model.model_type,
        "layers": ", ".join(f"{count} {what}" for what, count in layers.items()),
        "caches": geometry(row.model),
        "bytes_per_token": number(row.bytes_per_token),
        "window_bytes_per_request": row.window_bytes,
        "state_bytes_per_request": row.state_bytes,
        "sources": list(entry.sources) if entry else [],
        "unconfirmed": dict(entry.unconfirmed) if entry else {},
        "notes": list(entry.notes) if entry else [],
    }
