"""The nouns: what an engine holds, in which pages, at which address. No I/O; NumPy and msgspec only."""

from kvreshard.model.address import AxisMap, Digit, canonical
from kvreshard.model.errors import BindError, KvReshardError, LayoutError, LayoutMismatch, UsageError, WireError
from kvreshard.model.field import Axis, Field
from kvreshard.model.layout import EngineLayout
from kvreshard.model.merge import merge_ranks
from kvreshard.model.ownership import Cyclic, Interval, Ownership, count_within, split_evenly
from kvreshard.model.rank import Geometry, Group, Rank, RankTemplate, Region, Shard, Slab

__all__ = [
    "Axis",
    "AxisMap",
    "BindError",
    "Cyclic",
    "Digit",
    "EngineLayout",
    "Field",
    "Geometry",
    "Group",
    "Interval",
    "KvReshardError",
    "LayoutError",
    "LayoutMismatch",
    "Ownership",
    "Rank",
    "RankTemplate",
    "Region",
    "Shard",
    "Slab",
    "UsageError",
    "WireError",
    "canonical",
    "count_within",
    "merge_ranks",
    "split_evenly",
]
