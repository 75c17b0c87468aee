"""Where does a transfer stand that is posted slice by slice? What its owner knows of it; only the owner's thread changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvreshard.transport.base import Transfer, TransportError
from kvreshard.transport.slices import Cursor


@dataclass(slots=True, eq=False)
class SlicedTransfer:
    """A transfer on its way through the owner, slice by slice. `peer` is the agent's own name, `handles` the slices in flight and their cost.

    `is_torn`: a slice of it failed, of which some pieces may still move.
    """

    transfer: Transfer
    peer: str
    cursor: Cursor
    notify: bytes | None
    handles: list[tuple[object, int]] = field(default_factory=list)
    error: TransportError | None = None
    is_torn: bool = False

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of it is left to post and nothing is in flight."""
        return self.cursor.exhausted and not self.handles

    def fail(self, error: TransportError) -> None:
        """Post no more; the first error is the one that is told."""
        self.cursor.drop()
        self.error = self.error or error
