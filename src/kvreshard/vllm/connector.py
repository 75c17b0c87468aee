"""`ReshardConnector`, the class that vLLM loads: passes each hook on to the scheduler side or the worker side.

    --kv-transfer-config '{"kv_connector":"ReshardConnector","kv_role":"kv_both"}'

The scheduler's process makes a `SchedulerSide`, every rank a `WorkerSide`. Loads are asynchronous; nothing is saved layer by
layer. The hybrid memory allocator is supported (`SupportsHMA`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvreshard.vllm.handshake import RankPart
from kvreshard.vllm.metrics import ReshardPromMetrics, ReshardStats
from kvreshard.vllm.options import read_options
from kvreshard.vllm.scheduler import SchedulerSide
from kvreshard.vllm.start_check import check_start
from kvreshard.vllm.step_metadata import ReshardMetadata
from kvreshard.vllm.versions import release
from kvreshard.vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class ReshardConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's hooks.

    What a hook means is in vLLM's base class, what it does here in the method of `SchedulerSide` or `WorkerSide` that it calls.
    """

    _cache_hit_source = release().hit_source()

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = vllm_config.kv_transfer_config
        check_start(vllm_config)
        options = read_options(config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config, config.engine_id, options)
            self._side: SchedulerSide | WorkerSide = self._scheduler
        else:
            self._side = self._worker = WorkerSide(vllm_config, kv_cache_config, config.engine_id, options)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads outside tokens, where there are heads: a split by heads is then one piece per page. Other layouts work too."""
        if vllm_config.model_config is None or vllm_config.model_config.use_mla:
            return None
        return "LBHNC"

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A load also restores states that lag behind a deeper prefix hit of attention."""
        return True

    # Scheduler side

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Every transferred group: a load fills the request's own blocks, not blocks found by hash."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Request) -> None:
        self._scheduler.arrive(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._scheduler.count_loadable(request, num_computed_tokens)
        return count, bool(count)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._scheduler.allocate(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._scheduler.take_metadata(
            scheduler_output.num_scheduled_tokens,
            scheduler_output.finished_req_ids,
            scheduler_output.preempted_req_ids or (),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.on_worker_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finish(request, block_ids)

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler.bind(kv_cache_manager)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_commands

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        # By (pipeline rank, tensor rank).
        self._scheduler.set_ranks({place: m for place, m in metadata.items() if isinstance(m, RankPart)})

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """With UCX: whether memory can be registered anew was not tried with other backends of NIXL."""
        return read_options(kv_transfer_config.kv_connector_extra_config).backend == "UCX"

    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's part of the engine's metadata; None in a replica."""
        return self._worker.part

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Before the step computes anything, which `start_load_kv` does not precede."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, ReshardMetadata):
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if isinstance(self._connector_metadata, ReshardMetadata):
            self._worker.submit(self._connector_metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.collect()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.take_metadata()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The counts of this process since the last step."""
        return self._side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Counts from another process, or empty ones."""
        return ReshardStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return ReshardPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: vLLM schedules a request when its load is done."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to save: readers read the pages in place, some of them already now."""
        self._worker.end_layer(layer_name)

    def finish_forward(self) -> None:
        """The target model has computed the step."""
        self._worker.end_step()

    def wait_for_save(self) -> None:
        """Nothing is saved, but the draft model's cache must be written: see `WorkerSide.wait_for_draft`."""
        self._worker.end_step()
        if isinstance(self._connector_metadata, ReshardMetadata) and self._connector_metadata.waits_for_draft:
            self._worker.wait_for_draft()

    def shutdown(self) -> None:
        """End threads, sockets and the agent."""
        self._side.close()
