"""An engine without kernels: vLLM's scheduler with this package's connector, its sessions, and a runner that only looks.

What a step does, in vLLM's order (0.32.0): the scheduler schedules; every rank takes its orders, computes, and says what has ended;
the scheduler hears of it. With asynchronous scheduling the next step's orders go out while one is still being computed.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.faulty_memory import FaultPlan, FaultyFabric, FaultyTransport
from tests.unit.session.world import Clock
from tests.vllm.engines import Side, build
from tests.vllm.simulation.runner import Runner
from tests.vllm.simulation.text import Picture, Text
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.model_executor.layers.attention import Attention
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvreshard.model import EngineLayout, wire
from kvreshard.model.changed import replace
from kvreshard.session.commands import EndpointOptions, Load
from kvreshard.session.endpoint import Endpoint
from kvreshard.session.engine_metadata import RankMetadata, decode_engine_metadata
from kvreshard.session.follower import Follower
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import LeaseTable
from kvreshard.session.mover import Staging
from kvreshard.session.peers import Peers
from kvreshard.session.progress import ProgressBoard
from kvreshard.tools.observer import ObserverOptions, RankObserver
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.local import HostMemory
from kvreshard.vllm.early_fields import find_early_fields
from kvreshard.vllm.groups import CacheGroup, read_groups
from kvreshard.vllm.handshake import RankPart
from kvreshard.vllm.options import read_options
from kvreshard.vllm.worker import WorkerSide

LEASE_SLOTS = 512


@dataclass(frozen=True)
class Shape:
    """How an engine is laid out and how it is driven. `is_v2`: as vLLM's newer model runner is, the one of GPUs. `match_unit`: tokens at
    which prefix hits of aligned states may end inside of a page.
    """

    layers: Mapping[str, Any]
    tp: int = 1
    pp: int = 1
    dcp: int = 1
    order: str = "LBHNC"
    blocks: int = 60
    max_tokens_per_step: int = 64
    max_requests: int = 8
    is_async: bool = False
    is_v2: bool = False
    has_prefix_caching: bool = True
    is_aligned: bool = False
    match_unit: int | None = None
    num_drafts: int = 0
    is_multi_module: bool = False
    kv_heads: int = 4
    window_heads: int | None = None
    role: str = "kv_both"
    failure_policy: str = "recompute"
    order_policy: str = "fcfs"
    lease_s: float = 30.0
    reads_back: bool = False
    answer_lease_s: float = 30.0
    recompute_threshold: int = 0


def early_fields_of(part: EngineLayout, groups: Sequence[CacheGroup]) -> tuple[dict[str, int], dict[str, int]]:
    """Every layer of attention tells its end."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=False),
        compilation_config=SimpleNamespace(static_forward_context=defaultdict(lambda: Attention.__new__(Attention))),
    )
    return find_early_fields(part, groups, config)


def feature(picture: Picture) -> MultiModalFeatureSpec:
    """As a request has it: the same picture has as many tokens wherever it stands."""
    name = f"{picture.number} of {picture.num_tokens}"
    place = PlaceholderRange(picture.first, picture.num_tokens)
    return MultiModalFeatureSpec(None, "image", name, place, mm_hash=name)


def _speculation(num_drafts: int, is_multi_module: bool) -> Any:
    """As much of a SpeculativeConfig as schedulers ask for: EAGLE, or a chain of MTP modules."""

    def says(answer: bool) -> Callable[[], bool]:
        return lambda: answer

    return SimpleNamespace(
        num_speculative_tokens=num_drafts, num_speculative_tokens_per_batch_size=None, max_num_new_slots_for_drafting=0,
        method="mtp" if is_multi_module else "eagle3", use_eagle=says(True), use_eagle_block_drop=says(True),
        use_dspark=says(False), use_dflash=says(False), uses_draft_model=says(False), use_multi_module_mtp=says(is_multi_module),
        needs_eagle_block_drop=says(True), disable_eagle_block_drop=False, disable_lookahead_block_hashes=False,
    )  # fmt: skip


@dataclass
class _Step:
    number: int
    scheduled: Any
    fresh: list[int]
    unheard: list[_Step]
    rejected: dict[str, int] = field(default_factory=dict)
    connector: list[KVConnectorOutput] | None = None
    computed: ModelRunnerOutput | None = None


