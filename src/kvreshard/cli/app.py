"""The command line: which commands there are, and how every failure is told.

Exit codes: 0 done, 1 a verification found something wrong or a replay differs, or the doctor an error, 2 bad input or a refusal, 130 interrupted, 141 the reader of a
pipe went away. A failure is one line `error: ...` on stderr, never a traceback; with `--json`, stdout has
`{"error": {"type": ..., "message": ...}}` as its one document. A bug in kvreshard itself still shows its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from kvreshard import __version__
from kvreshard.cli.bench import bench
from kvreshard.cli.describe import describe
from kvreshard.cli.doctor import doctor
from kvreshard.cli.keys import keys
from kvreshard.cli.models import models
from kvreshard.cli.plan import plan
from kvreshard.cli.replay import replay_file
from kvreshard.cli.terminal import write_json
from kvreshard.cli.verify import verify
from kvreshard.model import KvReshardError
from kvreshard.transport.base import TransportError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

# What the parser raises has moved between packages over Typer's releases; its base class is found from a public one.
_PARSER_ERROR = next(
    c for c in reversed(typer.BadParameter.__mro__) if c is not Exception and "format_message" in vars(c)
)


class _PipeClosedError(Exception):
    """The reader of stdout went away. Typer has an exit code of its own for a BrokenPipeError, so it never sees one."""


class Commands(TyperGroup):
    """A group whose failures are told as the module says, however it is started."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            raise _PipeClosedError from None
        return result

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        options["standalone_mode"] = False
        code = _run(lambda: super(Commands, self).main(words or ["--help"], *more, **options), "--json" in words)
        sys.exit(code)


def _run(command: Any, as_json: bool) -> int:
    """Run a command, tell its failure; returns the exit code."""
    try:
        code = command()
    except (KvReshardError, TransportError) as error:
        return _fail(type(error).__name__, str(error), as_json)
    except _PipeClosedError:
        # Python flushes stdout at exit and would complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except Exception as error:
        if not isinstance(error, _PARSER_ERROR):
            raise
        # Chosen above for having this method; the class has no name that a type checker could know.
        return _fail("UsageError", str(cast(Any, error).format_message()), as_json)
    if code == EXIT_INTERRUPTED:  # newer releases of Typer catch the interrupt and return this
        sys.stderr.write("interrupted\n")
    return code if isinstance(code, int) else 0


def _fail(kind: str, message: str, as_json: bool) -> int:
    if as_json:
        write_json({"error": {"type": kind, "message": message}})
        sys.stdout.flush()
    sys.stderr.write(f"error: {message}\n")
    return EXIT_REFUSED


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"kvreshard {__version__}\n")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Move a KV cache between two inference engines of any layout: planned, proved, then moved."""


app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
app.callback()(_options)
for command in (verify, plan, describe, models, doctor, keys, bench):
    app.command()(command)
app.command("replay")(replay_file)
