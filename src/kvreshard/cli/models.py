"""`kvreshard models`: which models the catalog knows, how large their caches are, and where the numbers come from.

Sizes are those of the whole model in its own dtype, over all its caches, a draft's too: bytes of K, V, latents and the like per
token, and bytes of states per request. Windows keep their last tokens only, so theirs are counted apart, full, per request.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import Annotated, Any

import typer
from rich.console import Console

from kvreshard.catalog import MODELS, EngineSpec, Entry, Model
from kvreshard.catalog import describe as describe_engine
from kvreshard.catalog.entries import geometry
from kvreshard.cli.terminal import Column, Sheet, bytes_text, number, show_line, show_sheet, write_json

# Below, the shapes of the caches, which count the layers too, take the place of their number alone.
WIDE = 140


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model with its sizes."""

    entry: Entry
    model_type: str
    layers: str
    geometry: str
    bytes_per_token: Fraction
    window_bytes: int
    state_bytes: int


def models(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """List the models that the catalog knows."""
    rows = [read_row(entry) for entry in MODELS.values()]
    if as_json:
        write_json([_document(row) for row in rows])
        return
    console = Console()
    show_sheet(console, models_sheet(rows, with_layers=not console.is_terminal or console.width >= WIDE))
    show_line(
        console,
        "unsure: fields of the config.json that could not be confirmed; reasons and sources: kvreshard models --json",
    )


def read_row(entry: Entry) -> ModelRow:
    """An entry's model, measured on an engine of one rank."""
    model = entry.load()
    per_token, in_windows, per_request = Fraction(0), Fraction(0), 0
    layout = describe_engine(model, EngineSpec(), entry.id)
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
    return ModelRow(entry, model.model_type, _layers(model), geometry(model), per_token, round(in_windows), per_request)


def models_sheet(rows: list[ModelRow], with_layers: bool = True) -> Sheet:
    """The catalog as a table; `with_layers`: with how many layers of what family there are, apart from the shapes of their caches."""
    columns = {
        Column("id", whole=True): [row.entry.id for row in rows],
        Column("layers"): [row.layers for row in rows],
        Column("per token", right=True): [bytes_text(row.bytes_per_token) for row in rows],
        Column("windows", right=True): [bytes_text(row.window_bytes) if row.window_bytes else "-" for row in rows],
        Column("states", right=True): [bytes_text(row.state_bytes) if row.state_bytes else "-" for row in rows],
        Column("sources"): [_sources(row.entry) for row in rows],
        Column("caches"): [row.geometry for row in rows],
    }
    shown = {column: cells for column, cells in columns.items() if with_layers or column.name != "layers"}
    return Sheet(f"{len(rows)} models", tuple(shown), tuple(zip(*shown.values(), strict=True)))


def _sources(entry: Entry) -> str:
    return f"{len(entry.sources)}{f', {len(entry.unconfirmed)} unsure' if entry.unconfirmed else ''}"


def _layers(model: Model) -> str:
    """How many caches of what family, drafts apart: `25 window, 5 full`."""
    counts = Counter(f"{'draft ' if layer.optional else ''}{layer.family}" for layer in model.layers)
    return ", ".join(f"{count} {what}" for what, count in counts.items())


def _document(row: ModelRow) -> dict[str, Any]:
    return {
        "id": row.entry.id,
        "model": row.entry.model,
        "model_type": row.model_type,
        "layers": row.layers,
        "caches": row.geometry,
        "bytes_per_token": number(row.bytes_per_token),
        "window_bytes_per_request": row.window_bytes,
        "state_bytes_per_request": row.state_bytes,
        "sources": list(row.entry.sources),
        "unconfirmed": dict(row.entry.unconfirmed),
        "notes": list(row.entry.notes),
    }
