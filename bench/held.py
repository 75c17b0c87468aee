"""A NIXL agent whose transfers are made and not started: what is measured of a preparation.

Both sides have one of these around their agent. Its calls are looked up once, so that going through it costs neither side anything.
"""

from __future__ import annotations

from typing import Any

# Those that a preparation makes; others are looked up when they are asked for.
CALLS = ("get_xfer_descs", "initialize_xfer", "make_prepped_xfer", "prep_xfer_dlist")


class Held:
    """An agent that keeps `transfer` back; `handles` has what would have been started."""

    def __init__(self, agent: Any) -> None:
        self.handles: list[Any] = []
        self.agent = agent
        for name in CALLS:
            setattr(self, name, getattr(agent, name))

    def transfer(self, handle: Any) -> str:
        self.handles.append(handle)
        return "PROC"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)
