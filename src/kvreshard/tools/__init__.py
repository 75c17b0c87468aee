"""Watches loads, off by default: digests in logical coordinates, flight records and their replay, shadow mode."""

from kvreshard.tools.cells import Side
from kvreshard.tools.digest import (
    Difference,
    Digest,
    Memory,
    Part,
    Verdict,
    compare,
    digest_cells,
    digest_transfers,
)

__all__ = [
    "Difference",
    "Digest",
    "Memory",
    "Part",
    "Side",
    "Verdict",
    "compare",
    "digest_cells",
    "digest_transfers",
]
