"""The commands, and the only room that prints: see `app`."""

import os
import signal

__all__ = ["main"]


def main() -> None:
    """The console script."""
    # Half a second of imports lies between this line and the first that can say "interrupted" itself. A raised KeyboardInterrupt
    # may come out of an import as anything; nothing is held yet, so the process can end where it is.
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, _stop)
    from kvreshard.cli.app import app

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        app()
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:
            # The second one of an impatient person must not change what was told.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


def _stop(*_: object) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + signal.SIGINT)
