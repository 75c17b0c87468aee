"""The command line (`app`), the only room that prints."""

import io
import os
import signal
import sys

__all__ = ["main"]


def main() -> None:
    """The console script."""
    # The imports below take half a second, and may turn a KeyboardInterrupt into any other error. So an interrupt ends the process at once;
    # it holds nothing yet.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _stop)
    from kvreshard.cli.app import app

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A path of this machine, or a text of a file, may have what no encoding writes. In JSON such an escape is the character itself.
        sys.stdout.reconfigure(errors="backslashreplace")
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:
            # A second interrupt must not change the message.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


def _stop(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)
