"""`kvreshard keys`: makes the key pair with which engines encrypt their handshakes and authenticate one another.

The simplest fleet has one pair, whose secret file every engine has. With a pair per engine, and the public files of all in one directory, a
single engine can be taken out. What keys protect and what they do not is in SECURITY.md.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvreshard.cli.inputs import AsJson
from kvreshard.cli.output import write_json
from kvreshard.model import KvReshardError


def keys(
    directory: Annotated[
        str, typer.Argument(help="Where to write NAME.key and NAME.key_secret; made if it is not there.")
    ],
    name: Annotated[str, typer.Option(help="Name of the two files.")] = "kvreshard",
    as_json: AsJson = False,
) -> None:
    """Make a key pair for the handshakes between engines."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise KvReshardError(f"{name!r} is no name for key files; use letters, digits, '.', '_' and '-'")
    if not directory:
        raise KvReshardError(
            "the directory is empty; name one, or . for the current one, and check whether a shell variable is unset"
        )
    from kvreshard.session.keys import write_keys

    public_file, secret_file = write_keys(Path(directory), name)
    if as_json:
        write_json({"public_key_file": str(public_file), "secret_key_file": str(secret_file)})
        return
    sys.stdout.write(
        f"{secret_file}: for engines only (curve_secret_key_file)\n"
        f"{public_file}: for the engines that should trust this one (curve_public_keys_dir)\n"
    )
