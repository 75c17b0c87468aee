"""How do peers get to know a vLLM engine?

In the scheduler's process: the layouts and cards of all ranks become the engine's card, under a new incarnation, and a
listener hands it out at the host and port that the options or vLLM's own variables name. Whether a peer can work with it is
logged once per peer rank.

The facts are the first rank's, read where its model has been loaded: models write into their configuration (vLLM 0.32.0,
`deepseek_v2.py:543`, `llama4.py:720`), and the scheduler's process has that copy of it with one rank and another with several.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm import envs
from vllm.utils.network_utils import get_ip

from kvreshard.model import EngineLayout, merge_ranks, wire
from kvreshard.model.logs import get_logger
from kvreshard.session.card import EngineCard, RankCard, make_card
from kvreshard.session.handshake import Address, Hello, Listener
from kvreshard.session.seal import incarnation_of, new_key
from kvreshard.vllm.options import Options

logger = get_logger(__name__)

MAX_TOLD = 10_000


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank says of itself: its layout in the wire form, its card, and the facts (see `engine_facts`)."""

    layout: bytes
    card: RankCard
    facts: Mapping[str, str]


class EngineHandshake:
    """One per engine. `key`: what this start of the engine seals with. `incarnation`: its digest, which no other start has."""

    def __init__(self, vllm_config: Any, engine: str, options: Options) -> None:
        self._vllm_config, self._engine, self._options = vllm_config, engine, options
        self.key = new_key()
        self.incarnation = incarnation_of(self.key)
        self._listener: Listener | None = None
        self._told: set[tuple[str, int, bool]] = set()

    def make_card(self, parts: Mapping[tuple[int, int], RankPart]) -> EngineCard:
        """The engine's card, from what every rank says of itself. Raises LayoutError or WireError."""
        layout: EngineLayout = merge_ranks([wire.decode(part.layout) for part in parts.values()])
        facts, cards = parts[min(parts)].facts, [part.card for part in parts.values()]
        return make_card(layout, self.key, facts, cards, self._options.kv_lease_duration)

    def listen(self, card: EngineCard, default_port: int | None = None) -> Address:
        """Hand the card out; the address that peers are told. `default_port`: instead of NixlConnector's; 0 is any free one.

        Raises KvReshardError if the address is taken.
        """
        host = self._options.side_channel_host or envs.VLLM_NIXL_SIDE_CHANNEL_HOST
        first = self._options.side_channel_port
        if first is None:
            first = envs.VLLM_NIXL_SIDE_CHANNEL_PORT if default_port is None else default_port
        port = first + self._vllm_config.parallel_config.data_parallel_index if first else 0
        self._listener = Listener(Address(host, port), card, self._hear_outcome, keys=self._options.keys)
        address = self._listener.address
        # An engine that listens everywhere must still be told by an address that peers can reach.
        if address.host in ("0.0.0.0", "::", "*"):
            address = Address(get_ip(), address.port)
        guarded = "to engines with a trusted key" if self._options.curve_secret_key_file else "without keys"
        logger.info("kvreshard: engine %s hands out its layout at %s %s", self._engine, address, guarded)
        return address

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.close()

    def _hear_outcome(self, hello: Hello) -> None:
        """A peer has compared (on the listener's thread); each outcome is logged once."""
        key = (hello.engine[:200], hello.rank, hello.is_good)
        if key in self._told or len(self._told) > MAX_TOLD:
            return
        self._told.add(key)
        level = logging.INFO if hello.is_good else logging.ERROR
        what = "reads from here" if hello.is_good else "cannot read from here"
        logger.log(level, "kvreshard: engine %s rank %d %s: %r", hello.engine[:200], hello.rank, what, hello.text)
