"""The scheduler side of the connector: turns vLLM's hooks into commands for the ranks.

Every rank gets the same commands, once per engine step; block ids are the same on all ranks. The engine's metadata, made of what every
rank reports about itself, goes out with the first step. `producer` and `consumer` show the life of a request; a `kv_both` engine is both.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import Cancel, Command, Failure, Load, Publish
from kvreshard.session.engine_metadata import encode_engine_metadata
from kvreshard.vllm.admission import Admission, DeadlockDetector, WantedBlocks
from kvreshard.vllm.consumer import Consumer
from kvreshard.vllm.describe.model_config import has_draft
from kvreshard.vllm.following import Following
from kvreshard.vllm.groups import blocks_to_compute, blocks_to_load
from kvreshard.vllm.handshake import EngineHandshake, RankPart
from kvreshard.vllm.idle import Idle
from kvreshard.vllm.metrics import ReshardStats
from kvreshard.vllm.options import Options
from kvreshard.vllm.outcomes import OutcomeLog
from kvreshard.vllm.params import names_source, transfer_of
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.quarantine import Quarantine
from kvreshard.vllm.requests import read_config, refuse
from kvreshard.vllm.sources import SourceHosts
from kvreshard.vllm.start_lines import log_open_sources, log_start, warn_of_policy
from kvreshard.vllm.step_metadata import ReshardMetadata, ReshardWorkerMetadata

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)

# Answers are withdrawn where a smaller share of the pool is free: running requests need blocks too, and vLLM preempts one that gets none.
MIN_FREE_SHARE = 0.1


class DelayedLoads:
    """Loads that wait for as many steps as may be under way beside the one in which they got their blocks.

    Where an engine only prefills, vLLM frees blocks that such a step may still write, and copies blocks on write from some that are free
    (0.32.0 and 0.33.0, `Scheduler.defer_block_free`). When vLLM schedules a step, at most `num_steps` before it have not ended
    (`EngineCore.step_with_batch_queue`).
    """

    def __init__(self, num_steps: int) -> None:
        self._steps: deque[list[Command]] = deque([] for _ in range(num_steps))

    def __bool__(self) -> bool:
        return any(self._steps)

    def step(self, commands: Sequence[Command]) -> list[Command]:
        """The commands that go out with this step. Of a step's own `commands`, loads and their cancellation wait."""
        if not self._steps:
            return list(commands)
        self._steps.append([command for command in commands if isinstance(command, Load | Cancel)])
        return [command for command in commands if not isinstance(command, Load | Cancel)] + self._steps.popleft()


