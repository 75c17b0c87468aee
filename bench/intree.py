"""vLLM's own NIXL connector for one pair of engines, outside an engine. For 0.32.0 and 0.33.0, whichever is imported.

Its class `NixlPullConnectorWorker` is imported unmodified and made without `__init__`, which wants a running engine. What
`__init__` and `register_kv_caches` would have found out is set from the same layout that kvreshard plans with:

1. `InTree(layout, rank, agent, addresses)`: regions, page lengths and strides, groups; then its own
   `register_local_xfer_handler`.
2. `meet`: its own `add_remote_agent`, once per source rank: mapping, splits, descriptors of both sides.
3. `read`: its own `_read_blocks_for_req`; with `post=False` everything up to, not including, `transfer`.

Its agent has the four threads that vLLM gives it and no progress thread, which favours it: on few cores a thread that spins takes the
core that is measured.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.held import Held
from kvreshard.model import EngineLayout, Rank
from kvreshard.model.tables import PageTable

ENGINE = "prefill"
KERNEL_TOKENS = 16
# Whoever asks without a rest takes a core from NIXL's threads, which do the work.
POLL_S = 0.0001
MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


@dataclass(frozen=True, slots=True)
class Pair:
    """What the in-tree class must be told of a model. `kernel_blocks`: kernel blocks per page, per engine."""

    total_heads: int
    src_tp: int
    dst_tp: int
    page_tokens: int
    is_mla: bool = False
    src_kernel_blocks: int = 1
    dst_kernel_blocks: int = 1
    mamba: Mapping[str, Any] | None = None


def regions_of(layout: EngineLayout, rank: Rank) -> list[tuple[int, int, int]]:
    """(offset, page bytes, page stride) of every region as the in-tree connector registers them: one per slab."""
    return [(slab.offset_bytes, slab.page_bytes, slab.page_stride_bytes) for slab in rank.slabs]


class InTree:
    """One decode rank of the in-tree connector."""

    def __init__(self, pair: Pair, layout: EngineLayout, rank: int, agent: Any, address: int) -> None:
        module = importlib.import_module(f"{MODULE}.pull_worker")
        kinds = importlib.import_module("vllm.v1.kv_cache_interface")
        utils = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils")
        stats = importlib.import_module(f"{MODULE}.stats")
        self._metadata = importlib.import_module(f"{MODULE}.metadata")
        self.pair, self.layout, self.held, self.agent = pair, layout, Held(agent), agent
        regions = regions_of(layout, layout.rank_by_number[rank])
        blocks, count = pair.dst_kernel_blocks, len(regions)
        num_blocks = layout.groups[0].num_pages * blocks
        bases = [address + offset for offset, _, _ in regions]
        worker = self.worker = object.__new__(module.NixlPullConnectorWorker)
        has_mamba = pair.mamba is not None
        spec_types = [
            kinds.MambaSpec if group.tokens_per_page is None else kinds.FullAttentionSpec for group in layout.groups
        ]
        # A hybrid's regions serve several groups: vLLM calls them shared, with -1.
        group_ids = [-1 if len(layout.groups) > 1 else 0] * count
        specs = [object.__new__(kind) for kind in spec_types]
        values: dict[str, Any] = {
            "engine_id": "decode", "tp_rank": rank, "nixl_wrapper": self.held, "device_id": 0, "block_size": pair.page_tokens // blocks,
            "num_blocks": num_blocks, "_logical_num_blocks": num_blocks // blocks,
            "_physical_blocks_per_logical_kv_block": blocks, "block_len_per_layer": [size // blocks for _, size, _ in regions],
            "block_stride_per_layer": [stride // blocks for _, _, stride in regions], "region_num_blocks": [num_blocks] * count,
            "region_group_ids": group_ids, "_uses_region_group_mapping": False, "num_regions": count,
            "num_descs": num_blocks * count, "region_mem_types": ["DRAM"] * count, "nixl_memory_type": "DRAM",
            "_mixed_mem_types": False, "_skip_dram_xfer": False, "_region_is_mla": [pair.is_mla] * count, "_has_mamba": has_mamba,
            "_conv_decomp": None, "_mamba_ssm_size": (0, 0), "_ssm_region_indices": list(range(count)) if has_mamba else [],
            "_ple_region_index": None, "_ple_group_index": None, "_scratch_region_indices": [], "_is_csa_linear": False,
            "_transfer_layer_names": (), "_transfer_layer_region_indices": (), "_transfer_layer_group_ids": (),
            "_group_spec_types": tuple(spec_types), "use_mla": pair.is_mla, "use_host_buffer": False, "_is_hma_required": False,
            "kv_cache_layout": "LBHNC", "backend_name": "FLASH_ATTN", "kv_transfer_config": SimpleNamespace(enable_permute_local_kv=False),
            "vllm_config": SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False)),
            "kv_cache_config": SimpleNamespace(
                transfer_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs]
            ),
            "enable_permute_local_kv": False, "enable_heterogeneous_attn_post_process": False, "pp_size": 1, "pcp_size": 1,
            "dcp_size": 1, "dcp_rank": 0, "world_size": pair.dst_tp, "region_names": [], "region_members": [],
            "_has_packed_cache": False, "kv_caches_base_addr": defaultdict(dict), "_remote_agents": defaultdict(dict),
            "tp_mappings": {}, "dst_num_blocks": {"decode": num_blocks}, "dst_region_num_blocks": {"decode": [num_blocks] * count},
            "dst_region_group_ids": {"decode": group_ids}, "dst_uses_region_group_mapping": {"decode": False},
            "dst_region_mem_types": {}, "dst_xfer_side_handles": defaultdict(dict), "src_xfer_handles_by_block_size": {},
            "src_blocks_data_by_block_size": {}, "src_xfer_handles_by_tp_ratio": {}, "_invalid_remote_engines": set(),
            "_engine_last_active": {}, "_bidirectional_kv_xfer_enabled": False, "_recving_transfers": defaultdict(list),
            "_recv_failures": set(), "_failed_recv_reqs": queue.Queue(), "xfer_stats": stats.NixlKVConnectorStats(),
            "_failed_remote_engines": set(), "_recving_metadata": {}, "_invalid_block_ids": queue.Queue(),
            # Of 0.33.0 only.
            "draft_tp_mappings": {}, "_head_sharded_draft_regions": set(), "_head_sharded_draft_kv_heads": None,
            "_packed_member_layouts": {}, "_layer_specs": {}, "_remote_registration_generations": {},
        }  # fmt: skip
        for name, value in values.items():
            setattr(worker, name, value)
        worker.kv_caches_base_addr["decode"][rank] = bases
        worker.transfer_topo = utils.TransferTopology(
            tp_rank=rank, tp_size=pair.dst_tp, block_size=worker.block_size, engine_id="decode", is_mla=pair.is_mla,
            total_num_kv_heads=1 if pair.is_mla else pair.total_heads, attn_backends=[], is_mamba=has_mamba,
        )  # fmt: skip
        if pair.mamba is not None:
            convolution = importlib.import_module(
                "vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils"
            )
            worker._conv_decomp = convolution.derive_mamba_conv_split(kinds.MambaSpec(**pair.mamba), pair.dst_tp)
            worker._mamba_ssm_size = worker._conv_decomp.ssm_sizes
        worker.src_xfer_handles_by_block_size[worker.block_size], worker.src_blocks_data = (
            worker.register_local_xfer_handler(worker.block_size)
        )

    @property
    def handshake_ranks(self) -> list[int]:
        """The source ranks that its own topology meets."""
        ranks: list[int] = self.worker.transfer_topo.handshake_target_ranks(self.pair.src_tp)
        return ranks

    def meet(self, src: EngineLayout, rank: int, native: bytes, address: int) -> None:
        """Its own handshake with one source rank, after the wire."""
        worker, blocks = self.worker, self.pair.src_kernel_blocks
        regions = regions_of(src, src.rank_by_number[rank])
        num_blocks = src.groups[0].num_pages * blocks
        name = worker.add_remote_agent(
            self._metadata.NixlAgentMetadata(
                engine_id=ENGINE, agent_metadata=native, kv_caches_base_addr=[address + offset for offset, _, _ in regions],
                device_id=0, num_blocks=num_blocks, block_lens=[size // blocks for _, size, _ in regions],
                block_strides=[stride // blocks for _, _, stride in regions], kv_cache_layout="LBHNC",
                block_size=worker.block_size, ssm_sizes=worker._mamba_ssm_size, attn_backend_name="FLASH_ATTN",
                physical_blocks_per_logical_kv_block=blocks, region_num_blocks=[num_blocks] * len(regions),
                region_group_ids=worker.region_group_ids,
            ),
            rank,
            self.pair.src_tp,
            1,
        )  # fmt: skip
        worker._remote_agents[ENGINE][0, rank] = name

    def forget(self) -> None:
        """Give back everything that `meet` made, so that it can be measured again."""
        worker = self.worker
        for handles in (
            worker.dst_xfer_side_handles.pop(ENGINE, {}).values(),
            *worker.src_xfer_handles_by_tp_ratio.values(),
        ):
            for handle in handles:
                self.agent.release_dlist_handle(handle)
        worker.src_xfer_handles_by_tp_ratio.clear()
        for agent in worker._remote_agents.pop(ENGINE, {}).values():
            self.agent.remove_remote_agent(agent)
        worker.transfer_topo.unregister_remote_engine(ENGINE)
        for of in (
            worker.tp_mappings,
            worker.dst_num_blocks,
            worker.dst_region_num_blocks,
            worker.dst_region_group_ids,
        ):
            of.pop(ENGINE, None)

    def read(self, src_tables: Sequence[Sequence[int]], dst_tables: Sequence[Sequence[int]], post: bool) -> list[Any]:
        """Its own reading of one request, per group in the layout's order; the transfer handles. `post`: start them."""
        local, remote = [list(table) for table in dst_tables], [list(table) for table in src_tables]
        where = self._metadata.RemoteMeta(remote, "", 0, ENGINE, "request")
        physical = self.worker._logical_to_kernel_block_ids(local, self.pair.dst_kernel_blocks)
        meta = self._metadata.ReqMeta(local, physical, self.pair.dst_tp, remote=where, awaiting_kvs=True)
        self.held.handles.clear()
        self.worker._read_blocks_for_req("request", meta)
        self.worker._recving_transfers.pop("request", None)
        handles = list(self.held.handles)
        if post:
            for handle in handles:
                self.agent.transfer(handle)
        return handles

    def wait(self, handles: Sequence[Any], timeout_s: float = 60.0) -> None:
        """Until all have arrived. Raises RuntimeError if one fails or does not settle."""
        deadline_s = time.monotonic() + timeout_s
        for handle in handles:
            while (state := self.agent.check_xfer_state(handle)) != "DONE":
                if state == "ERR" or time.monotonic() > deadline_s:
                    raise RuntimeError(f"in-tree transfer: {state}")
                time.sleep(POLL_S)
        self.release(handles)

    def release(self, handles: Sequence[Any]) -> None:
        """Free transfer handles."""
        for handle in handles:
            with contextlib.suppress(Exception):
                self.agent.release_xfer_handle(handle)


def tables_of(layout: EngineLayout, tables: Mapping[str, PageTable]) -> list[list[int]]:
    """Block lists per group, in the layout's order, as the in-tree scheduler hands them out."""
    return [np.asarray(tables[group.name].pages).tolist() for group in layout.groups]
