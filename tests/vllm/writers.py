"""How vLLM's backends find a value in a page, written a second time and in their own terms: views, slots, block tables.

Each function makes a `Writer`: it writes the labels of one layer on one rank through the registered view, or asserts that they
are there. Rules are vLLM's; nothing of `kvreshard` but the names of fields is used.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from tests.vllm.engines import Labels, Side, Writer, label
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.kv_cache_interface import FullAttentionSpec

Index = np.ndarray[Any, np.dtype[np.int64]]


def as_bytes(tensor: Any) -> Labels:
    """A torch view as an array of bytes of the same memory, one axis more for the bytes of a value."""
    item = tensor.element_size()
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    strides = (*(stride * item for stride in tensor.stride()), 1)
    return as_strided(whole[tensor.storage_offset() * item :], (*tensor.shape, item), strides)


def put(view: Any, index: tuple[Any, ...], wanted: Labels, write: bool, what: str) -> None:
    """Write labels into a view, or assert that they are there."""
    if isinstance(view, _Tiled):
        view, index = view.tiles, view.place(*index)
    target = as_bytes(view)
    if write:
        target[index] = wanted
    else:
        assert (target[index] == wanted).all(), f"{what}: other bytes than the source's"


def token_slots(side: Side, rank: int, layer: str, num_tokens: int, view: Any) -> tuple[Index, Index, Index]:
    """Tokens on this rank, their kernel block and their slot in it (`v1/worker/block_table.py`, `ComputeSlotMappingKernel`). Ranks that share the sequence are
    counted over PCP first, then over TP (`parallel_state.py`, `initialize_model_parallel`).
    """
    place, spec = side.places[rank], side.spec(rank, layer)
    # 0.30 does not say: full attention is (`kv_cache_utils.py`, `dcp_world_size_for_kv_cache_spec`).
    d = place.dcp_size if getattr(spec, "dcp_sharded", isinstance(spec, FullAttentionSpec)) else 1
    step, bs = place.interleave, spec.block_size
    p = np.arange(num_tokens)
    v = p % (bs * d)
    mine = (v // step) % d == (place.tp_rank * place.pcp_size + place.pcp_rank) % d
    slot = (v // (d * step)) * step + v % step
    page = np.array(side.tables[side.group_of(layer)], dtype=np.int64)[p // (bs * d)]
    ratio = view.shape[0] // side.configs[rank].num_blocks
    kernel_tokens = bs // ratio
    return p[mine], (page * ratio + slot // kernel_tokens)[mine], (slot % kernel_tokens)[mine]


def state_slots(
    side: Side, rank: int, layer: str, num_tokens: int, view: Any, tokens_per_state: int
) -> tuple[Index, Index, Index]:
    """Whole states, written by their last token (`compressor_utils.get_compressed_slot_mapping`)."""
    tokens, block, slot = token_slots(side, rank, layer, num_tokens, view)
    last = (tokens + 1) % tokens_per_state == 0
    return tokens[last] // tokens_per_state, block[last], slot[last] // tokens_per_state


def heads_of(place: Any, total: int) -> Index:
    """KV heads of a rank (`QKVParallelLinear`): an equal part, or one head for several ranks in a row."""
    if place.tp_size <= total:
        each = total // place.tp_size
        return np.arange(place.tp_rank * each, (place.tp_rank + 1) * each)
    return np.array([place.tp_rank // (place.tp_size // total)])


def cell(total: int, k_size: int, v_size: int | None = None) -> Writer:
    """`kv_cache.transpose(1, 2).split(head_size, dim=-1)` (`flash_attn.py`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        cache = side.caches[rank][layer]
        sides = cache.transpose(1, 2).split([k_size, k_size if v_size is None else v_size], dim=-1)
        _put_heads(side, rank, layer, num_tokens, sides, heads_of(side.places[rank], total), write)

    return run


def conv_inputs(total: int) -> Writer:
    """Inputs of convolutions, per token and head, at the strides of the view (`inkling/nvidia/ops/sconv.py`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        heads = heads_of(side.places[rank], total)
        _put_heads(side, rank, layer, num_tokens, [side.caches[rank][layer].transpose(1, 2)], heads, write)

    return run


def _put_heads(side: Side, rank: int, layer: str, num_tokens: int, sides: Any, heads: Index, write: bool) -> None:
    """K and V as (blocks, tokens, heads, channels)."""
    tokens, block, slot = token_slots(side, rank, layer, num_tokens, side.caches[rank][layer])
    for name, view in zip("kv"[: len(sides)], sides, strict=True):
        local, channels = np.arange(len(heads)), np.arange(view.shape[3])
        index = np.ix_(np.arange(len(tokens)), local, channels)
        at = (block[index[0]], slot[index[0]], index[1], index[2])
        wanted = label(f"{layer}.{name}", view.element_size(), tokens[index[0]], heads[index[1]], index[2])
        put(view, at, wanted, write, f"rank {rank} {layer}.{name}")


def slots(total: int, head_size: int) -> Writer:
    """`kv_cache.unbind(1)`, then heads and channels of the cell (`b12x.py`, `_kv_cache_views`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        heads = heads_of(side.places[rank], total)
        sides = [view.unflatten(-1, (len(heads), head_size)) for view in side.caches[rank][layer].unbind(1)]
        _put_heads(side, rank, layer, num_tokens, sides, heads, write)

    return run


def cpu_planes(total: int, head_size: int, isa: str) -> Writer:
    """`cpu_attn.py`, `forward`, and the order inside the planes that `test_cpu_operators.py` finds with vLLM's operator."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        cache = side.caches[rank][layer]
        blocks, num_heads, n, _ = cache.shape
        k, v = cache.view(blocks, num_heads, 2 * n, -1).chunk(2, dim=2)
        if isa == "amx":
            k, v = (
                _Tiled(_plane(k, (n // 16, head_size // 2, 16, 2)), True),
                _Tiled(_plane(v, (head_size // 16, n // 2, 16, 2)), False),
            )
        else:
            k = _plane(k, (head_size, n)).transpose(-1, -2)
        sides = (k.transpose(1, 2), v.transpose(1, 2))
        _put_heads(side, rank, layer, num_tokens, sides, heads_of(side.places[rank], total), write)

    return run


def _plane(plane: Any, shape: tuple[int, ...]) -> Any:
    """A (blocks, heads, tokens, channels) plane, whose page and head are dense, in another shape."""
    steps = [1]
    for extent in shape[:0:-1]:
        steps.insert(0, steps[0] * extent)
    return plane.as_strided((*plane.shape[:2], *shape), (*plane.stride()[:2], *steps), plane.storage_offset())


class _Tiled:
    """Looks like a (blocks, heads, tokens, channels) view of tiles; only what `put` needs."""

    def __init__(self, tiles: Any, tokens_outside: bool) -> None:
        self.tiles, self._tokens_outside = tiles, tokens_outside
        outer, pairs = tiles.shape[2], tiles.shape[3]
        tokens, channels = (outer * 16, pairs * 2) if tokens_outside else (pairs * 2, outer * 16)
        self.shape = (tiles.shape[0], tokens, tiles.shape[1], channels)

    def transpose(self, *_: int) -> "_Tiled":
        return self

    def element_size(self) -> int:
        return int(self.tiles.element_size())

    def place(self, block: Index, token: Index, head: Index, channel: Index) -> tuple[Any, ...]:
        long, short = (token, channel) if self._tokens_outside else (channel, token)
        return block, head, long // 16, short // 2, long % 16, short % 2


def latent(name: str = "latent", tokens_per_state: int = 1) -> Writer:
    """One row per state: `kv_cache.squeeze(1)` (`mla_attention.py`, `bind_kv_cache`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        view = side.caches[rank][layer].squeeze(1)
        states, block, slot = state_slots(side, rank, layer, num_tokens, side.caches[rank][layer], tokens_per_state)
        channels = np.arange(view.shape[2])
        wanted = label(f"{layer}.{name}", view.element_size(), states[:, None], channels)
        put(view, (block[:, None], slot[:, None], channels), wanted, write, f"rank {rank} {layer}.{name}")

    return run


def scaled_rows(row: int, scale: int, names: tuple[str, str], tokens_per_state: int = 1) -> Writer:
    """Values at slot * row of a kernel block, scales at states * row + slot * scale (`deepseek_v32/common/kernels.py`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        cache = side.caches[rank][layer]
        blocks, _, count, _ = cache.shape
        pages = cache.as_strided((blocks, count * (row + scale)), (cache.stride(0), 1), cache.storage_offset())
        states, block, slot = state_slots(side, rank, layer, num_tokens, cache, tokens_per_state)
        for name, width, start in ((names[0], row, 0), (names[1], scale, count * row)):
            channels = np.arange(width)
            at = (block[:, None], start + slot[:, None] * width + channels)
            put(pages, at, label(f"{layer}.{name}", 1, states[:, None], channels), write, f"rank {rank} {layer}.{name}")

    return run


def ring(*names: str) -> Writer:
    """Row `position % capacity` of the request's one page, in a head slot per part (`deepseek_v41/compressor.py`,
    `glm5next/nvidia/ops/kpool_compress.py`).
    """

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        view = side.caches[rank][layer]
        capacity = view.shape[2]
        (page,) = side.tables[side.group_of(layer)]
        low = max(0, num_tokens - (capacity if write else _shortest_ring(side, capacity)))
        tokens, channels = np.arange(low, num_tokens), np.arange(view.shape[3])
        for slot, name in enumerate(names or ("partial",)):
            wanted = label(f"{layer}.{name}", view.element_size(), tokens[:, None], channels)
            put(
                view, (page, slot, (tokens % capacity)[:, None], channels), wanted, write, f"rank {rank} {layer}.{name}"
            )

    return run


def _shortest_ring(side: Side, capacity: int) -> int:
    return min(capacity, side.ring_tokens or capacity)


def states(layer_spec: Any, tensor: Any) -> tuple[Any, ...]:
    """The states of a page, by vLLM's own `MambaBase.bind_kv_cache`."""
    layer = SimpleNamespace(get_state_shape=lambda: layer_spec.shapes, get_state_dtype=lambda: layer_spec.dtypes)
    MambaBase.bind_kv_cache(layer, tensor)
    return tuple(layer.kv_cache)


def mamba2(heads: int, head_dim: int, groups: int, state: int, taps: int, dim_first: bool) -> Writer:
    """Rows x, B, C of the convolution (`mamba_mixer2.py`); heads and groups of a rank as `mamba_v2_sharded_weight_loader`."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        place = side.places[rank]
        mine = np.arange(heads).reshape(place.tp_size, -1)[place.tp_rank]
        group = (
            np.arange(groups) if groups < place.tp_size else np.arange(groups).reshape(place.tp_size, -1)[place.tp_rank]
        )
        rows = [("conv.x", mine, head_dim), ("conv.B", group, state), ("conv.C", group, state)]
        conv, ssm = states(side.spec(rank, layer), side.caches[rank][layer])
        _put_conv(side, layer, conv, rows, taps, dim_first, write)
        _put_dense(side, layer, ssm, mine, (head_dim, state), write)

    return run


def gated_delta(k_heads: int, v_heads: int, k: int, v: int, taps: int, dim_first: bool) -> Writer:
    """Rows q, k, v, each split by its own heads (`qwen_gdn_linear_attn.py`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        place = side.places[rank]
        keys, values = (np.arange(n).reshape(place.tp_size, -1)[place.tp_rank] for n in (k_heads, v_heads))
        conv, ssm = states(side.spec(rank, layer), side.caches[rank][layer])
        _put_conv(
            side, layer, conv, [("conv.q", keys, k), ("conv.k", keys, k), ("conv.v", values, v)], taps, dim_first, write
        )
        _put_dense(side, layer, ssm, values, (v, k), write)

    return run


def mamba1(channels: int, state: int, taps: int, dim_first: bool) -> Writer:
    """Channels in equal parts (`mamba_utils.py:mamba1_state_shape`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        place = side.places[rank]
        mine = np.arange(channels).reshape(place.tp_size, -1)[place.tp_rank]
        conv, ssm = states(side.spec(rank, layer), side.caches[rank][layer])
        _put_conv(side, layer, conv, [("conv.x", mine, None)], taps, dim_first, write)
        _put_dense(side, layer, ssm, mine, (state,), write)

    return run


def short_conv(channels: int, taps: int, dim_first: bool) -> Writer:
    """Channels in equal parts (`mamba_utils.py:short_conv_state_shape`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        place = side.places[rank]
        mine = np.arange(channels).reshape(place.tp_size, -1)[place.tp_rank]
        (conv,) = states(side.spec(rank, layer), side.caches[rank][layer])
        _put_conv(side, layer, conv, [("conv.x", mine, None)], taps, dim_first, write)

    return run


def position_conv(channels: int, taps: int, dim_first: bool) -> Writer:
    """All channels on every rank, the oldest tap first (`qwen4_exp/nvidia/ple_layer.py`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        (conv,) = states(side.spec(rank, layer), side.caches[rank][layer])
        _put_conv(side, layer, conv, [("conv.x", np.arange(channels), None)], taps, dim_first, write)

    return run


def linear(heads: int, width: int) -> Writer:
    """One matrix per head (`mamba_utils.py:linear_attention_state_shape`)."""

    def run(side: Side, rank: int, layer: str, num_tokens: int, write: bool) -> None:
        place = side.places[rank]
        mine = np.arange(heads).reshape(place.tp_size, -1)[place.tp_rank]
        (ssm,) = states(side.spec(rank, layer), side.caches[rank][layer])
        _put_dense(side, layer, ssm, mine, (width, width), write)

    return run


def _put_conv(
    side: Side,
    layer: str,
    conv: Any,
    rows: list[tuple[str, Index, int | None]],
    taps: int,
    dim_first: bool,
    write: bool,
) -> None:
    """Live taps are the first columns (`ops/causal_conv1d.py`)."""
    (page,) = side.tables[side.group_of(layer)]
    view = conv if dim_first else conv.transpose(-1, -2)
    first, tap = 0, np.arange(taps)
    for name, owned, width in rows:
        inner = np.arange(1 if width is None else width)
        at = first + np.arange(len(owned))[:, None] * len(inner) + inner
        coordinates = (owned[:, None], tap) if width is None else (owned[:, None, None], inner[:, None], tap)
        wanted = label(f"{layer}.{name}", view.element_size(), *coordinates)
        index = (page, at.reshape(-1)[:, None], tap)
        put(view, index, wanted.reshape(at.size, taps, -1), write, f"{layer}.{name}")
        first += at.size


def _put_dense(side: Side, layer: str, ssm: Any, owned: Index, inner: tuple[int, ...], write: bool) -> None:
    (page,) = side.tables[side.group_of(layer)]
    grid = np.ix_(np.arange(len(owned)), *(np.arange(extent) for extent in inner))
    wanted = label(f"{layer}.ssm", ssm.element_size(), owned[grid[0]], *grid[1:])
    put(ssm, (page, *grid), wanted, write, f"{layer}.ssm")
