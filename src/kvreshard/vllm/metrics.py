"""What does vLLM's own `/metrics` say about loads, and what does its periodic log line?

Every rank counts between two engine steps; vLLM adds the ranks up and hands the sum to the frontend, which observes it. All
series carry vLLM's labels.

| series | kind | of |
|---|---|---|
| `kvreshard_load_seconds`, `_bind_seconds`, `_post_seconds` | histogram | a rank's part of a load: all of it, planning, posting |
| `kvreshard_load_bytes`, `_load_descriptors` | histogram | what a rank read, in how many pieces |
| `kvreshard_bytes_total{way}` | counter | cache that arrived, `direct` or `staged` |
| `kvreshard_failures_total{cause}` | counter | loads of ranks that failed |
| `kvreshard_fallbacks_total{cause}` | counter | requests computed here although a prefill was offered |
| `kvreshard_partial_loads_total{cause}` | counter | requests of which fewer tokens were loaded than had been prefilled, or none |
| `kvreshard_tokens_not_loaded_total{cause}` | counter | tokens that had been prefilled for them and were not loaded |
| `kvreshard_refusals_total` | counter | requests ended with an error, since they need what only the prefill has and what could not be loaded |
| `kvreshard_leases_total{end}` | counter | leases of ranks that ended: `reported`, `expired`, `revoked` |
| `kvreshard_digest_checks_total{result}` | counter | loads of ranks compared with their source: `equal`, `different`, `refused`, `unanswered`, `skipped` |
| `kvreshard_stuck_calls_total{call}` | counter | calls into NIXL of ranks that did not come back within `call_timeout_s`, and turns of their sessions |
| `kvreshard_quarantined_total` | counter | requests whose blocks were kept back for a time, or for good; each once, on however many ranks |
| `kvreshard_quarantined_blocks_total{event}` | counter | blocks that were `kept` back and `freed` again; the difference is out of the pool |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvreshard.session.commands import CheckResult, FailureKind, Results
from kvreshard.session.lease import Cause
from kvreshard.session.pull import Moved
from kvreshard.transport.watchdog import CALLS
from kvreshard.vllm.options import read_load_timeout

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "load_seconds": ("Seconds from binding a load to its last byte, per rank.", SECONDS),
    "bind_seconds": ("Seconds to bind a load, per rank.", SECONDS),
    "post_seconds": ("Seconds to hand a load to the transport, per rank.", SECONDS),
    "load_bytes": ("Bytes read for a load, per rank.", tuple(float(4**i) for i in range(5, 18))),
    "load_descriptors": ("Pieces read for a load, per rank.", tuple(float(4**i) for i in range(12))),
}
COUNTERS: Mapping[str, tuple[str, str | None]] = {
    "bytes": ("Bytes of cache that arrived, read directly or through staging.", "way"),
    "failures": ("Loads that failed, per rank.", "cause"),
    "fallbacks": ("Requests computed here although a prefill was offered.", "cause"),
    "partial_loads": ("Requests of which fewer tokens were loaded than had been prefilled.", "cause"),
    "tokens_not_loaded": ("Tokens that had been prefilled and were not loaded.", "cause"),
    "refusals": ("Requests that could be neither loaded nor computed here.", None),
    "leases": ("Leases that ended, per rank.", "end"),
    "digest_checks": ("Loads compared with their source, per rank.", "result"),
    "stuck_calls": ("Calls into NIXL that did not come back in time, per rank.", "call"),
    "quarantined": ("Requests whose blocks are kept back because a read may still write them.", None),
    "quarantined_blocks": ("Blocks kept back, and blocks freed again; the difference is out of the pool.", "event"),
}

# What a counter's label may say. Series exist from the start: a rate over one that appears with its first event misses that event.
_FALLBACKS = "itself", "host", "role", "spent", "reset", "deadlock", "pool", "prompt", "state", "window"
_PARTIAL_LOADS = *_FALLBACKS, "failure", "length", "logprobs", "vllm"

LABEL_VALUES: Mapping[str, tuple[str, ...]] = {
    "bytes": ("direct", "staged"),
    "failures": get_args(FailureKind),
    "fallbacks": ("params", *_FALLBACKS),
    "partial_loads": _PARTIAL_LOADS,
    "tokens_not_loaded": _PARTIAL_LOADS,
    "leases": get_args(Cause),
    "digest_checks": get_args(CheckResult),
    "stuck_calls": CALLS,
    "quarantined_blocks": ("kept", "freed"),
}


def seconds_buckets(load_timeout_s: float) -> tuple[float, ...]:
    """Bounds that reach past what a load may take."""
    beyond = {load_timeout_s, load_timeout_s * 1.25}
    return tuple(sorted({*SECONDS, *(bound for bound in beyond if bound > SECONDS[-1])}))


def _samples() -> dict[str, list[float]]:
    return {name: [] for name in HISTOGRAMS}


def _counts() -> dict[str, dict[str, int]]:
    return {name: {} for name in COUNTERS}


@dataclass
class ReshardStats(KVConnectorStats):
    """Between two steps. `data`: `samples` of each histogram, `counts` of each counter by its label's value."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.data = {"samples": _samples(), "counts": _counts()}

    def count(self, counter: str, label: str = "", amount: int = 1) -> None:
        """Add to one counter."""
        counts = self.data["counts"][counter]
        counts[label] = counts.get(label, 0) + amount

    def note(self, results: Results) -> None:
        """What an endpoint has done."""
        for moved in results.received.values():
            self._note_moved(moved)
        for failure in results.failed.values():
            self.count("failures", failure.kind)
        for cause in results.freed.values():
            self.count("leases", cause)
        for result in results.checks.values():
            self.count("digest_checks", result)
        for call in results.stuck:
            self.count("stuck_calls", call)

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return not any(self.data["samples"].values()) and not any(self.data["counts"].values())

    def aggregate(self, other: KVConnectorStats) -> ReshardStats:
        """Add another rank's."""
        for name, values in other.data["samples"].items():
            self.data["samples"][name].extend(values)
        for name, counts in other.data["counts"].items():
            for label, amount in counts.items():
                self.count(name, label, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line."""
        samples, counts = self.data["samples"], self.data["counts"]
        line: dict[str, int | float] = {"Loads": len(samples["load_seconds"])}
        if samples["load_seconds"]:
            seconds, num_bytes = np.array(samples["load_seconds"]), np.array(samples["load_bytes"])
            line |= {
                "Median load (ms)": round(float(np.median(seconds)) * 1e3, 3),
                "P90 load (ms)": round(float(np.percentile(seconds, 90)) * 1e3, 3),
                "Median bind (ms)": round(float(np.median(samples["bind_seconds"])) * 1e3, 3),
                "MB per load": round(float(num_bytes.mean()) / 1e6, 3),
                "MB/s": round(float(num_bytes.sum() / max(seconds.sum(), 1e-9)) / 1e6, 1),
                "Descriptors per load": round(float(np.mean(samples["load_descriptors"])), 1),
            }
        for name in ("failures", "fallbacks", "partial_loads", "leases", "digest_checks", "stuck_calls"):
            line |= {
                f"{name.capitalize().replace('_', ' ')} ({label})": amount
                for label, amount in sorted(counts[name].items())
            }
        return line

    def take(self) -> ReshardStats | None:
        """What has been counted, and a fresh start; None if nothing."""
        if self.is_empty():
            return None
        taken = ReshardStats(self.data)
        self.reset()
        return taken

    def _note_moved(self, moved: Moved) -> None:
        samples = self.data["samples"]
        samples["load_seconds"].append(moved.total_s)
        samples["bind_seconds"].append(moved.bind_s)
        samples["post_seconds"].append(moved.post_s)
        samples["load_bytes"].append(float(moved.num_read_bytes))
        samples["load_descriptors"].append(float(moved.num_copies))
        for way, amount in (("staged", moved.num_staged_bytes), ("direct", moved.num_bytes - moved.num_staged_bytes)):
            if amount:
                self.count("bytes", way, amount)


class ReshardPromMetrics(KVConnectorPromMetrics):
    """The series of the table above."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        loads = seconds_buckets(read_load_timeout(vllm_config.kv_transfer_config))
        self._histograms = {
            name: self._histogram_cls(
                name=f"kvreshard_{name}",
                documentation=text,
                buckets=list(loads if name == "load_seconds" else buckets),
                labelnames=labelnames,
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            name: self._counter_cls(
                name=f"kvreshard_{name}", documentation=text, labelnames=[*labelnames, *([label] if label else [])]
            )
            for name, (text, label) in COUNTERS.items()
        }
        for labels in per_engine_labelvalues.values():
            for histogram in self._histograms.values():
                histogram.labels(*labels)
            for name, (_, label) in COUNTERS.items():
                for value in LABEL_VALUES[name] if label else ("",):
                    self._counters[name].labels(*labels, *([value] if label else []))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Take in what the ranks counted."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data["samples"].items():
            series = self._histograms[name].labels(*labels)
            for value in values:
                series.observe(value)
        for name, counts in transfer_stats_data["counts"].items():
            for label, amount in counts.items():
                self._counters[name].labels(*labels, *([label] if COUNTERS[name][1] else [])).inc(amount)
