"""The shadow in a rank's process: describes the rank, records what NixlConnector's worker posts, and hands ended loads to the judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvreshard.model import wire
from kvreshard.session.engine_metadata import RankMetadata, decode_engine_metadata
from kvreshard.tools.shadow import EndedLoad, ShadowJudge, ShadowLoad
from kvreshard.tools.shadow_record import RecordingAgent
from kvreshard.vllm.compatibility import read_compatibility
from kvreshard.vllm.describe import describe_rank
from kvreshard.vllm.describe.place import read_place
from kvreshard.vllm.handshake import RankPart
from kvreshard.vllm.options import Options
from kvreshard.vllm.shadow_scheduler import ShadowCommands

if TYPE_CHECKING:
    import torch


class ShadowWorker:
    """One per rank, beside NixlConnector's `worker`. `part`: this rank's part of the engine's metadata, after `register`."""

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
