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


class ByObject(Generic[K, V]):
    """A value of each object, kept as long as that lives. A look takes 0.2 us, one at a `WeakKeyDictionary` 2."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[_Key[K], V]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: K) -> V | None:
        """The value of this very object."""
        known = self._found.get(id(key))
        return known[1] if known is not None and known[0]() is key else None

    def put(self, key: K, value: V) -> V:
        """Keep the value of this object, which is given back."""
        place = _Key(key, self._forget)
        place.number = id(key)
        self._found[place.number] = place, value
        return value

    def _forget(self, dead: ref[K]) -> None:
        known = self._found.get(dead.number) if isinstance(dead, _Key) else None
        if known is not None and known[0] is dead:
            self._found.pop(known[0].number, None)


class Placed(Generic[K, V]):
    """What `find(key, local, remote, remote_side)` says of each key, kept as long as the key lives. None is kept like anything else."""

    def __init__(self, find: Callable[[K, RegionTable, RegionTable, str], V | None]) -> None:
        self._find = find
        self._found: ByObject[K, tuple[RegionTable, RegionTable, V | None]] = ByObject()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: K, local: RegionTable, remote: RegionTable, remote_side: str) -> V | None:
        """Raises what `find` raises, TransportError for copies outside the regions; nothing is kept then."""
        known = self._found.get(key)
        if known is None or known[0] is not local or known[1] is not remote:
            known = self._found.put(key, (local, remote, self._find(key, local, remote, remote_side)))
        return known[2]
