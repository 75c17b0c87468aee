"""The scheduler's side of the connector: vLLM's hooks on one side, commands for the ranks on the other.

Every rank gets the same commands, once per engine step; block ids are the same on all of them. The engine's engine metadata, made of what
every rank says about itself, goes out with the first. What a request's life looks like is in `producer` and `consumer`; a
`kv_both` engine is both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvreshard.model.logs import get_logger
from kvreshard.session.commands import Command, Failure, Publish
from kvreshard.session.engine_metadata import encode_engine_metadata
from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.admission import Admission
from kvreshard.vllm.consumer import Consumer
from kvreshard.vllm.deadlock import DeadlockDetector
from kvreshard.vllm.draft import has_draft
from kvreshard.vllm.groups import read_groups
from kvreshard.vllm.handshake import EngineHandshake, RankPart
from kvreshard.vllm.idleness import Idleness
from kvreshard.vllm.metrics import ReshardStats
from kvreshard.vllm.options import Options
from kvreshard.vllm.partial_loads import PartialLoads
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.quarantine import Quarantine
from kvreshard.vllm.refusal import refuse
from kvreshard.vllm.requests import count_backoff, needs_whole_prompts, read_placeholders, read_positions, read_sizes
from kvreshard.vllm.source_hosts import SourceHosts

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


@dataclass
class ReshardMetadata(KVConnectorMetadata):
    """What the ranks are told in one step. `engine_metadata`: the engine's own, once. `is_idle`: nothing is computed in this step or in
    another that is still under way, so that a rank may wait a moment for its loads. `waits_for_draft`: a prefill may end with this step,
    and the engine has a draft model (`WorkerSide.wait_for_draft`).
    """

    commands: list[Command] = field(default_factory=list)
    engine_metadata: bytes | None = field(
        default=None, repr=False
    )  # it holds the engine's key, and vLLM logs steps that fail
    is_idle: bool = False
    waits_for_draft: bool = False


@dataclass
class ReshardWorkerMetadata(KVConnectorWorkerMetadata):
    """What ranks tell the scheduler beside their results. As (request, rank): whose pages a read of that rank may still write, and whose
    it no longer can. `keys`: by request, of sources that have been met. `unmet`: of those that could not be met, why.
    """

    quarantined: set[tuple[str, int]] = field(default_factory=set)
    settled: set[tuple[str, int]] = field(default_factory=set)
    keys: dict[str, bytes] = field(default_factory=dict, repr=False)
    unmet: dict[str, Failure] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return not (self.quarantined or self.settled or self.keys or self.unmet)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReshardWorkerMetadata:
        """Of all ranks together."""
        if not isinstance(other, ReshardWorkerMetadata):
            return self
        return ReshardWorkerMetadata(
            self.quarantined | other.quarantined,
            self.settled | other.settled,
            self.keys | other.keys,
            self.unmet | other.unmet,
        )


def tell_hosts(options: Options) -> None:
    """A line in the log where any host may be named as a source."""
    if not options.source_hosts:
        is_guarded = options.curve_secret_key_file is not None
        tell = logger.info if is_guarded else logger.warning
        tell(
            "kvreshard: requests may name any host as their source, and the ranks contact it%s; list the hosts of the prefill engines in "
            "source_hosts, or let only the router send kv_transfer_params (SECURITY.md)",
            ", though only an engine with a trusted key is read from" if is_guarded else "",
        )


class SchedulerSide:
    """One per engine, in the process of vLLM's scheduler."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options) -> None:
        parallel = vllm_config.parallel_config
        groups = read_groups(kv_cache_config, parallel.decode_context_parallel_size)
        backoff = count_backoff(vllm_config, any(group.is_state for group in groups))
        adapters, positions = Adapters(vllm_config.lora_config), read_positions(vllm_config)
        self._handshake = EngineHandshake(vllm_config, engine, options)
        self._is_producer = bool(vllm_config.kv_transfer_config.is_kv_producer)
        self._producer = Producer(
            engine,
            self._handshake.key,
            groups,
            read_sizes(parallel),
            backoff,
            options.kv_lease_duration,
            options.lease_slots,
            adapters,
            positions,
        )
        self.stats = ReshardStats()
        me = engine, self._handshake.instance_id
        self._consumer = Consumer(
            me,
            groups,
            backoff,
            lambda cause: self.stats.count("fallbacks", cause),
            whole_prompts=needs_whole_prompts(vllm_config),
            may_load=bool(vllm_config.kv_transfer_config.is_kv_consumer),
            adapters=adapters,
            own_key=self._handshake.key,
            partial_loads=PartialLoads(self._count_partial),
            hosts=SourceHosts(options.source_hosts),
            positions=positions,
            placeholders=read_placeholders(vllm_config),
        )
        if vllm_config.kv_transfer_config.is_kv_consumer:
            tell_hosts(options)
        self._metadata = ReshardMetadata()
        self._quarantine = Quarantine()
        self._admission = Admission()
        self._manager: KVCacheManager | None = None
        self._idleness = Idleness(parallel.data_parallel_size)
        self._deadlock = DeadlockDetector(options.kv_lease_duration)
        self._has_draft = has_draft(vllm_config)

    def set_ranks(self, parts: Mapping[tuple[int, int], RankPart]) -> None:
        """What every rank says of itself: make the engine's engine metadata, and listen if others read from here."""
        engine_metadata = self._handshake.make_engine_metadata(parts)
        self._metadata.engine_metadata = encode_engine_metadata(engine_metadata)
        if self._is_producer:
            self._producer.address = self._handshake.listen(engine_metadata)

    def arrive(self, request: Request) -> None:
        """A new request."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._producer.arrive(request)
        elif params.get("do_remote_prefill") and request.abort_immediately:
            self._add(self._consumer.clean_up(params))
        elif params.get("do_remote_prefill"):
            self._add(self._consumer.arrive(request, params))

    def count_loadable(self, request: Request, num_computed: int) -> int | None:
        """Tokens that the ranks can load beyond what is computed; None: it cannot be said yet, go on with the next request."""
        params = request.kv_transfer_params or {}
        count = self._consumer.count_loadable(request, num_computed) if params.get("do_remote_prefill") else 0
        is_behind = self._admission.puts_behind(request.request_id, count or 0)
        if is_behind or count is None:
            return None
        reason = self._consumer.missing_items.why_refused(request, num_computed, count)
        if reason:
            self.stats.count("refusals")
            refuse(request, reason)
            return None
        return count

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Blocks have been allocated."""
        self._admission.got_blocks(request.request_id)
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._add(self._producer.schedule(request))
        elif params.get("do_remote_prefill"):
            self._add(self._consumer.allocate(request, blocks, num_external))
            self._keep_from_cache(request, blocks)
            params["do_remote_prefill"] = False  # one load per request, also if it is preempted later

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: (whether its blocks stay, parameters for the router)."""
        self._admission.end(request.request_id)
        self._add(self._consumer.abort(request.request_id))
        params, command = self._producer.finish(request, block_ids)
        if command is not None:
            self._metadata.commands.append(command)
        return isinstance(command, Publish), params

    @property
    def has_commands(self) -> bool:
        """Whether the ranks have not been told something yet, so that vLLM makes a step, though nothing can be computed.

        A paused engine makes none for requests that arrive: their leases would run out, since no rank knows that it shall renew them.
        """
        return bool(self._metadata.commands)

    def take_metadata(self, num_scheduled: Mapping[str, int], finished: Iterable[str]) -> ReshardMetadata:
        """Everything that the ranks have to know by now. Tokens of each request in this step; requests `finished` before it."""
        scheduled, is_looking = tuple(num_scheduled), self._admission.is_looking
        is_still = not scheduled and is_looking and self._producer.is_publishing and self._consumer.is_waiting
        if self._deadlock.step(is_still):
            self._add(self._consumer.give_up_one())
        self._give_up_what_never_fits()
        metadata, self._metadata = self._metadata, ReshardMetadata()
        metadata.is_idle = self._idleness.step(scheduled, finished)
        metadata.waits_for_draft = self._has_draft and self._producer.may_finish(num_scheduled)
        self._producer.last_pages.keep()
        return metadata

    def hear(self, output: KVConnectorOutput) -> None:
        """What the ranks have done."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, ReshardWorkerMetadata):
            self._hear_quarantine(meta)
            if meta.keys or meta.unmet:
                self._add(self._consumer.meet(meta.keys, meta.unmet))
        for request_id in output.failed_recving or ():
            if self._consumer.fail(request_id):
                self._admission.fail(request_id)
        for request_id in output.finished_recving or ():
            self._add(self._consumer.ended(request_id))
        if output.finished_sending:
            # Ranks know leases by their names; vLLM goes on with what is in the output now.
            output.finished_sending = {self._producer.find_request(lease) for lease in output.finished_sending}
            for request_id in output.finished_sending:
                self._producer.freed(request_id)

    def reset(self) -> bool:
        """vLLM's cache was reset; False while loads are under way that may bring back what was there before."""
        self._add(self._producer.reset())
        self._add(self._consumer.reset())
        return not self._consumer.is_loading

    def bind(self, manager: KVCacheManager) -> None:
        """The engine's cache manager."""
        self._manager = manager
        self._producer.last_pages.manager = manager
        self._quarantine.bind(manager)

    def close(self) -> None:
        """Stop listening."""
        self._handshake.close()

    def _add(self, commands: Iterable[Command]) -> None:
        self._metadata.commands.extend(commands)

    def _count_partial(self, cause: str, num_tokens: int) -> None:
        self.stats.count("partial_loads", cause)
        self.stats.count("tokens_not_loaded", cause, num_tokens)

    def _hear_quarantine(self, meta: ReshardWorkerMetadata) -> None:
        """Counted here, where ranks come together: the same request may be quarantined on each of them."""
        num_requests, num_kept = self._quarantine.keep(meta.quarantined)
        num_freed = self._quarantine.give_back(meta.settled)
        for counter, label, amount in (
            ("quarantined", "", num_requests),
            ("quarantined_blocks", "kept", num_kept),
            ("quarantined_blocks", "freed", num_freed),
        ):
            if amount:
                self.stats.count(counter, label, amount)

    def _give_up_what_never_fits(self) -> None:
        pool = None if self._manager is None else self._manager.block_pool
        num_held = 0 if pool is None else pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is the null block
        never = self._admission.step(is_pool_free=num_held <= self._quarantine.num_blocks)
        if never is not None:
            self._add(self._consumer.give_up(never))

    def _keep_from_cache(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Blocks that a window leaves incomplete must not serve prefix hits: vLLM would take them for whole.

        vLLM caches a loaded request's blocks from `num_cached_block` on (0.32.0, `SingleTypeKVCacheManager.cache_blocks`).
        """
        if self._manager is None:
            return
        managers = self._manager.coordinator.single_type_managers
        for group, num_blocks in self._consumer.incomplete_blocks(request.request_id, blocks):
            cached = managers[group.index].num_cached_block
            cached[request.request_id] = max(cached.get(request.request_id, 0), num_blocks)
