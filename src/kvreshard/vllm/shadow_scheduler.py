"""The shadow in the scheduler's process: the same requests as commands, which only the shadow's workers get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvreshard.session.commands import Load
from kvreshard.session.engine_metadata import encode_engine_metadata
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease
from kvreshard.tools.shadow import ShadowLoad
from kvreshard.vllm.consumer import Consumer
from kvreshard.vllm.handshake import EngineHandshake, RankPart
from kvreshard.vllm.options import Options
from kvreshard.vllm.producer import Producer
from kvreshard.vllm.requests import count_settled, read_config
from kvreshard.vllm.sources import SourceHosts

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

# The shadow holds no blocks: nobody acquires its leases.
NO_SLOT, NO_WORD = 0, 1


@dataclass(slots=True)
class ShadowCommands:
    """What the shadow's workers get in one step."""

    loads: list[ShadowLoad] = field(default_factory=list)
    engine_metadata: bytes | None = field(default=None, repr=False)


class ShadowScheduler:
    """One per engine."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options) -> None:
        self._config = read_config(vllm_config, kv_cache_config)
        self._is_producer = bool(vllm_config.kv_transfer_config.is_kv_producer)
        self._handshake = EngineHandshake(vllm_config, engine, options)
        self._producer = Producer(engine, self._handshake.key, self._config, lease_s=1.0, num_slots=1)
        self._fallback = ""
        # In shadow mode prompts are not compared: no rank asks for keys, and NixlConnector does not compare them either.
        self._consumer = Consumer(
            (engine, self._handshake.instance_id),
            self._config,
            self._note,
            hosts=SourceHosts(options.source_hosts),
            is_shadow=True,
        )
        self._address: Address | None = None
        self._counts: dict[str, tuple[int, int, int]] = {}
        self._commands = ShadowCommands()

    def set_ranks(self, parts: Mapping[tuple[int, int], RankPart]) -> None:
        """Make the engine's metadata, and hand it out beside NixlConnector's own listener."""
        engine_metadata = self._handshake.make_engine_metadata(parts)
        self._commands.engine_metadata = encode_engine_metadata(engine_metadata)
        if self._is_producer:
            self._address = self._handshake.listen(engine_metadata, default_port=0)

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
        if self._address is None or count_settled(request) < 1:
            return None
        lease = Lease(request.request_id, NO_SLOT, NO_WORD)
        prefill = self._producer.describe(request, block_ids, count_settled(request), lease, self._address)
        return self._producer.write(prefill)

    def ended(self, request: Request) -> None:
        """The request is over."""
        self._counts.pop(request.request_id, None)
        for _ in self._consumer.ended(request.request_id):
            pass  # no lease is released: NixlConnector has its own

    def take_commands(self) -> ShadowCommands:
        """This step's commands."""
        self._consumer.log.flush()
        commands, self._commands = self._commands, ShadowCommands()
        return commands

    def close(self) -> None:
        """Stop listening."""
        self._handshake.close()

    def _note(self, counter: str, cause: str, _amount: int) -> None:
        if counter == "fallbacks":
            self._fallback = cause
