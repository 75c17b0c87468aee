"""`kvreshard describe`: an engine's layout, as the JSON that travels between engines (`docs/wire.md`).

Region addresses are made up, one gibibyte-aligned place per rank: an engine puts its real ones there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvreshard.catalog import EngineSpec, load, parse_engine
from kvreshard.cli.inputs import Draft, Pages, describe_engine, engine_option, model_option, warn, write_whole
from kvreshard.cli.output import bytes_text, write_encoded, write_json
from kvreshard.model import KvReshardError, wire
from kvreshard.model.text import counted

USUAL_ENGINE = parse_engine("tp=1")


def describe(
    model: Annotated[str, model_option()],
    engine: Annotated[
        EngineSpec, engine_option("--engine", "Engine, as in tp=4,pp=2,page=16,order=HND.")
    ] = USUAL_ENGINE,
    name: Annotated[str, typer.Option(help="What messages call this engine.")] = "engine",
    draft: Draft = None,
    pages: Pages = None,
    output: Annotated[Path | None, typer.Option(help="File to write; stdout if none is given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The default; with --output, a summary as JSON.")] = False,
) -> None:
    """Write an engine's layout as JSON: every address follows from it and from a block table."""
    described = describe_engine(load(model, draft), engine, name, pages)
    layout = described.layout
    warn(described.warnings)
    content = wire.encode(layout, "json") + b"\n"
    try:
        wire.decode(content, "json")
    except KvReshardError as error:
        raise type(error)(
            f"engine '{name}': no engine and no command would read this layout: {error}; nothing was written"
        ) from None
    if output is None:
        write_encoded(content)
        return
    if write_whole(output, content):
        return
    sizes = {"ranks": len(layout.ranks), "fields": len(layout.fields), "groups": len(layout.groups)}
    if as_json:
        about = {"output": str(output), "bytes": len(content), "engine": layout.engine}
        write_json({**about, **sizes, "warnings": described.warnings})
    else:
        counts = ", ".join(counted(count, what.removesuffix("s")) for what, count in sizes.items())
        sys.stdout.write(f"{output}: engine '{layout.engine}', {counts}, {bytes_text(len(content))}\n")
