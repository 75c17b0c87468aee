"""How much does Python do in a call? Counted in bytecodes, so that no clock and no other process has a say.

A test that a cost does not grow compares the count among few with the count among many. What is done in C by one bytecode (a look into a
dictionary, a push onto a heap) counts as one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_bytecodes(call: Callable[[], object]) -> int:
    """The bytecodes of a call and of what it calls, on this thread."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(former)
    return count
