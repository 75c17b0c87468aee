"""How much may be on its way to one peer, so that no reader floods a source and no stopped source holds up the others?

Every peer has a window of its own: at most so many slices, of at most so many bytes together, posted and not yet settled.

1. `share_bytes`: what a slice may cost, so that a full window holds `max_slices` of them.
2. `is_open`: whether one more slice of that size fits. It always does while nothing is in flight: a piece larger than the
   bound goes alone, and the bound can delay a transfer but never stop it.
3. `enter` when a slice was posted, `leave` when it has settled. A window that is empty again is forgotten.

Cost counts for bytes: it is never less (`slices.DESCRIPTOR_COST_BYTES`).
"""

from __future__ import annotations

from kvreshard.plan.copies import MAX_COPY_BYTES
from kvreshard.transport.slices import DESCRIPTOR_COST_BYTES

# No slice of pieces costs more than its share, or than the largest piece if that is more.
_LARGEST_PIECE = MAX_COPY_BYTES + DESCRIPTOR_COST_BYTES


class Windows:
    """The windows of all peers. Not thread-safe."""

    __slots__ = ("_bytes", "_max_bytes", "_max_slices", "_slices", "num_in_flight", "share_bytes")

    def __init__(self, max_slices: int, max_bytes: int) -> None:
        self._max_slices, self._max_bytes = max_slices, max_bytes
        self.share_bytes = max(1, max_bytes // max_slices)
        self._slices: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        self.num_in_flight = 0  # slices, of all peers

    def bytes_in_flight(self, peer: str) -> int:
        """Cost of what was posted to a peer and has not settled."""
        return self._bytes.get(peer, 0)

    def is_open(self, peer: str) -> bool:
        """Whether a slice of at most `share_bytes`, or of one piece, may be posted to a peer."""
        num_slices = self._slices.get(peer, 0)
        if not num_slices:
            return True
        fits = self._bytes[peer] + max(self.share_bytes, _LARGEST_PIECE) <= self._max_bytes
        return fits and num_slices < self._max_slices

    def enter(self, peer: str, cost_bytes: int) -> None:
        """A slice was posted."""
        self.num_in_flight += 1
        self._slices[peer] = self._slices.get(peer, 0) + 1
        self._bytes[peer] = self._bytes.get(peer, 0) + cost_bytes

    def leave(self, peer: str, cost_bytes: int) -> None:
        """A slice has settled, or was given up."""
        self.num_in_flight -= 1
        self._slices[peer] -= 1
        self._bytes[peer] -= cost_bytes
        if not self._slices[peer]:
            del self._slices[peer], self._bytes[peer]
