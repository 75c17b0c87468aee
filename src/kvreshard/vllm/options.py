"""What can be set in `kv_connector_extra_config`?

Each option has a default that works. A name that is neither ours nor one of vLLM's own NixlConnector is refused, since it is
likely a typo; NixlConnector's, which a configuration may still carry, are ignored with a warning.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvreshard.model import KvReshardError
from kvreshard.plan.cost import CostModel
from kvreshard.session.constants import host_facts, load_constants
from kvreshard.session.orders import EndpointOptions

logger = logging.getLogger(__name__)

# vLLM 0.32.0, v1/nixl/*.py: what NixlConnector reads from the same place and this connector does not need.
OF_NIXL_CONNECTOR = frozenset(
    {
        "backends",
        "bidirectional_kv_xfer",
        "decoder_kv_blocks_ttl",
        "enforce_handshake_compat",
        "engine_ttl",
        "kv_recompute_threshold",
        "num_threads",
        "push_registration_timeout",
    }
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options.

    Attributes:
        side_channel_host, side_channel_port: where this engine's listener binds and where peers find it; default:
            VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, plus the data-parallel index.
        kv_lease_duration: seconds that a finished prefill is kept after the last sign of a reader.
        load_timeout_s: seconds from the start of a load until it has failed.
        settle_timeout_s: seconds that a failed load may take to come to rest before its pages are quarantined.
        handshake_timeout_s: seconds to wait for a peer's listener.
        retry_s: seconds before a peer that could not be met is asked again.
        staging_bytes: size of the staging buffer of each rank; 0 reads everything directly.
        lease_slots: finished prefills that can be kept at one time.
        allow_mismatch: facts that may differ between the engines ("model", "vllm_version", ...).
        cost_model: a file of `kvreshard bench --calibrate`, whose constants for this host are used if it has any.
        backend: NIXL's plugin. backend_params: its parameters.
    """

    side_channel_host: str | None = None
    side_channel_port: int | None = None
    kv_lease_duration: float = 30.0
    load_timeout_s: float = 120.0
    settle_timeout_s: float = 30.0
    handshake_timeout_s: float = 30.0
    retry_s: float = 5.0
    staging_bytes: int = 64 * 1024 * 1024
    lease_slots: int = 1 << 16
    allow_mismatch: tuple[str, ...] = ()
    cost_model: str | None = None
    backend: str = "UCX"
    backend_params: dict[str, str] = {}

    def __post_init__(self) -> None:
        positive = ("kv_lease_duration", "load_timeout_s", "settle_timeout_s", "handshake_timeout_s", "lease_slots")
        for name in positive:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.staging_bytes < 0 or self.retry_s < 0:
            raise ValueError("staging_bytes and retry_s must not be negative")

    @property
    def endpoint(self) -> EndpointOptions:
        """What the session needs of them."""
        return EndpointOptions(
            handshake_timeout_s=self.handshake_timeout_s,
            load_timeout_s=self.load_timeout_s,
            settle_timeout_s=self.settle_timeout_s,
            heartbeat_s=self.kv_lease_duration / 6,
            retry_s=self.retry_s,
            allow_mismatch=self.allow_mismatch,
            cost=self.cost,
        )

    @property
    def cost(self) -> CostModel:
        """The constants of this host. Raises KvReshardError for a file that is not one of constants."""
        found = load_constants(Path(self.cost_model), host_facts()) if self.cost_model is not None else None
        return found or CostModel()


def read_options(extra: Mapping[str, Any]) -> Options:
    """The options of an engine. Raises KvReshardError that names the option and the ones there are."""
    known = set(Options.__struct_fields__)
    ignored = sorted(OF_NIXL_CONNECTOR & extra.keys())
    if ignored:
        logger.warning("ReshardConnector does not use these options of NixlConnector: %s", ", ".join(ignored))
    for name in extra.keys() - known - OF_NIXL_CONNECTOR:
        close = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean '{close[0]}'? " if close else ""
        raise KvReshardError(
            f"kv_connector_extra_config: ReshardConnector has no option '{name}'; {meant}It has: {', '.join(sorted(known))}"
        )
    try:
        return msgspec.convert({name: extra[name] for name in known & extra.keys()}, Options)
    except msgspec.ValidationError as error:
        raise KvReshardError(f"kv_connector_extra_config: {error}") from error
