"""What can be set in `kv_connector_extra_config`?

Each option has a default that works. A name that is neither ours nor one of vLLM's own NixlConnector is refused, since it is
likely a typo. NixlConnector's six others, which a configuration may still carry, are never ignored:

| option of NixlConnector (vLLM 0.32, `v1/nixl/*.py`) | here |
|---|---|
| `backends` | its one entry is `backend`; several are refused |
| `enforce_handshake_compat` | `true` is what this connector does; otherwise refused: `allow_mismatch` names what may differ |
| `bidirectional_kv_xfer` | `false` is what this connector does; otherwise refused |
| `decoder_kv_blocks_ttl`, `kv_recompute_threshold`, `push_registration_timeout` | refused: they are about reading back and pushing |
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
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
from kvreshard.vllm.source_hosts import SourceHosts

BACKENDS = "backends"
# Of NixlConnector: the value that says what this connector does anyway, and what to do instead of another.
OF_NIXL_CONNECTOR: Mapping[str, tuple[object, str]] = {
    "enforce_handshake_compat": (True, "name what may differ in allow_mismatch"),
    "bidirectional_kv_xfer": (False, "nothing is read back from decode engines; leave it out"),
    "decoder_kv_blocks_ttl": (None, "nothing is read back from decode engines; leave it out"),
    "kv_recompute_threshold": (None, "nothing is read back from decode engines; leave it out"),
    "push_registration_timeout": (None, "decode engines read, and nothing is pushed; leave it out"),
}

USUAL_LEASE_S = 30.0
# A reader's thread and the owner of its agent may rest for tenths of a second; blocks that nobody reads are lost to an engine for so long.
MIN_LEASE_S, MAX_LEASE_S = 1.0, 86_400.0


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options.

    Attributes:
        side_channel_host, side_channel_port: where this engine's listener binds and where peers find it; default:
            VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, plus the data-parallel index.
        curve_secret_key_file: this engine's key, as `kvreshard keys` writes it: handshakes are then encrypted, and only engines
            whose keys are trusted are let in. curve_public_keys_dir: the public keys to trust beside its own.
        kv_lease_duration: seconds that a finished prefill is kept after the last sign of a reader. Readers learn it when they meet this
            engine, and renew in time whatever they are given themselves.
        paused_renewal_s: seconds for which an engine that is paused goes on renewing the leases of what waits in it.
        load_timeout_s: seconds from the start of a load until it has failed.
        settle_timeout_s: seconds that a failed load may take to come to rest before its pages are quarantined.
        call_timeout_s: seconds that one call into NIXL may take until the loads of the rank fail. Registering memory may take 60 times as long.
        handshake_timeout_s: seconds to wait for a peer's listener.
        retry_s: seconds before a peer that could not be met is asked again.
        engine_ttl: seconds that an engine is known from which nothing is read; 0: for ever. As of NixlConnector.
        staging_bytes: size of the staging buffer of each rank, where its caches are; 0 reads everything directly.
        max_in_flight_bytes: what a rank may have posted to one peer and not yet settled.
        lease_slots: finished prefills that can be kept at one time.
        allow_mismatch: facts that may differ between the engines ("model", "vllm_version", ...).
        source_hosts: networks, addresses and names of hosts that may be named as a request's source (`source_hosts`); empty: any.
        digest_share: of how many requests, 0 to 1, the loaded bytes are compared with the source's.
        digest_timeout_s: seconds until a comparison without an answer has failed.
        flight_recorder_dir: where failed loads leave a record; none are left without.
        flight_recorder_files: how many records are kept there, of all ranks.
        cost_model: a file of `kvreshard bench --calibrate`, whose constants for this host are used if it has any.
        backend: NIXL's plugin. backend_params: its parameters. num_threads: of the UCX backend, as of NixlConnector, whose default is 4;
            None: two, or none where UCX_TLS allows nothing but TCP.
        shadow_report_file: of ShadowConnector: a file that gets one JSON line per request and rank; None: the log only.
    """

    side_channel_host: str | None = None
    side_channel_port: int | None = None
    curve_secret_key_file: str | None = None
    curve_public_keys_dir: str | None = None
    kv_lease_duration: float = USUAL_LEASE_S
    paused_renewal_s: float = 300.0
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
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} is {value}; it must be a finite number")
        if not MIN_LEASE_S <= self.kv_lease_duration <= MAX_LEASE_S:
            raise ValueError(
                f"kv_lease_duration is {self.kv_lease_duration:g}; it must be from {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds"
            )
        if not MIN_LEASE_S <= self.paused_renewal_s <= MAX_LEASE_S:
            raise ValueError(
                f"paused_renewal_s is {self.paused_renewal_s:g}; it must be from {MIN_LEASE_S:g} to {MAX_LEASE_S:g} seconds"
            )
        positive = ("load_timeout_s", "settle_timeout_s", "call_timeout_s", "handshake_timeout_s", "lease_slots")
        for name in (*positive, "digest_timeout_s", "flight_recorder_files", "max_in_flight_bytes"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.staging_bytes < 0 or self.retry_s < 0 or (self.num_threads or 0) < 0:
            raise ValueError("staging_bytes, retry_s and num_threads must not be negative")
        if self.curve_public_keys_dir is not None and self.curve_secret_key_file is None:
            raise ValueError("curve_public_keys_dir without curve_secret_key_file; this engine needs a key of its own")
        SourceHosts(self.source_hosts)
        if not 0.0 <= self.digest_share <= 1.0:
            raise ValueError(f"digest_share is {self.digest_share}; it is a share of all requests, 0 to 1")

    def __str__(self) -> str:
        """What differs from the defaults, for a log line."""
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
        """What the session needs of them, where the caches are on a device."""
        return EndpointOptions(
            handshake_timeout_s=self.handshake_timeout_s,
            load_timeout_s=self.load_timeout_s,
            settle_timeout_s=self.settle_timeout_s,
            # Of sources that do not say how long their leases last: they have the default, or what this engine was given too.
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
        """What is watched of a rank's loads."""
        return ObserverOptions(self.digest_share, self.digest_timeout_s, self.staging_bytes, self.allow_mismatch)

    @property
    def nixl(self) -> NixlOptions:
        """What the transport needs of them."""
        pace = Pace(max_in_flight_bytes=self.max_in_flight_bytes, call_s=self.call_timeout_s)
        threads = self.num_threads if self.num_threads is not None else usual_threads(os.environ.get("UCX_TLS"))
        return NixlOptions(backend=self.backend, backend_params=self.backend_params, num_threads=threads, pace=pace)

    def cost(self, device: str = "cpu") -> CostModel:
        """The constants of this host for caches on a device. Raises KvReshardError for a file that is not one of constants."""
        found = load_constants(Path(self.cost_model), host_description(device)) if self.cost_model is not None else None
        return found or usual_cost(device)


def read_options(extra: Mapping[str, Any]) -> Options:
    """The options of an engine. Raises KvReshardError that names the option and the ones there are."""
    known = set(Options.__struct_fields__)
    extra = _translated(extra)
    for name in sorted(extra.keys() - known):
        close = difflib.get_close_matches(name, known, 1)
        meant = f"did you mean '{close[0]}'? " if close else ""
        raise KvReshardError(
            f"kv_connector_extra_config: ReshardConnector has no option '{name}'; {meant}It has: {', '.join(sorted(known))}"
        )
    try:
        return msgspec.convert({name: extra[name] for name in known & extra.keys()}, Options)
    except msgspec.ValidationError as error:
        raise KvReshardError(f"kv_connector_extra_config: {error}") from error


def read_load_timeout(config: Any) -> float:
    """`load_timeout_s` of an engine's `KVTransferConfig`, or the longest of its children's."""
    extra = config.kv_connector_extra_config
    children = [child.get("kv_connector_extra_config") or {} for child in extra.get("connectors", ())]
    found = [float(given["load_timeout_s"]) for given in (extra, *children) if "load_timeout_s" in given]
    return max(found, default=Options().load_timeout_s)


def _translated(extra: Mapping[str, Any]) -> dict[str, Any]:
    """NixlConnector's options as ours. Raises KvReshardError for one that asks for something else."""
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
