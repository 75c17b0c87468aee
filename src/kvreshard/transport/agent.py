"""What does the thread that talks to NIXL need of it, and of what it is given to post?

Narrow protocols, so that `owner` runs in tests without NIXL; `nixl_agent` and `slices` or `frames` carry them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvreshard.transport.base import Direction, MemoryRegion
from kvreshard.transport.frames import FrameSlice
from kvreshard.transport.slices import Slice


class Agent(Protocol):
    """What the owner needs of NIXL. Every call is made on the owner's thread; every failure is a `TransportError`."""

    def register(self, regions: Sequence[MemoryRegion]) -> None: ...
    def deregister(self, regions: Sequence[MemoryRegion]) -> None: ...
    def metadata(self) -> bytes: ...
    def add_peer(self, name: str, native: bytes) -> None: ...
    def remove_peer(self, name: str) -> None: ...
    def start(self, peer: str, direction: Direction, piece: Slice | FrameSlice) -> object | None:
        """Post a slice. None: it has settled already. Raises when it could not be posted as a whole."""

    def is_done(self, handle: object) -> bool:
        """Whether a slice has arrived. Raises when it failed."""

    def release(self, handle: object) -> None: ...
    def send(self, peer: str, payload: bytes) -> None: ...
    def receive(self) -> list[tuple[str, bytes]]: ...
    def close(self) -> None: ...


class Cursor(Protocol):
    """What is left to post of a transfer, handed out slice by slice."""

    @property
    def exhausted(self) -> bool: ...
    def drop(self) -> None: ...
    def take(self, budget_bytes: int) -> Slice | FrameSlice:
        """The next pieces, at least one, whose cost together stays within the budget. Not when exhausted."""
