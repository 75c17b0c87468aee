"""The command line: its commands, and the report of every failure.

Exit codes: 0 done; 1 a verification found something wrong, a replay differs, the doctor found an error, or `top` reached no engine; 2 bad
input, a refusal or a stdout that cannot be written; 130 interrupted; 141 the reader of a pipe went away. A failure is one line `error: ...`
on stderr (wrapped at words in a terminal), never a traceback; with `--json`, stdout has `{"error": {"type": ..., "message": ...}}` as its
one document. What vLLM would not run is a line `warning: ...` on stderr, and changes no exit code. A bug in kvreshard itself shows its
traceback.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup

from kvreshard import __version__
from kvreshard.catalog.spec import MAX_SHOWN, engine_keys
from kvreshard.cli.bench import bench
from kvreshard.cli.describe import describe
from kvreshard.cli.doctor import doctor
from kvreshard.cli.keys import keys
from kvreshard.cli.models import models
from kvreshard.cli.output import (
    OutputError,
    PipeClosedError,
    escape_unencodable,
    forget,
    ignore_no_width,
    tell,
    write_json,
    writing,
)
from kvreshard.cli.plan import plan
from kvreshard.cli.replay import replay_file
from kvreshard.cli.top import top
from kvreshard.cli.verify import verify
from kvreshard.model import KvReshardError
from kvreshard.model.text import escaped
from kvreshard.transport.base import TransportError

EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

ENGINES = (
    f"An engine is written key=value,key=value with the keys {', '.join(engine_keys())}: see docs/howto/engines.md."
)

# What the parser raises has moved between packages over Typer's releases; its base class is found from a public one.
_PARSER_ERROR = next(
    c for c in reversed(typer.BadParameter.__mro__) if c is not Exception and "format_message" in vars(c)
)


def _without_bool(params: list[Any]) -> list[Any]:
    """The options for the help, flags without the type that Typer writes."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows no type for flags."""

    def get_params(self, ctx: Any) -> Any:
        return _without_bool(super().get_params(ctx))


class Commands(TyperGroup):
    """A group that reports failures as the module says, however it is started."""

    def get_params(self, ctx: Any) -> Any:
        return _without_bool(super().get_params(ctx))

    def make_context(self, *words: Any, **more: Any) -> Any:
        with writing():  # the help
            return super().make_context(*words, **more)

    def invoke(self, ctx: Any) -> Any:
        with writing():
            return super().invoke(ctx)

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        escape_unencodable()
        ignore_no_width()
        words = list(sys.argv[1:] if args is None else args)
        options["standalone_mode"] = False
        options["prog_name"] = (
            options.get("prog_name") or "kvreshard"
        )  # also as `python -m kvreshard`: completion asks for it
        as_json = any(word.partition("=")[0] == "--json" for word in words)
        code = _run(lambda: super(Commands, self).main(words or ["--help"], *more, **options), as_json)
        sys.exit(code)


def _run(command: Any, as_json: bool) -> int:
    """Run a command and report its failure; returns the exit code."""
    try:
        try:
            with writing():
                code = command()
        except OutputError:
            raise
        except (KvReshardError, TransportError) as error:
            return _fail(type(error).__name__, str(error), as_json)
        except Exception as error:
            if not isinstance(error, _PARSER_ERROR):
                raise
            return _fail("UsageError", _usage_text(error), as_json)
    except OutputError as error:
        if sys.stdout is not None:
            forget(sys.stdout)
        tell(f"error: {error}")
        return EXIT_REFUSED
    except PipeClosedError:
        forget(sys.stdout)
        return EXIT_PIPE_CLOSED
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:  # newer releases of Typer catch the interrupt and return this
        # A second interrupt must not change the message; the process is about to end.
        with contextlib.suppress(ValueError):  # not on the main thread, where none arrives
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell("interrupted")
    return code if isinstance(code, int) else 0


def _usage_text(error: Exception) -> str:
    """The parser's message, with the refused value; in newer releases of Typer the value is in a cause of Pydantic's."""
    # Chosen above for having this method; the class has no name that a type checker could know.
    text = str(cast(Any, error).format_message())
    cause: Any = error.__cause__
    for found in cause.errors()[:1] if hasattr(cause, "errors") else ():
        value = f"'{escaped(found['input'], MAX_SHOWN)}'"
        text = text if value in text else f"{text.rstrip('.')}, not {value}"
    return text


def _fail(kind: str, message: str, as_json: bool) -> int:
    message = escaped(message)  # it may quote input, and a terminal obeys control characters
    if as_json:
        with writing():
            write_json({"error": {"type": kind, "message": message}})
    tell(f"error: {message}")
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


app = typer.Typer(
    cls=Commands, pretty_exceptions_enable=False, context_settings={"help_option_names": ["-h", "--help"]}
)
app.callback()(_options)
for command in (verify, plan, describe, models, doctor, keys, bench, top):
    app.command(cls=Command, epilog=ENGINES if command in (verify, plan, describe) else None)(command)
app.command("replay", cls=Command)(replay_file)
