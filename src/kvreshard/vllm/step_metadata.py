"""What travels with a step between the scheduler and the ranks: `ReshardMetadata` to them, `ReshardWorkerMetadata` back."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvreshard.session.commands import Command, Failure
from kvreshard.session.progress import StepProgress
from kvreshard.vllm.outcomes import merge_failures


@dataclass
class ReshardMetadata(KVConnectorMetadata):
    """What the scheduler sends to all ranks in one step.

    `engine_metadata`: once, encoded. `patience_s`: how long a rank may wait in this step for its loads (`idle`). `waits_for_draft`: a prefill
    may end with this step, and the engine has a draft model (`WorkerSide.wait_for_draft`). `computed`: prefills in this step that readers
    may follow. `published`: the requests whose leases are published with another name, by that name.
    """

    commands: list[Command] = field(default_factory=list)
    # It holds the engine's key, and vLLM logs steps that fail.
    engine_metadata: bytes | None = field(default=None, repr=False)
    patience_s: float = 0.0
    waits_for_draft: bool = False
    computed: list[StepProgress] = field(default_factory=list)
    published: dict[str, str] = field(default_factory=dict)


@dataclass
class ReshardWorkerMetadata(KVConnectorWorkerMetadata):
    """What ranks report to the scheduler beside their results.

    `quarantined`, `settled`: (request, rank) whose pages a read of that rank may still write, and whose it no longer can. `keys`: sources'
    keys after a handshake, by request; `unmet`: why a handshake failed, by request. `failed`: why a load failed, by request and rank.
    `expired`: requests whose leases ran out before they were read. `has_advanced`: a prefill that is followed has gone on. `reading_s`: how long the
    slowest rank read, by request.
    """

    quarantined: set[tuple[str, int]] = field(default_factory=set)
    settled: set[tuple[str, int]] = field(default_factory=set)
    keys: dict[str, bytes] = field(default_factory=dict, repr=False)
    unmet: dict[str, Failure] = field(default_factory=dict)
    failed: dict[str, dict[int, Failure]] = field(default_factory=dict)
    expired: set[str] = field(default_factory=set)
    has_advanced: bool = False
    reading_s: dict[str, float] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        return self == ReshardWorkerMetadata()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReshardWorkerMetadata:
        """Both ranks' together."""
        if not isinstance(other, ReshardWorkerMetadata):
            return self
        return ReshardWorkerMetadata(
            self.quarantined | other.quarantined,
            self.settled | other.settled,
            self.keys | other.keys,
            self.unmet | other.unmet,
            merge_failures(self.failed, other.failed),
            self.expired | other.expired,
            self.has_advanced or other.has_advanced,
            {
                name: max(found.reading_s.get(name, 0.0) for found in (self, other))
                for name in {**self.reading_s, **other.reading_s}
            },
        )
