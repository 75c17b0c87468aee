"""The options of `kv_connector_extra_config`. `docs/reference/options.md` describes each; all have defaults that work.

An unknown name is refused, since it is likely a typo. NixlConnector has three more options (vLLM 0.32, `v1/nixl/*.py`), which a
configuration may still carry. Each is translated, accepted where it asks for what this connector does anyway, or refused.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvreshard.model import KvReshardError
from kvreshard.plan.cost import CostModel, usual_cost
from kvreshard.session.commands import EndpointOptions
from kvreshard.session.constants import host_description, load_constants
from kvreshard.session.keys import Keys, read_keys
from kvreshard.session.lease import RENEWALS_PER_LEASE
from kvreshard.tools.observer import ObserverOptions
from kvreshard.transport.nixl_agent import NixlOptions, usual_threads
from kvreshard.transport.posting import Pace
from kvreshard.vllm.compatibility import PROPERTIES
from kvreshard.vllm.sources import SourceHosts

BACKENDS = "backends"
# Option of NixlConnector -> the value that is accepted, if any, and the remedy for another.
OF_NIXL_CONNECTOR: Mapping[str, tuple[object, str]] = {
    "enforce_handshake_compat": (True, "name what may differ in allow_mismatch"),
    "push_registration_timeout": (None, "decode engines read, and nothing is pushed; leave it out"),
}

USUAL_LEASE_S = 30.0
# At least: a reader's threads may pause for tenths of a second. At most: an engine cannot use blocks that nobody reads for so long.
MIN_LEASE_S, MAX_LEASE_S = 1.0, 86_400.0
# Python's threads and ZeroMQ's sockets cannot be told to wait for much longer.
MAX_WAIT_S = 1e6
# Above every size, and small enough that all arithmetic with it works.
MAX_NUMBER = 1 << 48
_RANGES = (
    ("kv_lease_duration", MIN_LEASE_S, MAX_LEASE_S, " seconds"),
    ("paused_renewal_s", MIN_LEASE_S, MAX_LEASE_S, " seconds"),
    ("decoder_kv_blocks_ttl", MIN_LEASE_S, MAX_LEASE_S, " seconds"),
    ("early_reads_share", 0.0, 1.0, ", a share of this engine's blocks"),
    ("digest_share", 0.0, 1.0, ", a share of all requests"),
    ("side_channel_port", 0, 65_535, ", where 0 is any free port"),
    ("lease_slots", 1, 1 << 24, ", of 16 bytes each"),
    ("num_threads", 0, 256, " threads"),
)

_POSITIVE = (
    "load_timeout_s",
    "settle_timeout_s",
    "call_timeout_s",
    "handshake_timeout_s",
    "digest_timeout_s",
    "flight_recorder_files",
    "max_in_flight_bytes",
    "transfer_wait_s",
)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one engine. Times are seconds, sizes bytes."""

    side_channel_host: str | None = None
    side_channel_port: int | None = None
    curve_secret_key_file: str | None = None
    curve_public_keys_dir: str | None = None
    kv_lease_duration: float = USUAL_LEASE_S
    paused_renewal_s: float = 300.0
    bidirectional_kv_xfer: bool = False
    decoder_kv_blocks_ttl: float = 480.0
    kv_recompute_threshold: int = 64
    early_reads_share: float = 0.5
    transfer_wait_s: float = 30.0
    load_timeout_s: float = 120.0
    settle_timeout_s: float = 30.0
    call_timeout_s: float = Pace().call_s
    handshake_timeout_s: float = 30.0
    retry_s: float = 5.0
    engine_ttl: float = 3600.0
    staging_bytes: int = 64 * 1024 * 1024
    max_in_flight_bytes: int = Pace().max_in_flight_bytes
    lease_slots: int = 1 << 16
    allow_mismatch: tuple[str, ...] = ()
    source_hosts: tuple[str, ...] = ()
    digest_share: float = 0.0
    digest_timeout_s: float = 30.0
    flight_recorder_dir: str | None = None
    flight_recorder_files: int = 64
    cost_model: str | None = None
    backend: str = "UCX"
    backend_params: dict[str, str] = {}
    num_threads: int | None = None
    shadow_report_file: str | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_value(name, getattr(self, name))
        for name, low, high, what in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name} is {value:g}; it must be from {low:.9g} to {high:.9g}{what}")
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        for name in ("staging_bytes", "retry_s", "kv_recompute_threshold"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        if self.curve_public_keys_dir is not None and self.curve_secret_key_file is None:
            raise ValueError("curve_public_keys_dir without curve_secret_key_file; this engine needs a key of its own")
        for name in self.allow_mismatch:
            if name not in PROPERTIES:
                raise ValueError(f"allow_mismatch names '{name}', which is not compared; {meant(name, PROPERTIES)}")
        SourceHosts(self.source_hosts)

    def __str__(self) -> str:
        """The options that are not defaults, for a log line."""
        usual = Options()
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        given = [f"{name}={value!r}" for name, value in values.items() if value != getattr(usual, name)]
        return ", ".join(given) or "all by default"

    @property
    def keys(self) -> Keys | None:
        """The keys of this engine, read from their files; None where none are configured. Raises KvReshardError."""
        if self.curve_secret_key_file is None:
            return None
        trusted = None if self.curve_public_keys_dir is None else Path(self.curve_public_keys_dir)
        return read_keys(Path(self.curve_secret_key_file), trusted)

    def endpoint(self, device: str = "cpu") -> EndpointOptions:
        """The session's options, for caches on `device`."""
        return EndpointOptions(
            handshake_timeout_s=self.handshake_timeout_s,
            load_timeout_s=self.load_timeout_s,
            settle_timeout_s=self.settle_timeout_s,
            # For sources that do not report how long their leases last: the default, or this engine's own duration.
            heartbeat_s=min(self.kv_lease_duration, USUAL_LEASE_S) / RENEWALS_PER_LEASE,
            paused_renewal_s=self.paused_renewal_s,
            retry_s=self.retry_s,
            peer_ttl_s=self.engine_ttl if self.engine_ttl > 0 else math.inf,
            allow_mismatch=self.allow_mismatch,
            keys=self.keys,
            cost=self.cost(device),
        )

    @property
    def observer(self) -> ObserverOptions:
        """The options of digest checks."""
        return ObserverOptions(self.digest_share, self.digest_timeout_s, self.staging_bytes, self.allow_mismatch)

    @property
    def nixl(self) -> NixlOptions:
        """The transport's options."""
        pace = Pace(max_in_flight_bytes=self.max_in_flight_bytes, call_s=self.call_timeout_s)
        threads = self.num_threads if self.num_threads is not None else usual_threads(os.environ.get("UCX_TLS"))
        return NixlOptions(backend=self.backend, backend_params=self.backend_params, num_threads=threads, pace=pace)

    def cost(self, device: str = "cpu") -> CostModel:
        """The cost constants of this host for caches on `device`. Raises KvReshardError for a file that holds none."""
        found = load_constants(Path(self.cost_model), host_description(device)) if self.cost_model is not None else None
        return found or usual_cost(device)


def _check_value(name: str, value: object) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}; it must be a finite number")
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise ValueError(f"{name} is a number of {value.bit_length()} bits; it must be at most {MAX_NUMBER}")
    if name.endswith("_s") and isinstance(value, float | int) and value > MAX_WAIT_S:
        raise ValueError(f"{name} is {value}; it must be at most {MAX_WAIT_S:.9g} seconds")
    if value == "":
        raise ValueError(f"{name} is an empty text; leave it out")


