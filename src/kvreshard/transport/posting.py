"""Whose slice is posted next? Queues per peer, so that no choice costs more where more transfers wait.

1. A peer has its turn while its window is open and something of a transfer with it is left to post. The peers take turns.
2. The transfers with one peer take turns too.
3. A peer whose window is full comes back when a slice of it has settled (`reopen`).
"""

from __future__ import annotations

from collections import OrderedDict, deque

from kvreshard.transport.sliced import SlicedTransfer
from kvreshard.transport.window import Windows


class Posting:
    """What is left to post, in turns. Not thread-safe."""

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._of_peer: dict[str, deque[SlicedTransfer]] = {}
        self._turns: OrderedDict[str, None] = OrderedDict()

    def add(self, sliced: SlicedTransfer) -> None:
        """A transfer is to be posted."""
        self._of_peer.setdefault(sliced.peer, deque()).append(sliced)
        self.reopen(sliced.peer)

    def reopen(self, peer: str) -> None:
        """A peer's window may have become open."""
        if peer in self._of_peer and self._windows.is_open(peer):
            self._turns.setdefault(peer)

    def next(self) -> SlicedTransfer | None:
        """The transfer whose turn it is; it stays, behind the others. None: nothing may be posted now."""
        while self._turns:
            peer, _ = self._turns.popitem(last=False)
            waiting = self._of_peer[peer]
            while waiting and waiting[0].cursor.exhausted:
                waiting.popleft()
            if not waiting:
                del self._of_peer[peer]
            elif self._windows.is_open(peer):
                waiting.rotate(-1)
                self._turns[peer] = None
                return waiting[-1]
        return None
