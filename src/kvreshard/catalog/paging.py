"""Block tables of an engine: the layers that share one, and the tokens that its pages span.

As vLLM 0.32 forms them (`v1/core/kv_cache_utils.py`, `platforms/interface.py`), as functions of page bytes:

1. `hybrid_page_tokens`: next to states, the attention page is widened until it holds a state; states are padded to it.
2. All layers equal, or of one base and page length: one group, pages of unequal bytes side by side.
3. Unequal pages in a block-outermost order: `_pack`. Layers of one base and page length form a bucket, pages keep their
   sizes, and large buckets are split so that no group needs many more bytes per page than the others.
4. Else `_unify` to the largest page (more tokens where it divides, padding where not), then `_split` buckets of equal layers
   into groups of about as many layers as the smallest bucket has.

Layers are in order of registration, and so are groups. vLLM does not support a latent whose page does not divide the largest: next to
plain windows these become full; else it is padded here, and `unifies` is false. vLLM does not start with uneven parallel sizes; page
bytes are then those of the largest rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

# FlashAttention and Triton kernels take any multiple of it; FlashInfer's smallest kernel block is the same.
MIN_KERNEL_TOKENS = 16
# Kernels over latents want the kernel blocks of a page next to states to be a multiple of so many tokens.
MIN_LATENT_KERNEL_TOKENS = 128
# Buckets whose sizes differ by less are padded up to the largest instead of split down to the smallest.
NEARLY_EQUAL = 1.5


@dataclass(frozen=True, slots=True)
class LayerPage:
    """One layer's page before grouping, on the largest rank. `tokens_per_page` is 0 for states, and the capacity of a ring.

    `base`: 'full', 'window', 'ring' or 'state', which never share a table. `rows`: a latent, read in whole rows. `replicated`: a state
    that is whole on every rank. Layers of equal `spec` and page are interchangeable.
    """

    name: str
    family: str
    base: str
    spec: Hashable
    tokens_per_page: int
    page_bytes: int
    window_tokens: int | None = None
    rows: bool = False
    replicated: bool = False


@dataclass(frozen=True, slots=True)
class TableGroup:
    """Layers that share a block table."""

    layers: tuple[LayerPage, ...]

    @property
    def families(self) -> frozenset[str]:
        return frozenset(layer.family for layer in self.layers)

    @property
    def tokens_per_page(self) -> int:
        return self.layers[0].tokens_per_page

    @property
    def page_bytes(self) -> int | None:
        """Bytes of a layer's page if all layers agree."""
        sizes = {layer.page_bytes for layer in self.layers}
        return sizes.pop() if len(sizes) == 1 else None


