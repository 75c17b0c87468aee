"""Size-bounded LRU of copy patterns and staging layouts, shared by all routes of a rank.

Where every request cuts pages anew (its last page, the end of a prefix hit), there is a pattern for each way in which they overlap, and a
pattern of a large page whose heads are apart has some 100 KB. A count would bound no bytes, so values have a size. What was not asked for
in the longest time goes first; the newest stays, whatever its size.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable
from typing import Any, TypeVar

V = TypeVar("V")

# Those of pages of 1,056 tokens whose heads are apart take 240 MB for the ways in which one source's requests end. Made anew, each takes
# some 10 ms.
MAX_BYTES = 256 << 20
# Of an entry, beside what it says of itself: its keys and objects.
ENTRY_BYTES = 1 << 10


class PatternCache:
    """The newest values of at most `max_bytes` bytes together. Safe for use from any thread: handshakes run on several."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[tuple[Hashable, Hashable], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, owner: Hashable, key: Hashable, make: Callable[[], V], size: Callable[[V], int]) -> V:
        """The value that is kept for an owner's key, or a new one. `size`: its bytes."""
        place = owner, key
        with self._lock:
            found = self._values.get(place)
            if found is not None:
                self._values.move_to_end(place)
                value: V = found[0]
                return value
        value = make()
        num_bytes = size(value) + ENTRY_BYTES
        with self._lock:
            if place not in self._values:
                self._values[place] = value, num_bytes
                self.num_bytes += num_bytes
            while self.num_bytes > self._max_bytes and len(self._values) > 1:
                self.num_bytes -= self._values.popitem(last=False)[1][1]
        return value

    def drop(self, owners: Collection[Hashable]) -> None:
        """Keep nothing of these owners any more."""
        with self._lock:
            for place in [place for place in self._values if place[0] in owners]:
                self.num_bytes -= self._values.pop(place)[1]
