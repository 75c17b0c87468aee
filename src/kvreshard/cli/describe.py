"""`kvreshard describe`: what an engine has, as the JSON that travels between engines (`docs/wire.md`).

Region addresses are made up, one gibibyte-aligned place per rank: an engine puts its real ones there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvreshard.cli.inputs import describe_engine, warn, write_whole
from kvreshard.cli.terminal import bytes_text, write_json
from kvreshard.model import wire
from kvreshard.model.text import counted


def describe(
    model: Annotated[str, typer.Option(help="Id of the catalog, or path of a config.json.", show_default=False)],
    engine: Annotated[str, typer.Option(help="Engine, as in tp=4,pp=2,page=16,order=HND.")] = "tp=1",
    name: Annotated[str, typer.Option(help="What messages call this engine.")] = "engine",
    draft: Annotated[str | None, typer.Option(help="Model of a draft whose caches come behind: id or path.")] = None,
    pages: Annotated[int | None, typer.Option(min=1, help="Pages of each pool.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write; stdout if none is given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The default; with --output, a summary as JSON.")] = False,
) -> None:
    """Write an engine's layout as JSON: every address follows from it and from a block table."""
    described = describe_engine(model, engine, name, pages, draft)
    layout = described.layout
    warn(described.warnings)
    content = wire.encode(layout, "json") + b"\n"
    if output is None:
        sys.stdout.write(content.decode())
        return
    write_whole(output, content)
    sizes = {"ranks": len(layout.ranks), "fields": len(layout.fields), "groups": len(layout.groups)}
    if as_json:
        write_json(
            {
                "output": str(output),
                "bytes": len(content),
                "engine": layout.engine,
                **sizes,
                "warnings": described.warnings,
            }
        )
    else:
        counts = ", ".join(counted(count, what.removesuffix("s")) for what, count in sizes.items())
        sys.stdout.write(f"{output}: engine '{layout.engine}', {counts}, {bytes_text(len(content))}\n")
