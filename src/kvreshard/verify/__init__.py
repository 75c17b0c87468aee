"""Digests in logical coordinates: did the right bytes arrive, whatever the two layouts are?"""

from kvreshard.verify.cells import Side
from kvreshard.verify.digest import add_up, digest_cells, digest_engine, digest_lanes, digest_parts, digest_rank
from kvreshard.verify.memory import ArrayBytes, Memory
from kvreshard.verify.verdict import Difference, Digest, Part, Verdict, WrongBytes, compare

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
