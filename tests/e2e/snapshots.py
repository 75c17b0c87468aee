"""How are a rank's pages of one request kept for later comparison?

In the folder of an engine, per rank:

- `rankR.json`: the registered tensors (address, shape, strides, dtype), the cache groups, and why `kvreshard.vllm` could
  not describe the rank, if it could not;
- `rankR.layout`: the rank's `EngineLayout` in the wire form, by `kvreshard.vllm.describe`;
- `WHEN-REQUEST-rankR.npz`: block ids per group, tokens, and every page's bytes with their addresses.

Bytes are kept by address, so that a layout alone is enough to read them; `tests.e2e.logical` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NULL_BLOCK = 0
DATA_PARALLEL_STEP = 100
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Held:
    """What a scheduler knows of a request: block ids per cache group, in the order of the scheduler's groups.

    `num_tokens`: tokens that the pages hold. `loaded_tokens`: how many of them were to come from another engine.
    """

    request_id: str
    block_ids: tuple[tuple[int, ...], ...]
    num_tokens: int
    loaded_tokens: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's pages of one request. `starts` are ascending addresses; run i is `content[offsets[i]:offsets[i + 1]]`."""

    rank: int
    held: Held
    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    content: Bytes

    def read(self, addresses: NDArray[np.int64]) -> Bytes:
        """The byte at each address. Raises KeyError for an address in no page of the request."""
        run = np.searchsorted(self.starts, addresses, side="right") - 1
        inside = addresses - self.starts[run]
        if (run < 0).any() or (inside >= (self.offsets[1:] - self.offsets[:-1])[run]).any():
            raise KeyError(f"rank {self.rank}: {self.held.request_id} has no page at some of the addresses asked for")
        return self.content[self.offsets[run] + inside]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """What `rankR.json` says."""

    rank: int
    layers: Mapping[str, Any]
    groups: list[Mapping[str, Any]]
    layout: bytes | None
    refusal: str | None


def write_layout(folder: Path, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """Called in a worker, when it has its caches."""
    rank = global_rank(vllm_config)
    layers = {
        name: {
            "address": tensor.data_ptr(),
            "shape": list(tensor.shape),
            "strides": list(tensor.stride()),
            "dtype": str(tensor.dtype),
            "storage_address": tensor.untyped_storage().data_ptr(),
            "storage_bytes": tensor.untyped_storage().nbytes(),
        }
        for name, tensor in kv_caches.items()
    }
    numbers = {index: number for number, index in enumerate(kv_cache_config.transfer_group_ids)}
    groups = [
        {
            "name": f"g{numbers[index]}" if index in numbers else None,
            "layers": list(group.layer_names),
            "spec": str(group.kv_cache_spec),
            "block_size": int(group.kv_cache_spec.block_size),
            "state_mode": getattr(group.kv_cache_spec, "mamba_cache_mode", None),
            "chunk_tokens": getattr(group.kv_cache_spec, "attention_chunk_size", None),
        }
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
    ]
    refusal = None
    try:
        from kvreshard.model import wire
        from kvreshard.vllm.describe import describe_rank
        from kvreshard.vllm.describe.place import read_place

        layout = describe_rank(
            engine="recorded",
            vllm_config=vllm_config,
            kv_cache_config=kv_cache_config,
            kv_caches=kv_caches,
            place=read_place(vllm_config),
        )
        (folder / f"rank{rank}.layout").write_bytes(wire.encode(layout))
    except Exception as error:  # noqa: BLE001  the engine must run, and the test shows it
        refusal = f"{type(error).__name__}: {error}"
    about = {"rank": rank, "layers": layers, "groups": groups, "refusal": refusal}
    (folder / f"rank{rank}.json").write_text(json.dumps(about, indent=1))


def write_pages(
    folder: Path, when: str, held: Held, vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]
) -> None:
    """Called in a worker: all pages of the request, of every layer of their groups, each address once."""
    spans: dict[int, int] = {}
    for group, blocks in zip(kv_cache_config.kv_cache_groups, held.block_ids, strict=True):
        for layer in group.layer_names:
            tensor = kv_caches.get(layer)
            if tensor is None:
                continue
            # With kernel blocks inside a page, the view has more blocks than the pool has pages.
            ratio = tensor.shape[0] // kv_cache_config.num_blocks
            for block in set(blocks) - {NULL_BLOCK}:
                for kernel_block in range(block * ratio, (block + 1) * ratio):
                    start, size = _span(tensor, kernel_block)
                    spans[start] = max(size, spans.get(start, 0))
    starts = np.array(sorted(spans), dtype=np.int64)
    sizes = np.array([spans[start] for start in starts.tolist()], dtype=np.int64)
    runs = [_memory(start, size) for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)]
    header = json.dumps([held.request_id, held.block_ids, held.num_tokens, held.loaded_tokens]).encode()
    target = folder / f"{when}-{held.request_id}-rank{global_rank(vllm_config)}.npz"
    partial = target.with_suffix(".tmp")
    with partial.open("wb") as file:
        np.savez(
            file,
            held=np.frombuffer(header, np.uint8),
            starts=starts,
            offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            content=np.concatenate(runs) if runs else np.zeros(0, np.uint8),
        )
    partial.rename(target)


def _span(tensor: Any, block: int) -> tuple[int, int]:
    """Address and length of what one block of a layer's view spans."""
    item = tensor.element_size()
    steps = zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr() + block * tensor.stride(0) * item, (last + 1) * item


def _memory(address: int, size: int) -> Bytes:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8).copy()


def global_rank(vllm_config: Any) -> int:
    """Number of this worker: pipeline-major, and `DATA_PARALLEL_STEP` higher per data-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp = get_tp_group()
    data_parallel = int(vllm_config.parallel_config.data_parallel_index)
    return int(data_parallel * DATA_PARALLEL_STEP + get_pp_group().rank_in_group * tp.world_size + tp.rank_in_group)


def read_compatibility(folder: Path) -> list[RankInfo]:
    """All ranks of an engine, by number."""
    found = []
    for path in sorted(folder.glob("rank*.json")):
        about = json.loads(path.read_text())
        layout = path.with_suffix(".layout")
        content = layout.read_bytes() if layout.exists() else None
        found.append(RankInfo(about["rank"], about["layers"], about["groups"], content, about["refusal"]))
    return sorted(found, key=lambda facts: facts.rank)


def read_snapshots(folder: Path, when: str, request_id: str) -> list[Snapshot]:
    """Every rank's snapshot of the request that the test called `request_id`; vLLM appends letters of its own."""
    found = []
    for path in folder.glob(f"{when}-{request_id}-*rank*.npz"):
        with np.load(path) as file:
            name, blocks, tokens, loaded = json.loads(file["held"].tobytes())
            held = Held(name, tuple(tuple(ids) for ids in blocks), tokens, loaded)
            rank = int(path.stem.rpartition("-rank")[2])
            found.append(Snapshot(rank, held, file["starts"], file["offsets"], file["content"]))
    return sorted(found, key=lambda snapshot: snapshot.rank)
