"""Tools that watch what is moved: digests in logical coordinates, which say whether the right bytes arrived whatever the two layouts are."""

from kvreshard.tools.cells import Side
from kvreshard.tools.digest import digest_cells, digest_lanes
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
    "digest_lanes",
]
