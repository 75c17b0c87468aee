"""What went wrong, according to an engine's log?

vLLM writes tracebacks line by line behind a prefix. Each is reduced to its last frame, that frame's source line and the
exception, so that "AssertionError" alone becomes a sentence.
"""

from __future__ import annotations

import re
from pathlib import Path

PREFIX = re.compile(r"^\((?P<process>[^)]*) pid=\d+\) (?:ERROR|WARNING|CRITICAL) [\d-]+ [\d:]+ \[[^\]]+\] ?")
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')
RAISED = re.compile(r"^(?P<kind>(?:\w+\.)*\w*(?:Error|Exception|Interrupt|Refused|Mismatch))(?:: (?P<message>.*))?$")
CARETS = re.compile(r"^[\s^~]+$")
# What only repeats that another process failed.
ECHOES = (
    "EngineDeadError",
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "Worker failed with error",
)


def size(log: Path) -> int:
    """How long the log is now, for `errors` that come after."""
    return log.stat().st_size if log.exists() else 0


def errors(log: Path, start: int = 0) -> list[str]:
    """Distinct exceptions after byte `start`, in the order in which they first appear, without those that only pass another on."""
    found: dict[str, None] = {}
    frame, source = "", ""
    for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if log.exists() else []:
        text = PREFIX.sub("", line)
        if match := FRAME.match(text):
            frame, source = f"{Path(match['file']).name}:{match['line']} {match['function']}", ""
        elif match := RAISED.match(text.strip()):
            message = (match["message"] or source).strip()
            if not any(echo in f"{match['kind']} {message}" for echo in ECHOES):
                found.setdefault(f"{match['kind'].rpartition('.')[2]}: {message or '(no message)'} [{frame}]")
        elif text.strip() and not CARETS.match(text) and frame and not source:
            source = text.strip()
    return list(found)
