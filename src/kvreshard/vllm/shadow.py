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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from kvreshard.model import wire
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import Load
from kvreshard.session.engine_metadata import RankMetadata, decode_engine_metadata, encode_engine_metadata
from kvreshard.session.lease import Lease
from kvreshard.tools.shadow import EndedLoad, ShadowJudge, ShadowLoad
from kvreshard.tools.shadow_record import RecordingAgent
from kvreshard.vllm.compatibility import read_compatibility
from kvreshard.vllm.consumer import Consumer
from kvreshard.vllm.describe import describe_rank
from kvreshard.vllm.describe.place import read_place
from kvreshard.vllm.handshake import EngineHandshake, RankPart
from kvreshard.vllm.options import Options, read_options
from kvreshard.vllm.outcomes import OutcomeLog
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.requests import count_settled, read_config
from kvreshard.vllm.sources import SourceHosts
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
# The shadow holds no blocks: nobody acquires its leases.
NO_SLOT, NO_WORD = 0, 1


@dataclass(slots=True)
class ShadowCommands:
    """What the shadow's workers get in one step."""

    loads: list[ShadowLoad] = field(default_factory=list)
    engine_metadata: bytes | None = field(default=None, repr=False)


class ShadowScheduler:
    """The shadow in the scheduler's process: the same requests as commands, which only the shadow's workers get."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options) -> None:
        self._config = read_config(vllm_config, kv_cache_config)
        self._is_producer = bool(vllm_config.kv_transfer_config.is_kv_producer)
        self._handshake = EngineHandshake(vllm_config, options)
        self._producer = Producer(engine, self._handshake.key, self._config, lease_s=1.0, num_slots=1)
        self._fallback = ""
        self._log = OutcomeLog(self._note)
        # In shadow mode prompts are not compared: no rank asks for keys, and NixlConnector does not compare them either.
        self._consumer = Consumer(
            engine,
            self._handshake.key,
            self._config,
            self._log,
            hosts=SourceHosts(options.source_hosts),
            is_shadow=True,
        )
        self._counts: dict[str, tuple[int, int, int]] = {}
        self._commands = ShadowCommands()

    def set_ranks(self, parts: Mapping[tuple[int, int], RankPart]) -> None:
        """Make the engine's metadata, and hand it out beside NixlConnector's own listener."""
        engine_metadata = self._handshake.make_engine_metadata(parts)
        self._commands.engine_metadata = encode_engine_metadata(engine_metadata)
        if self._is_producer:
            self._producer.address = self._handshake.listen(engine_metadata, default_port=0)

    def arrive(self, request: Request, params: Mapping[str, Any]) -> None:
        """A request whose prefill was done elsewhere."""
        for _ in self._consumer.arrive(request, params):
            pass  # no lease is renewed: NixlConnector has its own

    def count(self, request: Request, num_computed: int, theirs: int | None) -> None:
        """How many tokens either would load."""
        self._fallback = ""
        ours = self._consumer.count_loadable(request, num_computed)
        self._counts[request.request_id] = ours or 0, theirs or 0, num_computed

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """NixlConnector will load `num_external` tokens into these blocks."""
        ours, theirs, num_computed = self._counts.pop(request.request_id, (0, num_external, 0))
        commands = list(self._consumer.allocate(request, blocks, ours))
        load = next((command for command in commands if isinstance(command, Load)), None)
        # Commands without a load release the source: all but the last token, which is computed in any case, is here.
        is_served = load is not None or (commands and not self._fallback)
        why = "" if is_served else f"it would be computed here ({self._fallback or 'no parameters of ours'})"
        lost = self._find_lost(request, blocks, num_computed + num_external)
        self._commands.loads.append(ShadowLoad(load, request.request_id, ours, theirs, why, lost))

    def _find_lost(self, request: Request, blocks: KVCacheBlocks, num_tokens: int) -> str:
        """What vLLM lacks when it computes the last token again, after a load of all of them (docs/design/0024)."""
        if num_tokens < request.num_tokens:
            return ""
        for group in self._config.groups:
            token = group.find_lost(blocks.get_block_ids()[group.index], num_tokens)
            if token is not None:
                return f"token {num_tokens - 1} attends to token {token}, for which group {group.name} has no page any more"
        return ""

    def describe(self, request: Request, block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """The shadow's parameters of a finished prefill; None if there are none."""
        if count_settled(request) < 1:
            return None
        lease = Lease(request.request_id, NO_SLOT, NO_WORD)
        prefill = self._producer.describe(request, block_ids, count_settled(request), lease)
        return None if prefill is None else self._producer.write(prefill)

    def ended(self, request: Request) -> None:
        """The request is over."""
        self._counts.pop(request.request_id, None)
        for _ in self._consumer.ended(request.request_id):
            pass  # no lease is released: NixlConnector has its own

    def take_commands(self) -> ShadowCommands:
        """This step's commands."""
        self._log.flush()
        commands, self._commands = self._commands, ShadowCommands()
        return commands

    def close(self) -> None:
        """Stop listening."""
        self._handshake.close()

    def _note(self, counter: str, cause: str, _amount: int) -> None:
        if counter == "fallbacks":
            self._fallback = cause