def hybrid_page_tokens(page_tokens: int, state_bytes: int, token_bytes: int, *, latent: bool = False) -> int:
    """Tokens of an attention page that holds a state of `state_bytes`.

    >>> hybrid_page_tokens(16, 2134016, 1024)  # Nemotron-3-Nano-30B at tensor parallel 1
    2096
    """
    step = max(MIN_KERNEL_TOKENS, page_tokens)
    if latent:
        step = max(step, MIN_LATENT_KERNEL_TOKENS)
    needed = step * -(-state_bytes // (step * token_bytes))
    needed = MIN_KERNEL_TOKENS * -(-needed // MIN_KERNEL_TOKENS)
    return max(page_tokens, needed)


def group_layers(layers: Sequence[LayerPage], *, block_outermost: bool) -> tuple[TableGroup, ...]:
    """The block tables of an engine. Every layer is in exactly one group."""
    if not layers:
        return ()
    if _shareable(layers):
        return (TableGroup(tuple(layers)),)
    unequal = len({layer.page_bytes for layer in layers}) > 1
    if block_outermost and unequal:
        return _pack(layers)
    if unequal and not unifies(layers):
        promoted = _without_windows(layers)
        if promoted is not None:
            return (TableGroup(promoted),)
    return _split(_unify(layers))


def unifies(layers: Sequence[LayerPage]) -> bool:
    """Whether vLLM can bring all layers to one page size."""
    largest = max(layer.page_bytes for layer in layers)
    return all(largest % layer.page_bytes == 0 for layer in layers if layer.rows)


def _sharing(layer: LayerPage) -> tuple[Hashable, ...]:
    """Equal for layers that one block table can serve."""
    match layer.base:
        case "window":
            return layer.base, layer.tokens_per_page, layer.window_tokens, layer.rows
        case "state":
            return layer.base, layer.tokens_per_page, layer.page_bytes, layer.replicated
        case base:
            return base, layer.tokens_per_page


def _shareable(layers: Sequence[LayerPage]) -> bool:
    return len({_sharing(layer) for layer in layers}) == 1


def _without_windows(layers: Sequence[LayerPage]) -> tuple[LayerPage, ...] | None:
    """The layers with plain windows kept like full attention, next to latents; None where that does not give one table."""
    if not any(layer.base == "window" for layer in layers) or any(
        layer.base == "window" and layer.rows for layer in layers
    ):
        return None
    lengths = {layer.tokens_per_page for layer in layers if layer.base == "full"}
    if len(lengths) != 1:
        return None
    length = lengths.pop()
    promoted = tuple(
        replace(
            layer, base="full", tokens_per_page=length, page_bytes=layer.page_bytes * length // layer.tokens_per_page
        )
        if layer.base == "window"
        else layer
        for layer in layers
    )
    return promoted if _shareable(promoted) else None


def _unify(layers: Sequence[LayerPage]) -> list[LayerPage]:
    """All pages as large as the largest."""
    largest = max(layer.page_bytes for layer in layers)
    unified = []
    for layer in layers:
        times, rest = divmod(largest, layer.page_bytes)
        longer = layer.tokens_per_page * times if layer.base != "state" and not rest else layer.tokens_per_page
        unified.append(replace(layer, page_bytes=largest, tokens_per_page=longer))
    return unified


def _split(layers: Sequence[LayerPage]) -> tuple[TableGroup, ...]:
    """Buckets of equal layers, each cut into groups by strides, so that pipeline stages stay balanced."""
    buckets: dict[Hashable, list[LayerPage]] = {}
    for layer in layers:
        buckets.setdefault((layer.spec, layer.tokens_per_page, layer.page_bytes), []).append(layer)
    smallest, largest = (pick(len(bucket) for bucket in buckets.values()) for pick in (min, max))
    per_group = largest if largest < NEARLY_EQUAL * smallest else smallest
    groups = []
    for bucket in buckets.values():
        num_groups = -(-len(bucket) // per_group)
        groups += [TableGroup(tuple(bucket[index::num_groups])) for index in range(num_groups)]
    return tuple(groups)


class _Bucket:
    """Layers that one table could serve, by page bytes. A repeat is one layer of each page size."""

    def __init__(self, layers: Sequence[LayerPage]) -> None:
        self.layers = tuple(layers)
        self.counts = Counter(layer.page_bytes for layer in layers)
        self.num_repeats = max(self.counts.values())
        self.balanced = len(set(self.counts.values())) == 1

    def widest_bytes(self, num_groups: int) -> int:
        return sum(-(-count // num_groups) * size for size, count in self.counts.items())

    def split(self, num_groups: int) -> list[TableGroup]:
        if num_groups == 1:
            return [TableGroup(self.layers)]
        sizes = [[layer for layer in self.layers if layer.page_bytes == size] for size in self.counts]
        repeats = list(zip(*sizes, strict=True))
        return [
            TableGroup(tuple(layer for repeat in repeats[index::num_groups] for layer in repeat))
            for index in range(num_groups)
        ]


def _pack(layers: Sequence[LayerPage]) -> tuple[TableGroup, ...]:
    """Groups whose layers lie side by side in one page, each with its own page size."""
    parts: dict[Hashable, list[LayerPage]] = {}
    for layer in layers:
        parts.setdefault(_sharing(layer), []).append(layer)
    buckets = [_Bucket(part) for part in parts.values()]
    floor = max((b.num_repeats for b in buckets if b.balanced and len(b.counts) > 1), default=0)
    repeats = _least_padding([b.num_repeats for b in buckets if b.balanced], floor) if floor else 0

    def num_groups(bucket: _Bucket) -> int:
        return -(-bucket.num_repeats // repeats) if repeats and bucket.balanced else 1

    def divisible(bucket: _Bucket) -> bool:
        """States, rings, and windows that need no repeats, may go down to one layer per group."""
        base = bucket.layers[0].base
        return bucket.balanced and (base in ("state", "ring") or (base == "window" and not repeats))

    anchor_bytes = max(b.widest_bytes(len(b.layers) if divisible(b) else num_groups(b)) for b in buckets)
    groups: list[TableGroup] = []
    for bucket in buckets:
        count = num_groups(bucket)
        if divisible(bucket):
            per_group = max(anchor_bytes // bucket.layers[0].page_bytes, 1)
            count = max(count, -(-len(bucket.layers) // per_group))
        groups += bucket.split(count)
    return tuple(groups)


def _least_padding(sizes: Sequence[int], floor: int) -> int:
    """The group size from `floor` up that leaves least unused when each size is cut into groups; ties: the largest."""
    return min(
        range(floor, max(sizes) + 1), key=lambda size: (sum(math.ceil(n / size) * size - n for n in sizes), -size)
    )
