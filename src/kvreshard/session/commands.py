"""The commands of the engine to a rank's endpoint, the results of the endpoint, and its options. Times are seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvreshard.model.tables import PageTable, Request
from kvreshard.plan.cost import CostModel
from kvreshard.session.handshake_messages import Address
from kvreshard.session.keys import Keys
from kvreshard.session.lease import Cause, Lease
from kvreshard.session.pull import TransferStats
from kvreshard.session.seal import Seal


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """A source engine. After a restart the same name and address have another instance id."""

    engine: str
    instance_id: str
    address: Address

    @property
    def name(self) -> tuple[str, str]:
        """The engine and its instance id."""
        return self.engine, self.instance_id

    def __str__(self) -> str:
        return f"engine {self.engine} at {self.address.host_port}"

    @property
    def log_fields(self) -> dict[str, str]:
        """The same as attributes of a log record."""
        return {"engine": self.engine, "address": self.address.host_port}


@dataclass(frozen=True, slots=True)
class Load:
    """Read `transfer` from a source; with empty intervals, only release the source's pages.

    `seal`: the source's, over the lease and the source's tables in `transfer`. Nothing is read where it does not hold.
    `gives_back`: release the source as soon as all has arrived; otherwise a `Release` does, so that others may still read. A load that fails
    releases in any case. `refusal`: how it fails without anything being read. `trace_headers`: of the request, where vLLM traces it.

    `transfer_id`: the prefill is under way, and is followed under this id at its source's listener. Then `transfer` has the pages that the
    listener has listed, and `seal` is that of its statement.
    """

    request: str
    remote: RemoteEngine
    lease: Lease
    transfer: Request
    seal: Seal
    gives_back: bool
    refusal: Failure | None = None
    trace_headers: Mapping[str, str] | None = None
    transfer_id: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Release a request's pages at their source. It has no result here, unless this engine is the source."""

    remote: RemoteEngine
    lease: Lease


ABORTED = "the request was aborted"
FOR_OTHERS = "other requests need its blocks, and its prefill has not ended"


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the load of a request. The result is a failure, and its source is released; or received if the load had ended: then a `Release` must
    follow if it does not give back. `is_aborted`: so is the request; else others need its blocks.
    """

    request: str
    is_aborted: bool = True


@dataclass(frozen=True, slots=True)
class Renew:
    """Meet the source, and renew its lease until the request is loaded or released, or `StopRenewing`.

    `asks_key`: return the source's key when it is met (`Results.keys`), or why it could not be met (`Results.unmet`). `checks_lease`: the
    same, once the lease word has been read: an ended lease is a `stale lease` there.
    """

    request: str
    remote: RemoteEngine
    lease: Lease
    asks_key: bool = False
    checks_lease: bool = False

    @property
    def without_load(self) -> Load:
        """A load of nothing under the lease."""
        return Load(self.request, self.remote, self.lease, Request({}, {}, {}, {}), Seal(b"", b""), gives_back=False)


@dataclass(frozen=True, slots=True)
class StopRenewing:
    """Renew no longer."""

    request: str


@dataclass(frozen=True, slots=True)
class Acquire:
    """Take a lease for a request that computes here: write its word."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Publish:
    """The request has finished: keep its pages until all readers have reported, or for `ttl_s` after the last heartbeat.

    `tables`: the block tables that were sealed, by group; digest requests are answered from them.
    """

    request: str
    ttl_s: float
    tables: Mapping[str, PageTable] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Revoke:
    """End the lease of a request: its pages may be reused, and whoever reads them fails.

    Its word is cleared by `Endpoint.submit` itself: the caller may overwrite the pages when that returns.
    """

    lease: Lease


Command = Load | Release | Cancel | Renew | StopRenewing | Acquire | Publish | Revoke

FailureKind = Literal[
    "handshake",
    "mismatch",
    "seal",
    "request",
    "transfer",
    "stale lease",
    "prefill",
    "digest",
    "timeout",
    "cancelled",
    "fault",
]
CheckResult = Literal["equal", "different", "refused", "unanswered", "skipped"]
"""How the comparison of digests ended. A load is served only after `equal` or `skipped`."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a load has failed. `is_quarantined`: a read may still write its pages; they must not be reused."""

    kind: FailureKind
    text: str
    is_quarantined: bool = False


@dataclass(slots=True)
class Results:
    """What has ended since the last call, by request. A request is in `received` or in `failed`.

    `settled`: requests whose pages were quarantined, and may be reused now. `stuck`: calls into the transport's library that do not return.
    `keys`: of sources that have been met, for requests that ask for them; `unmet`: why there is none. `handshakes`: of each that has ended, its
    seconds and whether the engine was met. `peers_change`, `stuck_change`: by how many the engines that are met, and the threads that are stuck,
    have become more. `has_advanced`: a prefill that is followed has gone on.
    """

    freed: dict[str, Cause] = field(default_factory=dict)
    received: dict[str, TransferStats] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    checks: dict[str, CheckResult] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    stuck: list[str] = field(default_factory=list)
    keys: dict[str, bytes] = field(default_factory=dict, repr=False)
    unmet: dict[str, Failure] = field(default_factory=dict)
    handshakes: list[tuple[float, bool]] = field(default_factory=list)
    peers_change: int = 0
    stuck_change: int = 0
    has_advanced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """Bounds and intervals of an endpoint.

    Attributes:
        handshake_timeout_s: for each question to a peer's listener.
        load_timeout_s: from the command until the last byte; then the load is stopped.
        settle_timeout_s: how long a stopped load may take to settle before its pages are quarantined.
        heartbeat_s: between attempts to meet a source whose lease is wanted. A source that is met states how often it is renewed.
        paused_renewal_s: how long leases are renewed for an engine that does not step, since it is paused.
        retry_s: how long a peer that could not be met is not asked again.
        peer_ttl_s: how long a peer is known from which nothing is read.
        allow_mismatch: properties of the engine metadata that may differ.
        keys: for handshakes; None if the engines use none.
        cost: what copies cost here, to choose between direct and staged.
    """

    handshake_timeout_s: float = 30.0
    load_timeout_s: float = 120.0
    settle_timeout_s: float = 30.0
    heartbeat_s: float = 5.0
    paused_renewal_s: float = 300.0
    retry_s: float = 5.0
    peer_ttl_s: float = 3600.0
    allow_mismatch: tuple[str, ...] = ()
    keys: Keys | None = None
    cost: CostModel = CostModel()  # noqa: RUF009 (frozen)
