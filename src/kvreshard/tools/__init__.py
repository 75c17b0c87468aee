"""What watches loads, off by default: digests in logical coordinates, flight records and their replay, shadow mode."""

from kvreshard.tools.cells import Side
from kvreshard.tools.digest import digest_cells, digest_transfers
from kvreshard.tools.memory import Memory
from kvreshard.tools.verdict import Difference, Digest, Part, Verdict, compare

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
