"""Tools that watch what is moved: digests in logical coordinates, which say whether the right bytes arrived whatever the two layouts are."""

from kvreshard.tools.cells import Side
from kvreshard.tools.digest import add_up, digest_cells, digest_engine, digest_lanes, digest_parts, digest_rank
from kvreshard.tools.memory import ArrayBytes, Memory
from kvreshard.tools.verdict import Difference, Digest, Part, Verdict, WrongBytes, compare

__all__ = [
    "ArrayBytes",
    "Difference",
    "Digest",
    "Memory",
    "Part",
    "Side",
    "Verdict",
    "WrongBytes",
    "add_up",
    "compare",
    "digest_cells",
    "digest_engine",
    "digest_lanes",
    "digest_parts",
    "digest_rank",
]
