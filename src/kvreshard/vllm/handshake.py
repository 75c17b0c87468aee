"""The handshake of a vLLM engine: its metadata, and the listener that hands it out.

In the scheduler's process, the layouts of all ranks become the engine's metadata, under a new instance id. A listener hands it out at the
host and port that the options or vLLM's own variables name. Each peer rank reports whether it can work with it; the first outcome of each
engine is logged.

The compatibility entries are the first rank's, read where its model has been loaded: models write into their configuration (`DeepseekV2Attention`,
`Llama4ForCausalLM`), and the scheduler's process has that copy of it with one rank and another with several.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.utils.network_utils import get_ip

from kvreshard.model import EngineLayout, merge_ranks, wire
from kvreshard.model.logs import fields, get_logger
from kvreshard.session.engine_metadata import EngineMetadata, RankMetadata, make_engine_metadata
from kvreshard.session.handshake_messages import Address, HandshakeMessage
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.seal import new_key
from kvreshard.vllm.options import Options
from kvreshard.vllm.versions import exchanged_with

logger = get_logger(__name__)

MAX_OUTCOMES = 10_000


@dataclass(frozen=True)
class RankPart(KVConnectorHandshakeMetadata):
    """One rank's part of the engine's metadata: its layout in the wire form, its addresses, what `compatibility` reads, and which of its
    fields may be read early. `has_siblings`: a MultiConnector has other connectors beside this one.
    """

    layout: bytes
    rank_metadata: RankMetadata
    compatibility: Mapping[str, str]
    early_fields: Mapping[str, int] = field(default_factory=dict)
    has_siblings: bool = False


class EngineHandshake:
    """One per engine. `key`: what this instance of the engine seals with. Its digest is the instance id.

    An instance ends with the process, or when the memory of the caches goes while the engine sleeps (`begin_instance`).
    """

    def __init__(self, vllm_config: Any, options: Options) -> None:
        self._vllm_config, self._options = vllm_config, options
        self.key = new_key()
        self.rendezvous = Rendezvous(self.key)
        self._listener: HandshakeServer | None = None
        self._address: Address | None = None
        self._logged: set[tuple[str, bool]] = set()

    def make_engine_metadata(self, parts: Mapping[tuple[int, int], RankPart]) -> EngineMetadata:
        """The engine's metadata, of all ranks' parts. Raises LayoutError or WireError."""
        layout: EngineLayout = merge_ranks([wire.decode(part.layout) for part in parts.values()])
        ranks = [part.rank_metadata for part in parts.values()]
        compatibility = parts[min(parts)].compatibility
        early_fields = {name: place for part in parts.values() for name, place in part.early_fields.items()}
        return make_engine_metadata(
            layout,
            self.key,
            compatibility,
            ranks,
            self._options.kv_lease_duration,
            {"vllm_version": exchanged_with()},
            early_fields,
        )

    def begin_instance(self) -> None:
        """Another key and instance id: whoever has met this engine before meets it anew, as one that was started again."""
        self.key = new_key()
        self.rendezvous.begin_instance(self.key)
        self._logged.clear()

    def listen(self, engine_metadata: EngineMetadata, default_port: int | None = None) -> Address:
        """Hand the metadata out. Returns the address for peers. `default_port`: instead of NixlConnector's; 0 is any free one.

        Raises KvReshardError if the address is taken.
        """
        if self._listener is not None and self._address is not None:
            self._listener.hand_out(engine_metadata)
            return self._address
        host = self._options.side_channel_host or envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        first = self._options.side_channel_port
        if first is None:
            first = envs.VLLM_NIXL_SIDE_CHANNEL_PORT if default_port is None else default_port
        port = first + self._vllm_config.parallel_config.data_parallel_index if first else 0
        self._listener = HandshakeServer(
            Address(host, port),
            engine_metadata,
            self._log_outcome,
            rendezvous=self.rendezvous,
            keys=self._options.keys,
        )
        address = self._listener.address
        # Peers need an address that they can reach, also of an engine that listens everywhere.
        if address.host in ("0.0.0.0", "::", "*"):
            address = Address(get_ip(), address.port)
        self._address = address
        return address

    def show_changes(self) -> None:
        """Have questions answered that wait for prefills, if anything is new of these."""
        if self.rendezvous.has_changed and self._listener is not None:
            self.rendezvous.has_changed = False
            self._listener.wake()

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def _log_outcome(self, message: HandshakeMessage) -> None:
        """A peer rank has compared the two engines. Called on the listener's thread."""
        engine = message.engine[:200]
        key = (engine, message.is_good)
        if key in self._logged or len(self._logged) > MAX_OUTCOMES:
            return
        self._logged.add(key)
        if message.is_good:
            logger.info(
                "engine %s reads from here: %s", engine, message.text, extra=fields("reader_met", engine=engine)
            )
        else:
            logger.error(
                "engine %s cannot read from here: %s",
                engine,
                message.text,
                extra=fields("reader_refused", engine=engine),
            )
