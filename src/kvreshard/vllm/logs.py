"""How do this package's log lines get into vLLM's log?

vLLM configures a logger named `vllm` and nothing else, so that lines of other packages below WARNING are lost. Ours go to
the same handlers, at the same level.
"""

from __future__ import annotations

import logging


def join_vllm_log() -> None:
    """Once per process; a program that has configured `kvreshard` itself is left alone."""
    ours, theirs = logging.getLogger("kvreshard"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.setLevel(theirs.getEffectiveLevel())
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = not theirs.handlers
