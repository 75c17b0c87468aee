"""What is said when a result cannot be written: the reader of a pipe went away, the disk is full, stdout is closed?

1. Everything that prints runs inside `writing`: what the system says about stdout becomes `PipeClosedError` or `OutputError`.
2. After either, `forget` drops what is still in Python's buffer, which would be tried again at exit, and complained about.

An error about a file that has a name is not stdout's and passes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import TextIO

from kvreshard.model import KvReshardError

# What write(2) says of a file, a disk or a terminal that takes no more.
_REFUSES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EINVAL, errno.EAGAIN})


class OutputError(KvReshardError):
    """Stdout takes no more, or is closed."""


class PipeClosedError(Exception):
    """The reader of stdout went away. Typer has an exit code of its own for a BrokenPipeError, so it never sees one."""


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """What prints; flushed at the end. Raises PipeClosedError or OutputError."""
    if sys.stdout is None:  # what Python makes of a closed one
        raise OutputError("stdout is closed: there is no place for the result; > /dev/null drops it")
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise PipeClosedError from None
    except SystemExit as stop:
        # Rich, which writes the help, ends the process with 1 in its place.
        if isinstance(stop.__context__, BrokenPipeError):
            raise PipeClosedError from None
        raise
    except OSError as error:
        if error.filename is not None or error.errno not in _REFUSES:
            raise
        raise OutputError(f"stdout cannot be written: {error.strerror}; give the result another place") from None


def forget(stream: TextIO) -> None:
    """Drop what a stream has not taken."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def tell(text: str) -> None:
    """A line on stderr, if there is one to be had: nothing can be said about a stderr that takes nothing."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    except OSError:
        forget(sys.stderr)