class SchedulerSide:
    """The connector in the process of vLLM's scheduler, one per engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options) -> None:
        transfer_config, config = vllm_config.kv_transfer_config, read_config(vllm_config, kv_cache_config)
        self._handshake = EngineHandshake(vllm_config, options)
        self._vllm_config, self._options, self._config = vllm_config, options, config
        self._engine, self._has_instance = engine, False
        ends_requests = transfer_config.kv_load_failure_policy == "fail"
        self._warns_of_policy = ends_requests
        self.stats = ReshardStats()
        self._log = OutcomeLog(self.stats.count, ends_requests=ends_requests)
        # Requests whose leases ran out on some rank before they were read.
        self._expired: set[str] = set()
        key = self._handshake.key
        reads_back = options.bidirectional_kv_xfer
        self._listens = transfer_config.is_kv_producer or reads_back
        answer_lease_s = options.decoder_kv_blocks_ttl if reads_back else None
        self._producer = Producer(
            engine,
            key,
            config,
            options.kv_lease_duration,
            options.lease_slots,
            answer_lease_s,
            self._handshake.rendezvous,
        )
        self._consumer = Consumer(
            engine,
            key,
            config,
            self._log,
            hosts=SourceHosts(options.source_hosts),
            min_answer_tokens=options.kv_recompute_threshold if reads_back else None,
            following=Following(engine, options.keys, options.transfer_wait_s),
        )
        waits = reads_back and not config.may_load
        self._delayed = DelayedLoads(vllm_config.max_concurrent_batches - 1 if waits else 0)
        if config.may_load or reads_back:
            log_open_sources(options)
        if reads_back and ends_requests:
            warn_of_policy("the answer that it goes on from")
        # When requests arrived that name a source, and the gauges that were told last.
        self._arrived_s: dict[str, float] = {}
        self._gauges: dict[str, int] = {}
        self._metadata = ReshardMetadata()
        self._quarantine = Quarantine()
        self._admission, self._idle = Admission(), Idle()
        self._deadlock = DeadlockDetector(options.kv_lease_duration)
        # Whether a request has lacked blocks since an early load went on or was given up.
        self._stalled, self._lacks_blocks = DeadlockDetector(options.kv_lease_duration), False
        self._manager: KVCacheManager | None = None
        self._has_draft = has_draft(vllm_config)
        # Engines of one data-parallel group step together: one that waited would delay the others.
        self._may_be_idle = vllm_config.parallel_config.data_parallel_size == 1
        # A request that vLLM has asked about in this step, and not given blocks to.
        self._unserved: str | None = None
        # Requests that have arrived and not finished.
        self._alive: dict[str, Request] = {}
        # Of these, those that were ever scheduled: a step without tokens may have others under way beside it.
        self._computing: set[str] = set()

    def set_ranks(self, parts: Mapping[tuple[int, int], RankPart]) -> None:
        """Make the engine's metadata of all ranks' parts, and listen if other engines read from here.

        A second call begins another instance: the engine has slept, and its caches are in other memory now.
        """
        if self._has_instance:
            self._handshake.begin_instance()
            self._consumer.known.begin_instance(self._handshake.key)
            self._add(self._producer.begin_instance(self._handshake.key))
            logger.info(
                "engine %s is awake; its peers meet it anew",
                self._engine,
                extra=fields("engine_awake", engine=self._engine),
            )
        self._consumer.loadable.has_siblings = any(part.has_siblings for part in parts.values())
        engine_metadata = self._handshake.make_engine_metadata(parts)
        self._metadata.engine_metadata = encode_engine_metadata(engine_metadata)
        if self._listens:
            self._producer.address = self._handshake.listen(engine_metadata)
        if not self._has_instance:
            log_start(self._vllm_config, self._options, engine_metadata.decode_layout(), self._producer.address)
        self._has_instance = True

    def arrive(self, request: Request) -> None:
        """A new request."""
        if not isinstance(request.kv_transfer_params, dict | None):
            # A client may send anything under this name in `vllm_xargs`, and vLLM takes it for a map (0.32.0).
            self._log.ignored(request.request_id, request.kv_transfer_params)
            request.kv_transfer_params = None
        # Its own: in an engine without a process of its own, choices of one request share the map (`ParentRequest`).
        params = dict(request.kv_transfer_params or {})
        request.kv_transfer_params = params or request.kv_transfer_params
        self._alive[request.request_id] = request
        if params.get("do_remote_decode"):
            self._producer.arrive(request)
        self._idle.is_over()
        if transfer_of(params) and self._warns_of_policy and not params.get("do_remote_decode"):
            self._warns_of_policy = False
            warn_of_policy("its prefill, which is under way,")
        if names_source(params):
            self._arrived_s[request.request_id] = time.monotonic()
            found = (
                self._consumer.clean_up(params) if request.abort_immediately else self._consumer.arrive(request, params)
            )
            self._add(found)

    def count_loadable(self, request: Request, num_computed: int) -> int | None:
        """Tokens that the ranks can load beyond what is computed; None if that is not known yet: vLLM goes on with the next request."""
        count = self._consumer.count_loadable(request, num_computed)
        has_room = not count or self._has_room(request, num_computed + count)
        is_behind = self._admission.puts_behind(request.request_id, count or 0, has_room=has_room)
        self._lacks_blocks |= not has_room
        if is_behind or count is None:
            return None
        reason = self._consumer.missing_items.why_refused(request, num_computed, count)
        if reason:
            self.stats.count("refusals")
            refuse(request, reason)
            return None
        self._unserved = request.request_id
        # vLLM computes all of a prompt whose prefix hits it must not read; 0.30 would load it all the same.
        return 0 if request.get_skip_reading_prefix_cache() else count

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """vLLM has allocated blocks."""
        waiting = self._consumer.waiting.get(request.request_id)
        wanted = None
        if waiting is not None and num_external:
            wanted = self._wanted(request, waiting.num_computed + num_external)
        self._admission.got_blocks(request.request_id, wanted)
        self._unserved = None
        self._add(self._producer.schedule(request))
        params = request.kv_transfer_params or {}
        if names_source(params):
            self._add(self._consumer.allocate(request, blocks, num_external))
            self._note_incomplete(request, blocks)
            # One load per request, also if it is preempted later.
            params |= {"do_remote_prefill": False, "remote_block_ids": None}

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Returns (whether its blocks stay, parameters for the router)."""
        self._admission.end(request.request_id)
        self._alive.pop(request.request_id, None)
        self._arrived_s.pop(request.request_id, None)
        self._add(self._consumer.abort(request.request_id))
        params, command = self._producer.finish(request, block_ids)
        if command is not None:
            self._metadata.commands.append(command)
        is_published = isinstance(command, Publish)
        if isinstance(command, Publish) and command.request != request.request_id:
            self._metadata.published[command.request] = request.request_id
        if is_published and params is not None and params["do_remote_decode"]:
            self.stats.count("answers", "published")
        return is_published, params

    @property
    def has_commands(self) -> bool:
        """Whether commands wait for a step. vLLM then makes one, though nothing can be computed.

        A paused engine would make none for requests that arrive, and their leases would run out, since no rank would renew them.
        """
        return bool(self._metadata.commands or self._delayed)

    def take_metadata(
        self, num_scheduled: Mapping[str, int], finished: Iterable[str], preempted: Iterable[str] = ()
    ) -> ReshardMetadata:
        """This step's metadata. `num_scheduled`: tokens of each request in it; `finished`, `preempted`: requests that ended or lost their blocks
        before it.
        """
        preempted = list(preempted)
        if self._deadlock.step(self._stands_still and self._admission.is_still(num_scheduled, self._alive, preempted)):
            self._add(self._consumer.give_up_longest())
        self._lacks_blocks |= bool(preempted) or self._unserved is not None
        if self._stalled.step(self._lacks_blocks and self._consumer.waiting.num_early > 0):
            self._lacks_blocks = False
            self._add(self._consumer.give_up_early())
        self._give_up_what_never_fits()
        self._withdraw_answers()
        self._computing.difference_update(finished)
        self._computing.update(num_scheduled)
        self._admission.compute(num_scheduled)
        self._add(self._producer.preempt(preempted, num_scheduled))
        is_idle = self._may_be_idle and not self._computing
        patience_s = self._idle.wait(self._consumer, self._alive, self._metadata.commands) if is_idle else 0.0
        self._add(self._consumer.on_answers())
        metadata, self._metadata = self._metadata, ReshardMetadata()
        metadata.commands = self._delayed.step(metadata.commands)
        metadata.computed = list(self._producer.early.step(num_scheduled, self._manager))
        metadata.patience_s = patience_s
        self._handshake.show_changes()
        metadata.waits_for_draft = self._has_draft and self._producer.may_finish(num_scheduled)
        self._producer.last_pages.hold()
        return metadata

    def on_worker_output(self, output: KVConnectorOutput) -> None:
        """Take in what the ranks have done."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, ReshardWorkerMetadata):
            self._update_quarantine(meta)
            self._log.add(meta.failed)
            self._expired |= meta.expired
            if meta.has_advanced:
                self._deadlock.step(False)
                self._stalled.step(False)
                self._lacks_blocks = False
            self._log_unmet(meta.unmet)
            for request_id, seconds in meta.reading_s.items():
                self._consumer.waiting.note_pace(request_id, seconds)
            if meta.keys or meta.unmet:
                self._add(self._consumer.meet(meta.keys, meta.unmet))
        for request_id in output.failed_recving or ():
            if self._consumer.fail(request_id):
                self._admission.fail(request_id)
        for request_id in output.finished_recving or ():
            if request_id in self._arrived_s:
                self.stats.sample("wait_seconds", time.monotonic() - self._arrived_s.pop(request_id))
            remote, is_aborted = self._consumer.find_source(request_id)
            self._log.end(request_id, remote, is_aborted=is_aborted)
            self._add(self._consumer.ended(request_id))
        for request_id in output.finished_sending or ():
            if request_id in self._expired:
                self._expired.discard(request_id)
                self._log.expired(request_id)
            self._producer.freed(request_id)

    def take_stats(self) -> ReshardStats | None:
        """The counts since the last call, and the gauges that have changed; None if there are none."""
        gauges = {
            "leases_held": len(self._producer.leases),
            "blocks_held": self._producer.leases.num_blocks,
            "loads_waiting": self._consumer.num_waiting,
            "loads_in_flight": self._consumer.waiting.num_loading - self._consumer.waiting.num_early,
            "loads_early": self._consumer.waiting.num_early,
            "quarantine_blocks_held": self._quarantine.num_blocks,
            "pool_blocks": 0 if self._manager is None else int(self._manager.block_pool.num_gpu_blocks),
        }
        for lines in (self._log, self._producer.repeats):
            lines.flush()
        self.stats.data["gauges"] = dict(gauges.items() - self._gauges.items())
        self._gauges = gauges
        return self.stats.take()

    def reset(self) -> bool:
        """vLLM's cache was reset. False while loads are under way that may bring the old cache back."""
        self._add(self._producer.reset())
        self._add(self._consumer.reset())
        return not self._consumer.waiting.num_loading

    def bind(self, manager: KVCacheManager) -> None:
        """Use the engine's cache manager."""
        self._manager = manager
        self._consumer.waiting.max_early_blocks = int(
            manager.block_pool.num_gpu_blocks * self._options.early_reads_share
        )
        self._producer.last_pages.manager = self._consumer.missing_items.manager = manager
        self._quarantine.bind(manager, self._producer.last_pages.let_go)  # a forced reset preempts all that runs

    def close(self) -> None:
        """Stop listening, and asking others."""
        self._handshake.close()
        self._consumer.following.close()

    def _add(self, commands: Iterable[Command]) -> None:
        self._metadata.commands.extend(commands)

    @property
    def _stands_still(self) -> bool:
        """Whether requests wait to be loaded, none is being loaded, and others may wait for blocks of this engine.

        A load whose prefill is under way waits too.
        """
        if self._consumer.waiting.num_loading > self._consumer.waiting.num_early:
            return False
        return len(self._producer.leases) > 0 and self._consumer.num_waiting > 0

    def _has_room(self, request: Request, num_loaded: int) -> bool:
        if self._manager is None:
            return True
        num_free = int(self._manager.block_pool.get_num_free_blocks())
        num_blocks = blocks_to_load(self._config.groups, num_loaded)
        return self._admission.has_room(num_free, num_blocks, self._wanted(request, num_loaded))

    def _wanted(self, request: Request, num_loaded: int) -> WantedBlocks:
        return blocks_to_compute(self._config.groups, num_loaded, int(request.num_tokens))

    def _log_unmet(self, unmet: Mapping[str, Failure]) -> None:
        for request_id, failure in unmet.items():
            remote, _ = self._consumer.find_source(request_id)
            if remote is not None and failure.kind != "stale lease":
                self._log.cannot_read(remote, failure)

    def _update_quarantine(self, meta: ReshardWorkerMetadata) -> None:
        """Counted here, where ranks come together: the same request may be quarantined on each of them."""
        num_requests, num_held = self._quarantine.hold(meta.quarantined)
        num_freed = self._quarantine.release(meta.settled)
        for counter, label, amount in (
            ("quarantined", "", num_requests),
            ("quarantined_blocks", "kept", num_held),
            ("quarantined_blocks", "freed", num_freed),
        ):
            if amount:
                self.stats.count(counter, label, amount)

    def _give_up_what_never_fits(self) -> None:
        pool = None if self._manager is None else self._manager.block_pool
        num_held = 0 if pool is None else pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is the null block
        never = self._admission.step(is_pool_free=num_held <= self._quarantine.num_blocks)
        if never is not None:
            self._add(self._consumer.give_up(never, "pool"))

    def _withdraw_answers(self) -> None:
        """Withdraw the oldest answer, one a step, while few blocks are free or a request got none."""
        is_unserved, self._unserved = self._unserved is not None, None
        if self._manager is None or not self._producer.answers:
            return
        pool = self._manager.block_pool
        if is_unserved or pool.get_num_free_blocks() < pool.num_gpu_blocks * MIN_FREE_SHARE:
            self.stats.count("answers", "withdrawn")
            self._add(self._producer.withdraw_oldest_answer())

    def _note_incomplete(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Exclude blocks that a window leaves incomplete from prefix hits: vLLM would take them for complete. Nor is what they lack published.

        vLLM caches a loaded request's blocks from `num_cached_block` on (0.32.0, `SingleTypeKVCacheManager.cache_blocks`).
        """
        for group, first in self._consumer.first_loaded(request.request_id, blocks):
            self._producer.note_first(request.request_id, group, first)
            if self._manager is not None:
                cached = self._manager.coordinator.single_type_managers[group.index].num_cached_block
                num_blocks = -(-first // (group.page_tokens or 1))
                cached[request.request_id] = max(cached.get(request.request_id, 0), num_blocks)
