"""What is known of copies that are posted more than once: where they lie, found once for the regions of both sides.

A `RegionTable` is never changed, only replaced: what was found for two of them holds while both are the same objects. When memory is
registered, given back, or a peer is met anew, it is found again, and refused if the copies lie outside now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

from kvreshard.transport.regions import RegionTable

K = TypeVar("K")
V = TypeVar("V")


class _Key(ref[K]):
    """A key that is not kept alive, and the number that it is found by."""

    __slots__ = ("number",)
    number: int


class Placed(Generic[K, V]):
    """What `find(key, local, remote, remote_side)` says of each key, kept as long as the key lives. None is kept like anything else.

    The parts of a list are asked for one after another: a look takes 0.2 us, one at a `WeakKeyDictionary` 2.
    """

    def __init__(self, find: Callable[[K, RegionTable, RegionTable, str], V | None]) -> None:
        self._find = find
        self._found: dict[int, tuple[_Key[K], RegionTable, RegionTable, V | None]] = {}

    def get(self, key: K, local: RegionTable, remote: RegionTable, remote_side: str) -> V | None:
        """Raises what `find` raises, TransportError for copies outside the regions; nothing is kept then."""
        number = id(key)
        known = self._found.get(number)
        if known is not None and known[1] is local and known[2] is remote and known[0]() is key:
            return known[3]
        value = self._find(key, local, remote, remote_side)
        place = _Key(key, self._forget)
        place.number = number
        self._found[number] = place, local, remote, value
        return value

    def __len__(self) -> int:
        return len(self._found)

    def _forget(self, dead: ref[K]) -> None:
        known = self._found.get(dead.number) if isinstance(dead, _Key) else None
        if known is not None and known[0] is dead:
            self._found.pop(known[0].number, None)
