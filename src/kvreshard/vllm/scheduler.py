"""The scheduler's side of the connector: vLLM's hooks on one side, orders for the ranks on the other.

Every rank gets the same orders, once per engine step; block ids are the same on all of them. The engine's card, made of what
every rank says about itself, goes out with the first. What a request's life looks like is in `producer` and `consumer`; a
`kv_both` engine is both.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.utils.network_utils import get_ip

from kvreshard.model import EngineLayout, merge_ranks, wire
from kvreshard.session.card import EngineCard, RankCard, encode_card, make_card
from kvreshard.session.handshake import Address, Hello, Listener
from kvreshard.session.orders import Order
from kvreshard.vllm.consumer import Consumer
from kvreshard.vllm.engine_facts import read_facts
from kvreshard.vllm.groups import read_groups
from kvreshard.vllm.metrics import ReshardStats
from kvreshard.vllm.options import Options
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.requests import count_backoff

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class ReshardMetadata(KVConnectorMetadata):
    """What the ranks are told in one step. `card`: the engine's own, once."""

    orders: list[Order] = field(default_factory=list)
    card: bytes | None = None


@dataclass
class ReshardWorkerMetadata(KVConnectorWorkerMetadata):
    """What ranks tell the scheduler beside their results: requests whose pages may still be written."""

    quarantined: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReshardWorkerMetadata:
        """Of all ranks together."""
        mine = other.quarantined if isinstance(other, ReshardWorkerMetadata) else set()
        return ReshardWorkerMetadata(self.quarantined | mine)


class SchedulerSide:
    """One per engine, in the process of vLLM's scheduler."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options) -> None:
        parallel = vllm_config.parallel_config
        groups = read_groups(kv_cache_config, parallel.decode_context_parallel_size)
        backoff = count_backoff(vllm_config, any(group.is_state for group in groups))
        sizes = {
            "tp_size": max(parallel.tensor_parallel_size, parallel.decode_context_parallel_size),
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
        }
        self._vllm_config, self._options, self._engine = vllm_config, options, engine
        self._incarnation = secrets.token_hex(16)
        self._is_producer = bool(vllm_config.kv_transfer_config.is_kv_producer)
        self._producer = Producer(
            engine, self._incarnation, groups, sizes, backoff, options.kv_lease_duration, options.lease_slots
        )
        self.stats = ReshardStats()
        self._consumer = Consumer(groups, backoff, lambda cause: self.stats.count("fallbacks", cause))
        self._metadata = ReshardMetadata()
        self._listener: Listener | None = None
        self._pool: BlockPool | None = None
        self._manager: KVCacheManager | None = None
        self._told: set[tuple[str, int, bool]] = set()

    def set_ranks(self, parts: Mapping[tuple[int, int], tuple[bytes, RankCard]]) -> None:
        """The layout and the card of every rank: make the engine's card, and listen if others read from here."""
        layout: EngineLayout = merge_ranks([wire.decode(layout) for layout, _ in parts.values()])
        facts = read_facts(self._vllm_config)
        card = make_card(layout, self._incarnation, facts, [card for _, card in parts.values()])
        self._metadata.card = encode_card(card)
        if self._is_producer:
            self._listen(card)

    def arrive(self, request: Request) -> None:
        """A new request."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._producer.arrive(request)
        elif params.get("do_remote_prefill"):
            self._order(self._consumer.arrive(request))

    def count_loadable(self, request: Request, num_computed: int) -> int:
        """Tokens that the ranks can load beyond what is computed."""
        params = request.kv_transfer_params or {}
        return self._consumer.count_loadable(request, num_computed) if params.get("do_remote_prefill") else 0

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> None:
        """Blocks have been allocated."""
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._order(self._producer.schedule(request))
        elif params.get("do_remote_prefill"):
            self._order(self._consumer.allocate(request, blocks, num_external))
            self._keep_from_cache(request, blocks)
            params["do_remote_prefill"] = False  # one load per request, also if it is preempted later

    def finish(self, request: Request, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: (whether its blocks stay, parameters for the router)."""
        self._order(self._consumer.abort(request.request_id))
        params, order = self._producer.finish(request, block_ids)
        if order is not None:
            self._metadata.orders.append(order)
        return params is not None, params

    def take_metadata(self) -> ReshardMetadata:
        """Everything that the ranks have to know by now."""
        metadata, self._metadata = self._metadata, ReshardMetadata()
        return metadata

    def hear(self, output: KVConnectorOutput) -> None:
        """What the ranks have done."""
        meta = output.kv_connector_worker_meta
        if isinstance(meta, ReshardWorkerMetadata):
            self._quarantine(meta.quarantined)
        for request_id in output.finished_recving or ():
            self._consumer.ended(request_id)
        for request_id in output.finished_sending or ():
            self._producer.freed(request_id)

    def bind(self, manager: KVCacheManager) -> None:
        """The engine's cache manager."""
        self._manager, self._pool = manager, manager.block_pool

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def _order(self, orders: Iterable[Order]) -> None:
        self._metadata.orders.extend(orders)

    def _listen(self, card: EngineCard) -> None:
        host = self._options.side_channel_host or envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        first = self._options.side_channel_port or envs.VLLM_NIXL_SIDE_CHANNEL_PORT
        port = first + self._vllm_config.parallel_config.data_parallel_index
        self._listener = Listener(Address(host, port), card, self._hear_outcome, keys=self._options.keys)
        # An engine that listens everywhere must still be told by an address that peers can reach.
        told = get_ip() if host in ("0.0.0.0", "::") else host
        self._producer.address = Address(told, self._listener.address.port)
        guarded = "to engines with a trusted key" if self._options.curve_secret_key_file else "without keys"
        logger.info("kvreshard: engine %s hands out its layout at %s %s", self._engine, self._producer.address, guarded)

    def _hear_outcome(self, hello: Hello) -> None:
        """A peer has compared (on the listener's thread); each outcome is logged once."""
        key = (hello.engine[:200], hello.rank, hello.is_good)
        if key in self._told or len(self._told) > 10_000:
            return
        self._told.add(key)
        level = logging.INFO if hello.is_good else logging.ERROR
        what = "reads from here" if hello.is_good else "cannot read from here"
        logger.log(level, "kvreshard: engine %s rank %d %s: %r", hello.engine[:200], hello.rank, what, hello.text)

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

    def _quarantine(self, request_ids: Iterable[str]) -> None:
        """Take one more reference on the blocks of these requests, for good: a read may still write them."""
        for request_id in request_ids:
            if self._manager is None or self._pool is None:
                return
            for group in self._manager.get_blocks(request_id).blocks:
                self._pool.touch([block for block in group if not block.is_null])
            logger.error("kvreshard: the blocks of request %s are quarantined until the engine restarts", request_id)
