"""How did a soak go, in figures, and was anything lost, wrong or too late?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.soak.decode import Ended

# Ways to end that a fault may bring about. `reader died` and `source died`: with the process that had it.
GOOD_ENDS = {
    "loaded", "cancelled", "released", "revoked", "stale lease", "handshake", "transfer", "timeout", "digest",
    "prefill", "unheard", "reader died", "source died",
}  # fmt: skip
MAX_TOLD = 20
# Measured over an hour: see docs/reliability.md. Of an engine that lives all the time.
MAX_GROWTH_BYTES = 48 << 20


@dataclass
class Tally:
    """`lost`: requests without an end in time. `stalls_s`: how long the machine stood still, each time. `defects`: sentences about everything
    that must not be.
    """

    seed: int
    seconds: float
    started: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    per_pair: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    leases: Counter[str] = field(default_factory=Counter)
    # Of early loads: "served", "begun again" (and then served), "read early" (a part of it), "cancelled" and "failed".
    early: Counter[str] = field(default_factory=Counter)
    early_bytes: int = 0
    prefix_hits: int = 0
    compared_bytes: int = 0
    wrong_requests: int = 0
    lost: int = 0
    quarantined: int = 0
    innocent: int = 0
    slowest_failure_s: float = 0.0
    stalls_s: list[float] = field(default_factory=list)
    growth_bytes: dict[str, int] = field(default_factory=dict)
    growth_fds: dict[str, int] = field(default_factory=dict)
    samples: dict[str, str] = field(default_factory=dict)
    defects: list[str] = field(default_factory=list)

    @property
    def num_ended(self) -> int:
        return sum(self.ends.values())

    def note_end(self, pair: str, ended: Ended, own_s: float, bound_s: float) -> None:
        """A load is over. `own_s`: how long it took, without the time in which its engines were stopped."""
        self.note_kind(ended.kind, ended.text)
        self.compared_bytes += ended.num_compared
        self.quarantined += ended.is_quarantined
        if ended.kind == "loaded":
            self.per_pair[pair] += 1
            self.prefix_hits += bool(ended.prefix)
        else:
            self.slowest_failure_s = max(self.slowest_failure_s, own_s)
        if ended.is_early:
            self._note_early(ended)
        if ended.num_wrong:
            self.wrong_requests += 1
            self.complain(f"{pair}: {ended.num_wrong} of {ended.num_compared} bytes wrong: {ended}")
        if own_s > bound_s:
            self.complain(
                f"{time.strftime('%H:%M:%S')} {pair}: request {ended.request} ended ({ended.kind}) after {own_s:.1f} s; bound {bound_s:g} s: "
                f"{ended}"
            )

    def _note_early(self, ended: Ended) -> None:
        is_served = ended.kind == "loaded"
        self.early["served" if is_served else "cancelled" if ended.kind == "cancelled" else "failed"] += 1
        self.early["begun again"] += is_served and ended.has_begun_again
        self.early["read early"] += is_served and ended.early_bytes > 0
        self.early_bytes += ended.early_bytes

    def note_innocent(self, pair: str, ended: Ended) -> None:
        """A load failed though neither its source nor its reader had been touched."""
        self.innocent += 1
        self.samples.setdefault(f"innocent, {ended.kind}", f"{pair}: {ended.text[:300]}")

    def note_kind(self, kind: str, text: str = "") -> None:
        """A request is over."""
        self.ends[kind] += 1
        if text:
            self.samples.setdefault(kind, text[:300])
        if kind not in GOOD_ENDS:
            self.complain(f"a request ended as '{kind}': {text[:300]}")

    def complain(self, sentence: str) -> None:
        """Something that must not be."""
        self.defects.append(sentence)

    def report(self) -> dict[str, Any]:
        """As JSON."""
        return {"kind": "soak", **msgspec.to_builtins(self, builtin_types=()), "ended": self.num_ended}

    def lines(self) -> Sequence[str]:
        """For a person."""
        told = [
            f"{self.started} requests, {self.num_ended} ended: {_listed(self.ends)}",
            f"loaded {_listed(self.per_pair)}; {self.prefix_hits} behind a prefix; {self.compared_bytes / 1e9:.2f} GB compared",
            f"early loads: {_listed(self.early)}; {self.early_bytes / 1e6:.1f} MB read while they were computed",
            f"faults: {_listed(self.faults)}; leases: {_listed(self.leases)}",
            f"slowest failure {self.slowest_failure_s:.1f} s, {self.quarantined} quarantined",
            f"{self.innocent} failed though source and reader were well",
            f"the machine stood still {len(self.stalls_s)} times, for {sum(self.stalls_s):.1f} s in all, {max(self.stalls_s, default=0):.1f} s at most",
            "grown: " + ", ".join(f"{name} {count / 1e6:.1f} MB" for name, count in self.growth_bytes.items()),
            "file descriptors: " + ", ".join(f"{name} {count:+d}" for name, count in self.growth_fds.items()),
            f"lost {self.lost}, wrong {self.wrong_requests}, defects {len(self.defects)}",
        ]
        return [*told, *self.defects[:MAX_TOLD]]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
