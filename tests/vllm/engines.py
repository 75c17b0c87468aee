"""Engines of one machine's plain memory, laid out by vLLM's own functions, with values written the way its backends index.

1. `build`: specifications of a model -> vLLM's groups, sizes and views -> `describe_rank` for every rank -> one layout.
2. `write`: labels through the registered views, by a second description of each cache (`writers`), which knows nothing of ours.
3. `check_addresses`: the label of every coordinate lies at the address that the layout says.
4. `transfer`: plan, copy, compare with the oracle, and read the labels back through the destination's views.

A label is a hash of field and coordinates, so a cell that another one overwrote, or that lies elsewhere, is seen.
"""

import contextlib
import os
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm")
    import torch
    from tests.vllm.planning import planning
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

from tests.pairs.apply import compile_all, poison_new_pages, run_transfer

from kvreshard.model import EngineLayout, LayoutError, merge_ranks
from kvreshard.model.tables import PageTable, Request
from kvreshard.session.mover import Mover
from kvreshard.session.transfer import pull
from kvreshard.testing.oracle import Memory, differing_bytes, oracle_transfer
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.local import HostMemory
from kvreshard.transport.nixl import NixlTransport
from kvreshard.vllm.describe import describe_rank
from kvreshard.vllm.describe.layer_info import LayerInfo
from kvreshard.vllm.describe.place import RankPlace

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
Labels = np.ndarray[Any, np.dtype[np.uint8]]
Writer = Callable[["Side", int, str, int], None]
"""(engine, rank, layer, number of tokens): write or read the layer's labels through its view."""


@dataclass(frozen=True)
class ModelLayer:
    """One layer: its specification on a rank of a given place, the facts about it, and how its backend indexes."""

    spec: Callable[[RankPlace], Any]
    info: LayerInfo
    writer: Any
    stage: int = 0


@dataclass
class Side:
    """One engine: its layout, the tensors that vLLM would register, and its memory as bytes."""

    layout: EngineLayout
    places: list[RankPlace]
    caches: list[dict[str, Any]]
    configs: list[Any]
    layers: Mapping[str, ModelLayer]
    memory: Memory
    tables: dict[str, list[int]] = field(default_factory=dict)
    ring_tokens: int | None = None

    def group_of(self, layer: str) -> str:
        groups = ((i, group) for config in self.configs for i, group in enumerate(config.transfer_groups))
        return next(f"g{i}" for i, group in groups if layer in group.layer_names)

    def spec(self, rank: int, layer: str) -> Any:
        """The specification as vLLM's grouping left it."""
        group = next(group for group in self.configs[rank].transfer_groups if layer in group.layer_names)
        wrapped = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        return wrapped[layer] if wrapped else group.kv_cache_spec


def fake_config(
    layout: str = "LBHNC",
    *,
    tp: int = 1,
    dcp: int = 1,
    blocks: int = 12,
    kv_heads: int = 0,
    num_layers: int = 99,
    speculative: Any = None,
    layers: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] | None = None,
    **cache: Any,
) -> Any:
    """As much of a VllmConfig as vLLM's grouping functions and `describe_rank` ask for."""
    arch = SimpleNamespace(total_num_kv_heads=kv_heads, per_layer_overrides=None)
    config = SimpleNamespace(num_hidden_layers=num_layers, model_type="x", **(text or {}))
    cache_config = SimpleNamespace(
        num_gpu_blocks_override=blocks,
        prefix_cache_retention_interval=0,
        mamba_cache_mode="none",
        block_size=16,
        cache_dtype="auto",
        get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
        **cache,
    )
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        cache_config=cache_config,
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=speculative,
        model_config=SimpleNamespace(
            hf_config=config,
            hf_text_config=config,
            max_model_len=4096,
            original_max_model_len=4096,
            model_arch_config=arch,
            dtype=torch.bfloat16,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, decode_context_parallel_size=dcp),
        compilation_config=SimpleNamespace(static_forward_context=dict(layers or {})),
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=8192,
        kv_transfer_config=None,
    )


