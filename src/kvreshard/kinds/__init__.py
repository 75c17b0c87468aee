"""The kinds of cache, and what each holds in a page. The only room of the core with model vocabulary."""

from kvreshard.kinds.attention import Attention
from kvreshard.kinds.mla import Latent
from kvreshard.kinds.opaque import Opaque
from kvreshard.kinds.options import dtype_option
from kvreshard.kinds.page import Kind, PageView, Piece, Style, TensorShape
from kvreshard.kinds.place import Place
from kvreshard.kinds.ring import Ring
from kvreshard.kinds.rows import ScaledRows, indexer
from kvreshard.kinds.states import GatedDelta, LinearState, Mamba1, Mamba2, ShortConv

__all__ = [
    "Attention",
    "GatedDelta",
    "Kind",
    "Latent",
    "LinearState",
    "Mamba1",
    "Mamba2",
    "Opaque",
    "PageView",
    "Piece",
    "Place",
    "Ring",
    "ScaledRows",
    "ShortConv",
    "Style",
    "TensorShape",
    "dtype_option",
    "indexer",
]
