"""The worker side of the connector: a rank's memory, its NIXL agent and its session.

When vLLM registers the cache views, they are described and registered with NIXL, and the session starts. After that the engine's thread
only passes commands on and collects results; the session has a thread of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from kvreshard.model import KvReshardError, wire
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.commands import Acquire, Command, Publish, Results, Revoke
from kvreshard.session.endpoint import Endpoint
from kvreshard.session.engine_metadata import RankMetadata, decode_engine_metadata
from kvreshard.session.lease import LeaseTable
from kvreshard.session.mover import Staging
from kvreshard.session.progress import ProgressBoard
from kvreshard.tools.observer import RankObserver
from kvreshard.tools.recorder import Recorder
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.device import TensorMemory, enter_device, recorder
from kvreshard.transport.local import HostMemory
from kvreshard.transport.nixl import NixlTransport
from kvreshard.vllm.compatibility import read_compatibility
from kvreshard.vllm.describe import describe_rank
from kvreshard.vllm.describe.place import read_place
from kvreshard.vllm.early_fields import find_early_fields
from kvreshard.vllm.groups import read_groups
from kvreshard.vllm.handshake import RankPart
from kvreshard.vllm.metrics import ReshardStats
from kvreshard.vllm.options import Options
from kvreshard.vllm.start_check import check_outer
from kvreshard.vllm.step_metadata import ReshardMetadata, ReshardWorkerMetadata

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)


class WorkerSide:
    """One per rank, in its worker process. `part`: this rank's part of the engine's metadata, after `register`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._engine, self._options = engine, options
        self._kv_caches: Mapping[str, torch.Tensor] = {}
        self._is_asleep = False
        self._endpoint: Endpoint | None = None
        self._transport: NixlTransport | None = None
        self._buffer: torch.Tensor | None = None
        self._devices: tuple[str, ...] = ()
        self._rank = 0
        self._patience_s = 0.0
        # The layers that tell their end, by name, and those of this step that have.
        self._layers: dict[str, int] = {}
        self._layers_done: set[int] = set()
        self._num_layers_done = 0
        self._metadata = ReshardWorkerMetadata()
        self._unread: set[str] = set()
        # Published requests whose leases have another name, by that name. A connector around this one knows requests only.
        self._requests: dict[str, str] = {}
        # Loads whose reads may still write their pages.
        self._quarantined: set[str] = set()
        # What a sleeping rank will be told and has to tell when it is awake.
        self._commands: list[Command] = []
        self._left = KVConnectorTransferResults()
        self.part: RankPart | None = None
        self.stats = ReshardStats()

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe and register the caches and start the session. A replica does neither: nobody reads it."""
        self._kv_caches = kv_caches
        place = read_place(self._vllm_config)
        if place.is_replica:
            logger.debug("prefill context rank %d is a replica of rank 0, and is not read", place.pcp_rank)
            return
        groups = read_groups(self._kv_cache_config, place.dcp_size)
        has_siblings = check_outer(self._vllm_config, has_windows=any(group.has_reach for group in groups))
        part = describe_rank(
            engine=self._engine,
            vllm_config=self._vllm_config,
            kv_cache_config=self._kv_cache_config,
            kv_caches=kv_caches,
            place=place,
        )
        rank = part.ranks[0]
        self._rank = rank.rank
        devices = {region.device for region in rank.regions}
        self._devices = tuple(sorted(devices - {"cpu"}))
        self._warn_of_host_buffer()
        transport = NixlTransport(
            f"kvreshard-{self._engine[:40]}-{rank.rank}", self._options.nixl, enter=self._enter_devices
        )
        self._transport = transport
        table, buffer = LeaseTable(self._options.lease_slots), self._make_buffer(devices)
        self._buffer = buffer  # the session knows it by address only
        tensors = [*kv_caches.values(), *([] if buffer is None else [buffer])]
        memory = HostMemory() if devices <= {"cpu"} else TensorMemory(tensors)
        observer = RankObserver(rank.rank, memory, self._options.observer, recorder=self._make_recorder())
        early_fields, self._layers = find_early_fields(part, groups, self._vllm_config)
        endpoint = Endpoint(
            rank.rank,
            transport,
            memory,
            self._options.endpoint(self._devices[0] if self._devices else "cpu"),
            table=table,
            staging=None if buffer is None else Staging(buffer.data_ptr(), buffer.nbytes),
            observer=observer,
            board=ProgressBoard(table, recorder(self._devices)),
        )
        regions = [MemoryRegion(region.address, region.size_bytes, region.device) for region in rank.regions]
        regions += [table.region, *endpoint.regions]
        if buffer is not None:
            regions.append(MemoryRegion(buffer.data_ptr(), buffer.nbytes, str(buffer.device)))
        transport.register(regions)
        self._endpoint = endpoint
        self.part = RankPart(
            wire.encode(part),
            RankMetadata(
                rank.rank,
                transport.metadata(),
                table.region.address,
                len(table),
                observer.mailbox.region.address,
                len(observer.mailbox),
                table.progress_address,
            ),
            read_compatibility(self._vllm_config),
            early_fields,
            has_siblings,
        )
        endpoint.start()
        logger.debug(
            "rank %d has %d fields in %d groups, %d MiB of cache",
            *(rank.rank, len(part.fields), len(part.groups), sum(r.size_bytes for r in rank.regions) >> 20),
        )

    def unregister(self) -> None:
        """The memory of the caches goes: end the session and the agent, so that nobody reads or writes it any more.

        Raises KvReshardError if a call into NIXL or a copy does not return: then the memory must stay, the pages of loads that have failed are
        quarantined, and all further loads fail.
        """
        if self._endpoint is None or self._transport is None:
            return
        left = self._endpoint.end()
        self._transport.close()
        if self._transport.is_running:
            left.failed = {name: replace(failure, is_quarantined=True) for name, failure in left.failed.items()}
        self._left = self._note(left)
        if self._transport.is_running:
            raise KvReshardError(
                f"rank {self._rank}: NIXL's agent has not closed, and may still write into the caches: their memory must stay, so restart "
                "the engine"
            )
        self._metadata.settled.update((request, self._rank) for request in self._quarantined)
        self._quarantined.clear()
        self._endpoint = self._transport = self._buffer = self.part = None
        self._is_asleep = True
        logger.info(
            "rank %d sleeps: its caches are registered nowhere",
            self._rank,
            extra=fields("rank_asleep", rank=self._rank),
        )

    def restore(self) -> None:
        """The caches have memory again, at the same addresses: begin another session and another agent.

        Where that fails the rank sleeps on, with nothing begun, and may be woken again.
        """
        if self._is_asleep:
            try:
                self.register(self._kv_caches)
            except BaseException:
                self.close()
                self._endpoint = self._transport = self._buffer = self.part = None
                raise
            self._is_asleep = False

    def begin_step(self, metadata: ReshardMetadata) -> None:
        """Before a step is computed: take leases and end others, whose pages it may overwrite, and note what it computes for readers."""
        if self._endpoint is None:
            return
        for command in (*self._commands, *metadata.commands):
            if isinstance(command, Acquire | Revoke):
                self._endpoint.submit(command)
        self._commands = [command for command in self._commands if not isinstance(command, Acquire | Revoke)]
        self._layers_done.clear()
        self._num_layers_done = 0
        self._endpoint.begin_step(metadata.computed)

    def end_layer(self, name: str) -> None:
        """A layer of the step has been computed, or ordered to be."""
        place = self._layers.get(name)
        if place is None or self._endpoint is None or not self._endpoint.board.is_computing:
            return
        self._layers_done.add(place)
        while self._num_layers_done in self._layers_done:
            self._num_layers_done += 1
        self._endpoint.board.layer(self._num_layers_done)

    def end_step(self) -> None:
        """All of the step has been computed, or ordered to be."""
        if self._endpoint is not None:
            self._endpoint.board.end()

    def submit(self, metadata: ReshardMetadata) -> None:
        """Pass this step's commands to the session."""
        self._requests |= metadata.published
        if self._is_asleep:
            self._commands += metadata.commands
            return
        if self._endpoint is None:
            self._unread |= {command.request for command in metadata.commands if isinstance(command, Publish)}
            return
        self._patience_s = metadata.patience_s
        if metadata.engine_metadata is not None:
            engine_metadata = decode_engine_metadata(metadata.engine_metadata)
            self._endpoint.introduce(engine_metadata, engine_metadata.decode_layout())
        others = [command for command in metadata.commands if not isinstance(command, Acquire | Revoke)]
        commands, self._commands = [*self._commands, *others], []
        for command in commands:
            self._endpoint.submit(command)

    def collect(self) -> KVConnectorTransferResults:
        """The results since the last step. A failed load is listed as received too, as vLLM requires."""
        left, self._left = self._left, KVConnectorTransferResults()
        if self._is_asleep or left.finished_sending or left.finished_recving:
            return left
        if self._endpoint is None:  # a replica: vLLM waits for the report of every rank
            unread, self._unread = self._unread, set()
            return KVConnectorTransferResults(finished_sending=set(map(self._take_request, unread)))
        return self._note(self._endpoint.collect(self._patience_s))

    def _note(self, results: Results) -> KVConnectorTransferResults:
        self.stats.note(results)
        quarantined = {request for request, failure in results.failed.items() if failure.is_quarantined}
        self._quarantined = (self._quarantined | quarantined) - results.settled
        self._metadata.quarantined.update((request, self._rank) for request in quarantined)
        self._metadata.settled.update((request, self._rank) for request in results.settled)
        self._metadata.has_advanced |= results.has_advanced
        self._metadata.keys.update(results.keys)
        self._metadata.unmet.update(results.unmet)
        self._metadata.failed.update({request: {self._rank: failure} for request, failure in results.failed.items()})
        self._metadata.reading_s.update(
            {name: moved.early_s + moved.total_s for name, moved in results.received.items() if moved.num_bytes}
        )
        freed = {self._take_request(lease): cause for lease, cause in results.freed.items()}
        self._metadata.expired.update(request for request, cause in freed.items() if cause == "expired")
        return KVConnectorTransferResults(
            finished_sending=set(freed),
            finished_recving={*results.received, *results.failed},
            failed_recving=set(results.failed),
        )

    def _take_request(self, lease: str) -> str:
        """The request of a lease that has ended."""
        return self._requests.pop(lease, lease)

    def wait_for_draft(self) -> None:
        """Wait for the devices at the end of a step with which a prefill may end: they may still write the cache of a draft model.

        vLLM returns a token when the target model has sampled it, before the draft has processed the prompt (0.32.0,
        `gpu/model_runner.py`, `sample_tokens`; the older runner does so without asynchronous scheduling). Without this wait a reader could come first.
        """
        import torch

        for device in self._devices:
            torch.accelerator.synchronize(torch.device(device))

    def take_stats(self) -> ReshardStats | None:
        """The counts since the last call; None if there are none."""
        return self.stats.take()

    def take_metadata(self) -> ReshardWorkerMetadata | None:
        """What the scheduler needs beside the results; None if nothing."""
        if self._metadata.is_empty:
            return None
        metadata, self._metadata = self._metadata, ReshardWorkerMetadata()
        return metadata

    def close(self) -> None:
        """End the session and the agent."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._transport is not None:
            self._transport.close()

    def _enter_devices(self) -> None:
        for device in self._devices:
            enter_device(device)

    def _warn_of_host_buffer(self) -> None:
        if self._vllm_config.kv_transfer_config.kv_buffer_device == "cpu" and self._devices:
            logger.warning(
                "kv_buffer_device cpu is ignored: caches are read from and into %s; leave it out",
                ", ".join(self._devices),
                extra=fields("buffer_device_ignored"),
            )

    def _make_recorder(self) -> Recorder | None:
        where = self._options.flight_recorder_dir
        return None if where is None else Recorder(Path(where).expanduser(), self._options.flight_recorder_files)

    def _make_buffer(self, devices: set[str]) -> torch.Tensor | None:
        """The staging buffer, where the caches are; None without staging, or where they lie on several devices. Raises KvReshardError."""
        import torch

        if not self._options.staging_bytes or len(devices) != 1:
            return None
        size_bytes, device = self._options.staging_bytes, next(iter(devices))
        try:
            return torch.empty(size_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise KvReshardError(
                f"staging_bytes is {size_bytes}, and {device} has not so much memory left; choose less, or 0 to read everything directly ({error})"
            ) from error
