"""What does the doctor say about one thing, and how is every check kept from hanging or failing loudly?

A check is a function that gives lines. `bounded` runs it on a thread of its own: one that does not finish in time, or fails in a
way that nobody foresaw, is a line of its own, never a traceback.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True, slots=True)
class Line:
    """`remedy`: what to do, empty where nothing needs to be done."""

    check: str
    status: Status
    text: str
    remedy: str = ""


Check = Callable[[], Iterable[Line]]


def bounded(name: str, check: Check, timeout_s: float) -> list[Line]:
    """The lines of a check, or one that says that it has not finished, or how it failed."""
    done: queue.SimpleQueue[list[Line]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(list(check()))
        except Exception as error:  # noqa: BLE001  a check that fails is a finding
            done.put([Line(name, "error", f"{type(error).__name__}: {error}", "report this, with the line")])

    threading.Thread(target=run, name=f"doctor-{name}", daemon=True).start()
    try:
        return done.get(timeout=timeout_s)
    except queue.Empty:
        return [Line(name, "error", f"not finished within {timeout_s:g} s", "try it alone; something does not answer")]
