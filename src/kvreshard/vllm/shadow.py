"""`ShadowConnector`: vLLM's own NixlConnector moves the cache, and this package compares it with what it would have done.

    --kv-transfer-config '{"kv_connector":"ShadowConnector","kv_role":"kv_producer"}'

It is a first step on a running fleet, on both sides of a pair:

1. every hook goes to NixlConnector, unchanged; each rank is described beside it;
2. a finished prefill's `kv_transfer_params` carry one more field, `kvreshard_shadow`: the parameters of `ReshardConnector`;
3. for each request that the decode side loads, a thread beside the engine's compiles the route, binds the request, and compares
   the copies with those that NixlConnector posted (`tools/shadow_report.py`). No byte of the cache is read or written.

The shadow cannot fail a request: its first error is logged, and it is silent from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvreshard.model.logs import fields, get_logger
from kvreshard.vllm.handshake import RankPart
from kvreshard.vllm.options import Options, read_options
from kvreshard.vllm.shadow_scheduler import ShadowCommands, ShadowScheduler
from kvreshard.vllm.shadow_worker import ShadowWorker
from kvreshard.vllm.start_check import check_outputs

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = get_logger(__name__)
Args = ParamSpec("Args")
Result = TypeVar("Result")

PARAMS = "kvreshard_shadow"
COMMANDS = "kvreshard_shadow"
STOPPED = "shadow: it stops comparing; NixlConnector goes on"


class ShadowHandshake(KVConnectorHandshakeMetadata):
    """NixlConnector's metadata of a rank, and this package's beside it."""

    def __init__(self, theirs: KVConnectorHandshakeMetadata, part: RankPart) -> None:
        self.theirs, self.part = theirs, part


class ShadowConnector(NixlPullConnector):
    """NixlConnector with a shadow in the scheduler's process and in each rank's. Every hook returns what NixlConnector returns."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_outputs(vllm_config)  # vLLM does this for NixlConnector by its name
        self._side: ShadowScheduler | ShadowWorker | None = None
        try:
            self._side = self._make_side(vllm_config, role, kv_cache_config)
        except Exception:
            logger.exception(STOPPED, extra=fields("shadow_stopped"))
        self._is_silent = self._side is None

    def _make_side(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> ShadowScheduler | ShadowWorker:
        extra = self.kv_transfer_config.kv_connector_extra_config
        options = read_options({name: extra[name] for name in extra.keys() & set(Options.__struct_fields__)})
        if role == KVConnectorRole.SCHEDULER:
            return ShadowScheduler(vllm_config, kv_cache_config, self.engine_id, options)
        return ShadowWorker(vllm_config, kv_cache_config, self.engine_id, options, self.connector_worker)

    def _shadow(
        self, method: Callable[Concatenate[Any, Args], Result], *args: Args.args, **kwargs: Args.kwargs
    ) -> Result | None:
        """Call a method of this process's side. None after an error, which is logged and not raised."""
        if self._is_silent:
            return None
        try:
            return method(self._side, *args, **kwargs)
        except Exception:
            self._is_silent = True
            logger.exception(STOPPED, extra=fields("shadow_stopped"))
            return None

    # Scheduler side

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if isinstance(params, dict) and params.get("do_remote_prefill") and params.get(PARAMS) is not None:
            self._shadow(ShadowScheduler.arrive, request, params[PARAMS])
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        self._shadow(ShadowScheduler.count, request, num_computed_tokens, found[0])
        return found

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            self._shadow(ShadowScheduler.allocate, request, blocks, num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        setattr(metadata, COMMANDS, self._shadow(ShadowScheduler.take_commands))
        return metadata

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        stays, params = super().request_finished_all_groups(request, block_ids)
        self._shadow(ShadowScheduler.ended, request)
        if stays and params is not None:
            shadow_params = self._shadow(ShadowScheduler.describe, request, block_ids)
            if shadow_params is not None:
                params[PARAMS] = shadow_params
        return stays, params

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        theirs = {place: m.theirs if isinstance(m, ShadowHandshake) else m for place, m in metadata.items()}
        super().set_xfer_handshake_metadata_pp_aware(theirs)
        parts = {place: m.part for place, m in metadata.items() if isinstance(m, ShadowHandshake)}
        if len(parts) == len(metadata):
            self._shadow(ShadowScheduler.set_ranks, parts)

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self._shadow(ShadowWorker.register, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        theirs, part = super().get_handshake_metadata(), getattr(self._side, "part", None)
        return theirs if theirs is None or part is None else ShadowHandshake(theirs, part)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        commands = getattr(self._connector_metadata, COMMANDS, None)
        if isinstance(commands, ShadowCommands):
            self._shadow(ShadowWorker.add_commands, commands)
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        self._shadow(ShadowWorker.ended, results.finished_recving or set(), results.failed_recving or set())
        return results

    def shutdown(self) -> None:
        if self._side is not None:
            self._side.close()
        super().shutdown()