def build(
    name: str,
    layers: Mapping[str, ModelLayer],
    *,
    tp: int = 1,
    pp: int = 1,
    dcp: int = 1,
    pcp: int = 1,
    interleave: int = 1,
    order: str = "LBHNC",
    blocks: int = 12,
    kernel: Callable[[Any], int | None] = lambda spec: None,
    config: Mapping[str, Any] | None = None,
) -> Side:
    """An engine of `pp` x `pcp` x `tp` ranks, in vLLM's order. `kernel`: tokens of a kernel block of a group, by its specification; None: its page."""
    places, caches, configs, parts = [], [], [], []
    for rank in range(tp * pcp * pp):
        place = RankPlace(rank % tp, tp, rank // (tp * pcp), pp, dcp, interleave, rank // tp % pcp, pcp)
        vllm_config = fake_config(order, tp=tp, dcp=dcp, blocks=blocks, **(config or {}))
        specs = {key: layer.spec(place) for key, layer in layers.items()}
        groups = planning.get_kv_cache_groups(vllm_config, specs)
        mine = {key: spec for key, spec in specs.items() if layers[key].stage == place.pp_rank}
        if pp > 1:
            groups = planning._project_kv_cache_groups_to_worker(groups, mine)
        kv_cache_config = planning.get_kv_cache_config_from_groups(vllm_config, groups, 0)
        kernel_sizes = [kernel(group.kv_cache_spec) or group.kv_cache_spec.block_size for group in groups]
        tensors = allocate_kv_cache(kv_cache_config, torch.device("cpu"), KVCacheLayout[order], kernel_sizes)
        parts.append(
            describe_rank(
                engine=name,
                vllm_config=vllm_config,
                kv_cache_config=kv_cache_config,
                kv_caches=tensors,
                place=place,
                info={key: layer.info for key, layer in layers.items()},
            )
        )
        places.append(place)
        caches.append(tensors)
        configs.append(kv_cache_config)
    layout = merge_ranks(parts)
    memory = {
        (rank.rank, region.name): _bytes(next(iter(tensors.values())))
        for rank, tensors in zip(layout.ranks, caches, strict=True)
        for region in rank.regions
    }
    return Side(layout, places, caches, configs, layers, memory)


def _bytes(tensor: Any) -> Labels:
    """The storage below a tensor, shared."""
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    return whole.numpy()


def label(name: str, element_bytes: int, *coordinates: Any) -> Labels:
    """The bytes of a cell: shape of the coordinates, broadcast, and `element_bytes` more. Never zero."""
    mixed = np.uint64(zlib.crc32(name.encode()) + 1)
    with np.errstate(over="ignore"):
        for coordinate in coordinates:
            mixed = (mixed ^ (np.asarray(coordinate).astype(np.uint64) + np.uint64(0x9E3779B9))) * np.uint64(
                0x9E3779B97F4A7C15
            )
            mixed = mixed ^ (mixed >> np.uint64(29))
        mixed = mixed * np.uint64(0xBF58476D1CE4E5B9)
    parts = [(mixed >> np.uint64(8 * i)).astype(np.uint8) % 255 + 1 for i in range(element_bytes)]
    return np.stack(parts, axis=-1).astype(np.uint8)


def give_pages(side: Side, num_tokens: int, rng: np.random.Generator) -> None:
    """A block table for each group, shuffled, without page 0."""
    free = rng.permutation(np.arange(1, side.layout.groups[0].num_pages)).tolist()
    for group in side.layout.groups:
        ring = _is_ring(side.layout, group.name)
        count = 1 if group.tokens_per_page is None or ring else -(-num_tokens // group.tokens_per_page)
        side.tables[group.name] = [free.pop() for _ in range(count)]


def _is_ring(layout: EngineLayout, group: str) -> bool:
    shards = [shard for rank in layout.ranks for shard in rank.shards if shard.geometry.group == group]
    return any(
        axis.digits[-1].extent is None and not axis.digits[-1].page_step for s in shards for axis in s.geometry.axes
    )


def write(side: Side, num_tokens: int) -> None:
    """All layers' labels, through the registered views."""
    for rank, (place, tensors) in enumerate(zip(side.places, side.caches, strict=True)):
        for name, layer in side.layers.items():
            if layer.stage == place.pp_rank and name in tensors:
                layer.writer(side, rank, name, num_tokens, True)


def read(side: Side, num_tokens: int) -> None:
    """The same the other way round: every label is where the backend will look for it."""
    for rank, (place, tensors) in enumerate(zip(side.places, side.caches, strict=True)):
        for name, layer in side.layers.items():
            if layer.stage == place.pp_rank and name in tensors:
                layer.writer(side, rank, name, num_tokens, False)


def check_addresses(side: Side, num_tokens: int) -> int:
    """Every coordinate of every field lies where the layout says; returns how many cells were looked at."""
    seen = 0
    for rank in side.layout.ranks:
        for shard in rank.shards:
            wanted = side.layout.field_by_name[shard.field]
            group = side.layout.group_by_name[shard.geometry.group]
            coordinates, pages, offsets = [], [], []
            for axis, mapped in zip(wanted.axes, shard.geometry.axes, strict=True):
                if axis.extent is None:
                    is_ring = _is_ring(side.layout, group.name)
                    first = max(0, num_tokens - (side.ring_tokens or group.tokens_per_page or 0)) if is_ring else 0
                    low, high = axis.indices_of(first, num_tokens)
                    everything = np.arange(low, high, dtype=np.int64)
                else:
                    everything = np.arange(axis.extent, dtype=np.int64)
                held = everything[mapped.owned.contains(everything)]
                page, offset = mapped.locate(mapped.owned.to_local(held))
                coordinates.append(held)
                pages.append(page)
                offsets.append(offset)
            grid = np.ix_(*coordinates)
            page_ids = np.array(side.tables[group.name], dtype=np.int64)[sum(np.ix_(*pages))]
            start = shard.offset_bytes + page_ids * shard.geometry.page_stride_bytes + sum(np.ix_(*offsets))
            expected = label(wanted.name, wanted.element_bytes, *grid)
            content = side.memory[rank.rank, shard.region]
            got = content[start[..., None] + np.arange(wanted.element_bytes)]
            assert got.shape == expected.shape, (wanted.name, got.shape, expected.shape)
            wrong = (got != expected).any(axis=-1)
            assert not wrong.any(), (
                f"rank {rank.rank}, {wanted.name}: {int(wrong.sum())} of {wrong.size} cells elsewhere, the first at "
                f"{[int(c.reshape(-1)[i]) for c, i in zip(grid, np.argwhere(wrong)[0], strict=True)]}"
            )
            seen += wrong.size
    return seen


def request(src: Side, dst: Side, num_tokens: int, intervals: Sequence[tuple[int, int]] | None = None) -> Request:
    """All tokens of a request, or some of them, into pages that hold nothing yet."""
    return Request(
        {name: PageTable(pages, num_tokens) for name, pages in src.tables.items()},
        {name: PageTable(pages, num_tokens) for name, pages in dst.tables.items()},
        {
            group.name: _clipped(dst.layout, group.name, num_tokens, intervals or [(0, num_tokens)], src.layout)
            for group in dst.layout.groups
        },
        {name: np.array(pages, dtype=np.int64) for name, pages in dst.tables.items()},
    )


def _clipped(
    dst: EngineLayout, group: str, num_tokens: int, intervals: Sequence[tuple[int, int]], src: EngineLayout
) -> list[tuple[int, int]]:
    """A ring gives its last tokens only: as many as both rings hold."""
    if not _is_ring(dst, group):
        return list(intervals)
    fields = {s.field for rank in dst.ranks for s in rank.shards if s.geometry.group == group}
    groups = {s.geometry.group for rank in src.ranks for s in rank.shards if s.field in fields}
    spans = [src.group_by_name[name].tokens_per_page for name in groups] + [dst.group_by_name[group].tokens_per_page]
    return [(max(0, num_tokens - min(span for span in spans if span)), num_tokens)]


def transfer(src: Side, dst: Side, num_tokens: int, rng: np.random.Generator) -> None:
    """Move everything, and look for the labels at the destination: by our addresses and through its views."""
    run(src, dst, num_tokens, rng)
    check_addresses(dst, num_tokens)
    read(dst, num_tokens)


def run(src: Side, dst: Side, num_tokens: int, rng: np.random.Generator) -> None:
    """Move everything into memory of random bytes, and compare with the oracle."""
    routes = compile_all(src.layout, dst.layout)
    for content in dst.memory.values():
        content[:] = rng.integers(0, 256, content.size, dtype=np.uint8)
    asked = request(src, dst, num_tokens)
    poison_new_pages(dst.layout, dst.memory, asked)
    src_before = {place: content.copy() for place, content in src.memory.items()}
    expected = oracle_transfer(src.layout, dst.layout, src.memory, dst.memory, asked)
    got = run_transfer(src.layout, dst.layout, routes, asked, src.memory, dst.memory)
    assert differing_bytes(expected, got) == {}
    assert differing_bytes(src_before, src.memory) == {}
    for place, content in dst.memory.items():
        content[:] = got[place]


def reshard(src: Side, dst: Side, num_tokens: int, seed: int = 0) -> None:
    """The whole way for one pair of engines."""
    rng = np.random.default_rng(seed)
    for side in (src, dst):
        give_pages(side, num_tokens, rng)
    write(src, num_tokens)
    assert check_addresses(src, num_tokens)
    transfer(src, dst, num_tokens, rng)


def reshard_over_nixl(src: Side, dst: Side, num_tokens: int, seed: int = 0) -> int:
    """The same with a NIXL agent per rank, through the memory of the views themselves; returns the bytes that were read."""
    rng = np.random.default_rng(seed)
    for side in (src, dst):
        give_pages(side, num_tokens, rng)
    write(src, num_tokens)
    assert check_addresses(src, num_tokens)
    for content in dst.memory.values():
        content[:] = rng.integers(0, 256, content.size, dtype=np.uint8)
    asked, routes, num_bytes = request(src, dst, num_tokens), compile_all(src.layout, dst.layout), 0
    with contextlib.ExitStack() as stack:
        agents = {}
        for side in (src, dst):
            for rank in side.layout.ranks:
                agent = stack.enter_context(contextlib.closing(NixlTransport(f"{side.layout.engine}-{rank.rank}")))
                agent.register([MemoryRegion(region.address, region.size_bytes) for region in rank.regions])
                agents[side.layout.engine, rank.rank] = agent
        for route in routes:
            mine = agents[dst.layout.engine, route.dst_rank]
            names = {rank: f"{src.layout.engine}-{rank}" for rank in route.src_ranks}
            for rank, name in names.items():
                mine.add_peer(name, agents[src.layout.engine, rank].metadata())
            num_bytes += pull(Mover(mine, HostMemory(), names), route, asked, dst.layout).num_read_bytes
    check_addresses(dst, num_tokens)
    read(dst, num_tokens)
    return num_bytes


def refused(info: str, make: Callable[[], Any]) -> None:
    """It raises a LayoutError with all of these facts, which are separated by bars."""
    with pytest.raises(LayoutError) as caught:
        make()
    for fact in info.split("|"):
        assert fact in str(caught.value)