class ShadowWorker:
    """The shadow in a rank's process: describes the rank, records what NixlConnector's `worker` posts, and hands ended loads to the judge.

    `part`: this rank's part of the engine's metadata, after `register`.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options, worker: Any) -> None:
        self._vllm_config, self._kv_cache_config, self._engine = vllm_config, kv_cache_config, engine
        self.part: RankPart | None = None
        self._worker, self._agent = worker, RecordingAgent(worker.nixl_wrapper)
        self._loads: dict[str, ShadowLoad] = {}
        self._judge = ShadowJudge(
            engine,
            handshake_timeout_s=options.handshake_timeout_s,
            keys=options.keys,
            allow_mismatch=options.allow_mismatch,
            report_file=options.shadow_report_file,
        )
        self._record()

    def _record(self) -> None:
        """Record what NixlConnector's worker posts (vLLM 0.32.0, `nixl/pull_worker.py`, `_read_blocks`)."""
        worker, agent = self._worker, self._agent
        worker.nixl_wrapper = agent
        read_blocks = worker._read_blocks

        def recorded(*args: Any, **kwargs: Any) -> Any:
            agent.current = kwargs.get("request_id")
            try:
                return read_blocks(*args, **kwargs)
            finally:
                agent.current = None

        worker._read_blocks = recorded

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the caches. Raises LayoutError."""
        place = read_place(self._vllm_config)
        self._judge.rank = place.rank
        if place.is_replica:
            return
        part = describe_rank(
            engine=self._engine,
            vllm_config=self._vllm_config,
            kv_cache_config=self._kv_cache_config,
            kv_caches=kv_caches,
            place=place,
        )
        # Without a NIXL agent: a peer's shadow only reads the layout.
        self.part = RankPart(
            wire.encode(part), RankMetadata(place.rank, b"", 0, 0), read_compatibility(self._vllm_config)
        )

    def add_commands(self, commands: ShadowCommands) -> None:
        """Keep this step's loads."""
        if commands.engine_metadata is not None:
            self._judge.introduce(decode_engine_metadata(commands.engine_metadata))
        self._loads.update((load.request, load) for load in commands.loads)

    def ended(self, received: set[str], failed: set[str]) -> None:
        """NixlConnector has ended these loads: have them judged."""
        for request in received | failed:
            load = self._loads.pop(request, None)
            posted = self._agent.take(request)
            if load is None:
                continue
            remote = "" if load.load is None else load.load.remote.engine
            agents = {name: rank for rank, name in (self._worker._remote_agents.get(remote) or {}).items()}
            rearranges = bool(getattr(self._worker, "enable_permute_local_kv", False))
            self._judge.submit(EndedLoad(load, posted, agents, request in failed, rearranges))

    def close(self) -> None:
        """End the thread."""
        self._judge.close()


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