def read_options(extra: Mapping[str, Any]) -> Options:
    """The options of an engine. Raises KvReshardError with the option that is wrong and those that exist."""
    known = set(Options.__struct_fields__)
    extra = _translated(extra)
    for name in sorted(extra.keys() - known):
        raise KvReshardError(
            f"kv_connector_extra_config: ReshardConnector has no option '{name}'; {meant(name, sorted(known))}"
        )
    try:
        return msgspec.convert({name: extra[name] for name in known & extra.keys()}, Options)
    except msgspec.ValidationError as error:
        raise KvReshardError(f"kv_connector_extra_config: {error}") from error


def meant(name: str, known: Sequence[str]) -> str:
    """The remedy for a name that does not exist."""
    close = difflib.get_close_matches(name, known, 1)
    return (f"did you mean '{close[0]}'? " if close else "") + f"There are: {', '.join(known)}"


def read_load_timeout(config: Any) -> float:
    """`load_timeout_s` of a `KVTransferConfig`, or the longest of its children's."""
    extra = config.kv_connector_extra_config
    children = [child.get("kv_connector_extra_config") or {} for child in extra.get("connectors", ())]
    found = [float(given["load_timeout_s"]) for given in (extra, *children) if "load_timeout_s" in given]
    return max(found, default=Options().load_timeout_s)


def _translated(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The options with NixlConnector's translated. Raises KvReshardError for one that asks for something else."""
    given = dict(extra)
    for name in sorted(OF_NIXL_CONNECTOR.keys() & given.keys()):
        harmless, remedy = OF_NIXL_CONNECTOR[name]
        value = given.pop(name)
        if harmless is None or value is not harmless:
            raise KvReshardError(
                f"kv_connector_extra_config: {name} is {value!r}, an option of NixlConnector that ReshardConnector does not have; {remedy}"
            )
    if BACKENDS in given:
        backends = given.pop(BACKENDS)
        if not isinstance(backends, list | tuple) or len(backends) != 1:
            raise KvReshardError(
                f"kv_connector_extra_config: backends is {backends!r}; ReshardConnector uses one: give its name as backend"
            )
        if given.setdefault("backend", backends[0]) != backends[0]:
            raise KvReshardError(
                f"kv_connector_extra_config: backends is {backends!r} and backend is {given['backend']!r}; give one of them"
            )
    return given
