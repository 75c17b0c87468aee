"""An agent whose slices settle when a test says so, for tests of the thread that owns one."""

import threading
from collections.abc import Sequence

from kvreshard.transport.base import Direction, MemoryRegion, TransportError
from kvreshard.transport.slices import Slice


class FakeAgent:
    """Slices are numbered as posted. `settle(n)` and `fail(n)` decide their end; the log tells what was called.

    Its clock advances with the calls: a post takes 15 ms, three quarters of what is aimed at, so that the budget keeps
    its size of two copies.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.log: list[tuple[object, ...]] = []
        self.outcomes: dict[int, bool] = {}
        self.refuse_posts = False
        self.num_posted = 0
        self.posted_bytes: list[tuple[str, int]] = []
        self.threads: set[int] = set()

    def settle(self, number: int) -> None:
        self.outcomes[number] = True

    def fail(self, number: int) -> None:
        self.outcomes[number] = False

    def called(self, name: str) -> list[tuple[object, ...]]:
        return [entry for entry in list(self.log) if entry[0] == name]

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.log.append(("register", *regions))

    def deregister(self, regions: Sequence[MemoryRegion]) -> None:
        self.log.append(("deregister", *regions))

    def metadata(self) -> bytes:
        return b"fake"

    def add_peer(self, name: str, native: bytes) -> None:
        if native == b"unreadable":
            raise TransportError(f"the fake cannot read {name}")
        self.now_s += 0.011
        self.log.append(("add", name))

    def remove_peer(self, name: str) -> None:
        self.log.append(("remove", name))

    def start(self, peer: str, direction: Direction, slice_: Slice) -> object:
        self.threads.add(threading.get_ident())
        if self.refuse_posts:
            raise TransportError("the fake refuses")
        self.now_s += 0.015
        number = self.num_posted
        self.log.append(("start", peer, number))
        self.posted_bytes.append((peer, int(slice_.local[:, 1].sum())))
        self.num_posted += 1
        return number

    def is_done(self, handle: object) -> bool:
        assert isinstance(handle, int)
        self.now_s += 0.001
        outcome = self.outcomes.get(handle)
        if outcome is False:
            raise TransportError(f"slice {handle} broke")
        return outcome is True

    def release(self, handle: object) -> None:
        self.log.append(("release", handle))

    def send(self, peer: str, payload: bytes) -> None:
        self.threads.add(threading.get_ident())
        self.log.append(("send", peer, payload))

    def receive(self) -> list[tuple[str, bytes]]:
        self.threads.add(threading.get_ident())
        if self.log and self.log[-1][0] == "add":
            self.log.append(("look",))
        return []

    def close(self) -> None:
        self.log.append(("close",))


class Stuck(FakeAgent):
    """Its notifications do not go out until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_inside = threading.Event(), threading.Event()

    def send(self, peer: str, payload: bytes) -> None:
        """Waits for the gate."""
        self.is_inside.set()
        assert self.gate.wait(60.0)
        super().send(peer, payload)
