"""What is known of copies that are posted more than once: where they lie, found once for the regions of both sides.

A `RegionTable` is never changed, only replaced: what was found for two of them holds while both are the same objects. When memory is
registered, given back, or a peer is met anew, it is found again, and refused if the copies lie outside now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, ref

from kvreshard.transport.regions import RegionTable

K = TypeVar("K")
V = TypeVar("V")


class Placed(Generic[K, V]):
    """What `find(key, local, remote, remote_side)` says of each key, kept as long as the key lives. None is kept like anything else."""

    def __init__(self, find: Callable[[K, RegionTable, RegionTable, str], V | None]) -> None:
        self._find = find
        self._found: WeakKeyDictionary[K, tuple[RegionTable, RegionTable, V | None]] = WeakKeyDictionary()
        # The parts of a list are asked for one after another, and a look at a weak dictionary takes 2 us.
        self._latest: tuple[ref[K], tuple[RegionTable, RegionTable, V | None]] | None = None

    def get(self, key: K, local: RegionTable, remote: RegionTable, remote_side: str) -> V | None:
        """Raises what `find` raises, TransportError for copies outside the regions; nothing is kept then."""
        latest = self._latest
        known = latest[1] if latest is not None and latest[0]() is key else self._found.get(key)
        if known is None or known[0] is not local or known[1] is not remote:
            known = self._found[key] = local, remote, self._find(key, local, remote, remote_side)
        if latest is None or latest[1] is not known:
            self._latest = ref(key, self._forget), known
        return known[2]

    def _forget(self, dead: ref[K]) -> None:
        latest = self._latest
        if latest is not None and latest[0] is dead:
            self._latest = None