@dataclass
class Finished:
    """How a request ended: vLLM's reason, what it said, and what the router gets."""

    reason: str
    tokens: list[int]
    params: dict[str, Any] | None


@dataclass
class Engine:
    """`make_peers`: how its ranks meet others, `make_follower`: how it hears of prefills that are under way. `meanwhile`: what goes on while a step is under way, as sessions and the network do."""

    name: str
    shape: Shape
    base_config: Any
    clock: Clock
    fabric: FaultyFabric
    address: Address
    options: EndpointOptions
    make_peers: Callable[[Engine, int], Peers]
    make_follower: Callable[[], Follower]
    faults: FaultPlan
    is_overlapping: Callable[[], bool]
    meanwhile: Callable[[], None]
    count_accepted: Callable[[int], int]
    texts: dict[str, Text] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    loadable: dict[str, int] = field(default_factory=dict)
    read_back: dict[str, int] = field(default_factory=dict)
    """Tokens that a load was commanded for, of requests that are prefilled here."""
    given_up: set[str] = field(default_factory=set)
    fallbacks: Counter[str] = field(default_factory=Counter)
    partial: dict[str, str] = field(default_factory=dict)
    num_preempted: int = 0
    failed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        shape = self.shape
        self.side: Side = build(
            self.name, shape.layers, tp=shape.tp, pp=shape.pp, dcp=shape.dcp, order=shape.order, blocks=shape.blocks,
            config={
                "kv_heads": shape.kv_heads,
                "text": {} if shape.window_heads is None else {"swa_num_key_value_heads": shape.window_heads},
            },
        )  # fmt: skip
        config = self._configure()
        kv_config = generate_scheduler_kv_cache_config(self.side.configs)
        block_size, self.hash_block_size = resolve_kv_cache_block_sizes(kv_config, config)
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(self.hash_block_size, sha256)
        self.scheduler = (AsyncScheduler if shape.is_async else Scheduler)(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=self.hash_block_size,
        )
        # Of a model with pictures; this one has none.
        self.scheduler.max_num_encoder_input_tokens = 10_000
        self.scheduler.encoder_cache_manager = EncoderCacheManager(10_000)
        # The runner is vLLM's choice by platform; nothing else in a scheduler asks for it.
        self.scheduler.use_v2_model_runner = shape.is_v2
        self.connector: Any = self.scheduler.connector
        self.connector._scheduler._handshake.listen = lambda engine_metadata: self.address
        self.connector._scheduler._deadlock._clock = self.clock
        self.connector._scheduler._stalled._clock = self.clock
        self.connector._scheduler._producer.early._clock = self.clock
        self.connector._scheduler._admission._clock = self.clock
        following = self.connector._scheduler._consumer.following
        following._clock, following._follower = self.clock, self.make_follower()
        self.runner = Runner(self.side, self.texts, self.count_accepted)
        self.pending: deque[_Step] = deque()
        self._num_steps = 0
        # The step in which a request that is prefilled here got blocks for a load.
        self._allocated_in: dict[str, int] = {}
        self._said: dict[str, list[int]] = {}
        self.num_blocks_at_rest = self.num_free_blocks
        self._watch_blocks()
        self._make_workers(config)
        self.aggregator = KVOutputAggregator(len(self.workers))

    def _configure(self) -> Any:
        shape = self.shape
        config = copy.deepcopy(self.base_config)
        reading_back = {
            "bidirectional_kv_xfer": True,
            "decoder_kv_blocks_ttl": shape.answer_lease_s,
            "kv_recompute_threshold": shape.recompute_threshold,
        }
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="ReshardConnector",
            kv_connector_module_path="kvreshard.vllm",
            kv_role=shape.role,
            engine_id=self.name,
            kv_load_failure_policy=shape.failure_policy,
            kv_connector_extra_config={
                "kv_lease_duration": shape.lease_s,
                "lease_slots": LEASE_SLOTS,
                **(reading_back if shape.reads_back else {}),
            },
        )
        config.cache_config.num_gpu_blocks = shape.blocks
        config.cache_config.enable_prefix_caching = shape.has_prefix_caching
        config.cache_config.block_size = self.side.configs[0].kv_cache_groups[0].kv_cache_spec.block_size
        if shape.is_aligned:
            config.cache_config.mamba_cache_mode = "align"
            config.cache_config.prefix_match_unit = shape.match_unit
        scheduling = config.scheduler_config
        scheduling.max_num_batched_tokens = shape.max_tokens_per_step
        scheduling.max_num_scheduled_tokens = shape.max_tokens_per_step
        scheduling.max_num_seqs = shape.max_requests
        scheduling.async_scheduling = shape.is_async
        scheduling.policy = shape.order_policy
        config.parallel_config.decode_context_parallel_size = shape.dcp
        config.parallel_config.pipeline_parallel_size = shape.pp
        if shape.num_drafts:
            config.speculative_config = _speculation(shape.num_drafts, shape.is_multi_module)
        return config

    def _watch_blocks(self) -> None:
        """Remember which blocks a step takes from the pool: their former content must not be found any more."""
        shape, pool = self.shape, self.scheduler.kv_cache_manager.block_pool
        self._fresh: list[int] = []
        take = pool.get_new_blocks

        def taken(*args: Any, **kwargs: Any) -> Any:
            blocks = take(*args, **kwargs)
            self._fresh.extend(block.block_id for block in blocks)
            return blocks

        pool.get_new_blocks = taken
        ask = self.connector.get_num_new_matched_tokens

        def asked(request: Any, num_computed: int) -> Any:
            count, is_async = ask(request, num_computed)
            name = request.request_id  # asked again after a preemption
            self.loadable[name] = max(self.loadable.get(name, 0), num_computed + (count or 0))
            return count, is_async

        self.connector.get_num_new_matched_tokens = asked
        allocated = self.connector.update_state_after_alloc

        def allocate(request: Any, blocks: Any, num_external: int) -> None:
            if (request.kv_transfer_params or {}).get("do_remote_decode") and num_external:
                self.read_back[request.request_id] = num_external
                self._allocated_in[request.request_id] = self._num_steps
                if shape.role == "kv_producer":  # see `_launch`
                    loaded = {number for ids in blocks.get_block_ids() for number in ids}
                    self._fresh = [block for block in self._fresh if block not in loaded]
            allocated(request, blocks, num_external)

        self.connector.update_state_after_alloc = allocate
        consumer = self.connector._scheduler._consumer
        give_up = consumer.give_up

        def given_up(request_id: str, cause: str, text: str = "") -> Any:
            if cause != "reset":
                self.given_up.add(request_id)
            return give_up(request_id, cause, text)

        consumer.give_up = given_up
        count = consumer._log._count

        def counted(counter: str, label: str, amount: int) -> None:
            if counter == "fallbacks":
                self.fallbacks[label] += amount
            count(counter, label, amount)

        consumer._log._count = counted
        note_partial = consumer._note_partial

        def partial(waiting: Any, cause: str, *numbers: Any, **more: Any) -> None:
            self.partial[waiting.request.request_id] = cause
            note_partial(waiting, cause, *numbers, **more)

        consumer._note_partial = partial
        preempt = self.scheduler._preempt_request

        def preempted(*args: Any, **kwargs: Any) -> None:
            self.num_preempted += 1
            preempt(*args, **kwargs)

        self.scheduler._preempt_request = preempted

    def _make_workers(self, config: Any) -> None:
        self.workers: list[WorkerSide] = []
        self.endpoints: list[Endpoint] = []
        self._transports: list[FaultyTransport] = []
        self._buffers: list[Any] = []
        self._num_instances, self.is_asleep, self.falls_asleep = 0, False, False
        for place, rank in enumerate(self.side.layout.ranks):
            worker = WorkerSide(config, self.side.configs[place], self.name, read_options({"lease_slots": LEASE_SLOTS}))
            worker._rank = rank.rank
            self.workers.append(worker)
        self._begin_instance()

    def _begin_instance(self) -> None:
        """What `WorkerSide.register` does, and what the engine does with what its ranks say of themselves."""
        self._num_instances += 1
        self.endpoints.clear()
        self._transports.clear()
        parts = {}
        groups = read_groups(self.side.configs[0], self.shape.dcp)
        for place, (worker, rank) in enumerate(zip(self.workers, self.side.layout.ranks, strict=True)):
            transport = FaultyTransport(self.fabric, f"{self.name}{rank.rank}", faults=self.faults)
            table, buffer = LeaseTable(LEASE_SLOTS), np.zeros(1 << 14, np.uint8)
            observer = RankObserver(rank.rank, HostMemory(), ObserverOptions(), clock=self.clock)
            endpoint = Endpoint(
                rank.rank, transport, HostMemory(), self.options, table=table, clock=self.clock, observer=observer,
                staging=Staging(buffer.ctypes.data, buffer.size), peers=self.make_peers(self, rank.rank),
                board=ProgressBoard(table, self._record), follower=self.make_follower(),
            )  # fmt: skip
            areas = [MemoryRegion(area.address, area.size_bytes) for area in rank.regions]
            transport.register([*areas, table.region, *endpoint.regions, MemoryRegion(buffer.ctypes.data, buffer.size)])
            engine_metadata = RankMetadata(
                rank.rank, transport.metadata(), table.region.address, len(table),
                observer.mailbox.region.address, len(observer.mailbox), table.progress_address,
            )  # fmt: skip
            part = replace(self.side.layout, ranks=(rank,))
            early_fields, worker._layers = early_fields_of(part, groups)
            parts[divmod(place, self.shape.tp)] = RankPart(wire.encode(part), engine_metadata, {}, early_fields)
            worker._endpoint, worker._is_asleep = endpoint, False
            worker._transport = SimpleNamespace(close=transport.close, is_running=False)  # type: ignore[assignment]
            self.endpoints.append(endpoint)
            self._transports.append(transport)
            self._buffers.append(buffer)
        self.connector.set_xfer_handshake_metadata_pp_aware(parts)
        self.engine_metadata = decode_engine_metadata(self.connector._scheduler._metadata.engine_metadata)

    def fall_asleep(self) -> None:
        """vLLM's order for it: requests are aborted, and no new ones begin. See `sleep_if_still`."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        self.falls_asleep = True

    def sleep_if_still(self) -> None:
        """Once nothing is left to do the caches are reset, and lose their memory. Where they cannot be reset, the engine goes on."""
        if not self.falls_asleep or self.pending or self.scheduler.has_requests():
            return
        self.falls_asleep = False
        if not self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            self.scheduler.set_pause_state(PauseState.UNPAUSED)
            return
        for worker in self.workers:
            worker.unregister()
        self.runner.poison(list(range(self.shape.blocks)))
        self.is_asleep = True

    def wake_up(self) -> None:
        """Memory is there again, with something else in it."""
        self._begin_instance()
        self.is_asleep = False
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def add(
        self,
        name: str,
        text: Text,
        num_prompt: int,
        num_tokens: int,
        params: dict[str, Any] | None,
        stop: int | None = None,
        priority: int = 0,
        picture: Picture | None = None,
    ) -> None:
        """A request for so many tokens, or up to the token `stop`, with a picture."""
        self.texts[name] = text
        extra = None if params is None else {"kv_transfer_params": json.loads(json.dumps(params))}
        stops = None if stop is None else [stop]
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, stop_token_ids=stops, extra_args=extra)
        self.scheduler.add_request(
            Request(
                name,
                text.tokens[:num_prompt],
                sampling,
                None,
                priority=priority,
                block_hasher=self.hasher,
                mm_features=None if picture is None else [feature(picture)],
            )
        )

    def turn_away(self, params: dict[str, Any]) -> None:
        """As vLLM's server does after every answer that is an error: a request that is only there to be aborted."""
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": json.loads(json.dumps(params))})
        self.scheduler.add_request(Request("turned away", [0], sampling, None, abort_immediately=True))
        self.abort("turned away")

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reset(self, *, is_running_reset: bool) -> None:
        """As for new weights, with no step under way. vLLM raises where blocks are held by loads or for readers, and resets neither cache."""
        if self.pending:
            return
        with contextlib.suppress(RuntimeError):
            self.scheduler.reset_prefix_cache(reset_running_requests=is_running_reset, reset_connector=True)

    def advance(self) -> bool:
        """Schedule a step, or go on with one; False if there was nothing to do."""
        depth = max(2 if self.shape.is_async else 1, self.shape.pp)
        if len(self.pending) < depth and self.scheduler.has_requests():
            self._fresh.clear()
            scheduled = self.scheduler.schedule()
            self.pending.append(_Step(self._num_steps, scheduled, list(self._fresh), list(self.pending)))
            self._num_steps += 1
            if depth == 1 or not self.is_overlapping():
                self._catch_up(len(self.pending))
            self._launch(self.pending[-1])
            if len(self.pending) > 1:
                self.meanwhile()
            if len(self.pending) < depth and scheduled.total_num_scheduled_tokens:
                return True
        if not self.pending:
            return False
        self._catch_up(1)
        step = self.pending.popleft()
        self._hear(step)
        return True

    def _catch_up(self, count: int) -> None:
        """Compute so many of the launched steps."""
        for step in list(self.pending)[:count]:
            if step.connector is not None and step.computed is None:
                self._forward(step)

    def _record(self) -> Callable[[], bool]:
        """An event behind the step that is being launched."""
        step = self.pending[-1]
        return lambda: step.computed is not None

    def _launch(self, step: _Step) -> None:
        """Orders go out, and what has ended is collected."""
        for worker in self.workers:
            worker.begin_step(step.scheduled.kv_connector_metadata)
            for layer in worker._layers:
                worker.end_layer(layer)
            worker.end_step()
        if self.shape.role != "kv_producer":
            # Whoever may load into these pages writes as soon as it is told to: nobody may still be at work in them.
            self.runner.poison(step.fresh)
        for command in step.scheduled.kv_connector_metadata.commands:
            # A step that is under way may be at work in fresh blocks of an engine that only prefills, but not any more in those of a load.
            if self.shape.role == "kv_producer" and isinstance(command, Load):
                before = [one for one in self.pending if one.number < self._allocated_in[command.request]]
                assert all(one.computed is not None for one in before), (self.name, command.request)
                self.runner.poison([int(page) for pages in command.transfer.dst_new_pages.values() for page in pages])
        step.connector = []
        for worker in self.workers:
            worker.submit(step.scheduled.kv_connector_metadata)
            results = worker.collect()
            self.failed.update(results.failed_recving or ())
            step.connector.append(
                KVConnectorOutput(
                    finished_sending=results.finished_sending or None,
                    finished_recving=results.finished_recving or None,
                    failed_recving=set(results.failed_recving or ()),
                    kv_connector_worker_meta=worker.take_metadata(),
                )
            )

    def _forward(self, step: _Step) -> None:
        if self.shape.role == "kv_producer":
            self.runner.poison(step.fresh)
        late = Counter[str]()
        for earlier in step.unheard:
            late.update(earlier.rejected)
        step.computed = self.runner.forward(step.scheduled, late)
        step.rejected = dict(self.runner.rejected)

    def _hear(self, step: _Step) -> None:
        assert step.computed is not None
        assert step.connector is not None
        outputs: list[ModelRunnerOutput | None] = []
        for place, said in enumerate(step.connector):
            output = step.computed if place == 0 else ModelRunnerOutput([], {})
            output.kv_connector_output = said
            outputs.append(output)
        combined = self.aggregator.aggregate(outputs)
        assert combined is not None
        outputs_by_client = self.scheduler.update_from_output(step.scheduled, combined)
        if self.shape.num_drafts and not self.shape.is_async:
            said = zip(step.computed.req_ids, step.computed.sampled_token_ids, strict=True)
            # One that was preempted while its step was under way gets none: vLLM 0.32 takes them, and when the prompt has been scheduled
            # again, in stages and one step behind the other, it schedules them before the token that they follow.
            names = [name for name, tokens in said if tokens and self._is_running(name)]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[0] * self.shape.num_drafts for _ in names]))
        for batch in outputs_by_client.values():
            for output in batch.outputs:
                said = self._said.setdefault(output.request_id, [])
                said.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    del self._said[output.request_id]
                    if (output.kv_transfer_params or {}).get("do_remote_prefill") and self.shape.num_drafts:
                        # A reader may come at once: the draft's cache must be there when the token is.
                        assert step.scheduled.kv_connector_metadata.waits_for_draft
                    self.finished[output.request_id] = Finished(
                        str(output.finish_reason), said, output.kv_transfer_params
                    )

    def _is_running(self, name: str) -> bool:
        request = self.scheduler.requests.get(name)
        return request is not None and request.status == RequestStatus.RUNNING

    def turn(self) -> None:
        """Every rank's session gets its turn."""
        for endpoint in [] if self.is_asleep else self.endpoints:
            endpoint.turn()

    @property
    def num_free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()
