"""Metrics of loads, for vLLM's `/metrics` and its periodic log line. `docs/reference/metrics.md` lists them.

Every rank counts between two engine steps. vLLM adds the ranks up and hands the sum to the frontend, which observes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, NamedTuple, get_args

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvreshard import __version__
from kvreshard.session.commands import CheckResult, FailureKind, Results
from kvreshard.session.lease import Cause
from kvreshard.session.pull import TransferStats
from kvreshard.transport.watchdog import CALLS
from kvreshard.vllm.options import read_load_timeout, read_options
from kvreshard.vllm.outcomes import REASONS
from kvreshard.vllm.versions import find_version

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "load_seconds": ("Seconds from binding a load to its last byte, per rank.", SECONDS),
    "bind_seconds": ("Seconds to bind a load, per rank.", SECONDS),
    "post_seconds": ("Seconds to hand a load to the transport, per rank.", SECONDS),
    "load_bytes": ("Bytes read for a load, per rank.", tuple(float(4**i) for i in range(5, 18))),
    "load_descriptors": ("Pieces read for a load, per rank.", tuple(float(4**i) for i in range(12))),
    "wait_seconds": ("Seconds from a request's arrival until its load has ended, whatever it waited for.", SECONDS),
    "handshake_seconds": ("Seconds until another engine was met, or could not be, per rank.", SECONDS),
}
GAUGES: Mapping[str, str] = {
    "leases_held": "Requests that other engines may read, or that are computed for them.",
    "blocks_held": "Blocks that are held for other engines.",
    "loads_waiting": "Requests that wait until their load can begin.",
    "loads_in_flight": "Requests whose load is under way, without those below.",
    "loads_early": "Requests whose load has begun before their prefill had ended.",
    "pool_blocks": "Blocks of the engine's pool, whoever has them.",
    "quarantine_blocks_held": "Blocks that are out of the pool because a read may still write them.",
}
"""Of the scheduler: they are told when they change."""
RANK_GAUGES: Mapping[str, str] = {
    "peers": "Engines that ranks have met and can read from, added up over the ranks.",
    "stuck_threads": "Threads of ranks that wait for a call that does not come back, into NIXL or into a device.",
}
"""Of the ranks: they tell by how much they change."""


class CounterSeries(NamedTuple):
    """A counter with its label, if any, and all values of that label.

    All series exist from the start: a rate over a series that appears with its first event misses that event.
    """

    text: str
    label: str | None = None
    values: tuple[str, ...] = ("",)


_FALLBACKS = (*REASONS, "prompt", "state", "window")
_PARTIAL_LOADS = (*_FALLBACKS, "failure", "length", "logprobs", "vllm")
COUNTERS: Mapping[str, CounterSeries] = {
    "bytes": CounterSeries(
        "Bytes of cache that arrived, read directly or through staging.", "way", ("direct", "staged")
    ),
    "read_bytes": CounterSeries(
        "Bytes read for it, which staging makes more: it reads gaps too.", "way", ("direct", "staged")
    ),
    "early_bytes": CounterSeries("Bytes of cache that arrived before their prefill had ended."),
    "failures": CounterSeries("Loads that failed, per rank.", "cause", get_args(FailureKind)),
    "fallbacks": CounterSeries("Requests computed here although a prefill was offered.", "cause", _FALLBACKS),
    "partial_loads": CounterSeries(
        "Requests of which fewer tokens were loaded than had been prefilled.", "cause", _PARTIAL_LOADS
    ),
    "tokens_not_loaded": CounterSeries("Tokens that had been prefilled and were not loaded.", "cause", _PARTIAL_LOADS),
    "answers": CounterSeries(
        "Answers held for the prefill of the next turn, and those given up for want of blocks.",
        "event",
        ("published", "withdrawn"),
    ),
    "refusals": CounterSeries("Requests that could be neither loaded nor computed here."),
    "leases": CounterSeries("Leases that ended, per rank.", "end", get_args(Cause)),
    "handshakes": CounterSeries("Engines that were met, or could not be, per rank.", "outcome", ("met", "failed")),
    "digest_checks": CounterSeries("Loads compared with their source, per rank.", "result", get_args(CheckResult)),
    "stuck_calls": CounterSeries("Calls into NIXL that did not come back in time, per rank.", "call", CALLS),
    "quarantined": CounterSeries("Requests whose blocks are held because a read may still write them."),
    "quarantined_blocks": CounterSeries(
        "Blocks held, and blocks freed again; the difference is out of the pool.", "event", ("kept", "freed")
    ),
}


def read_build_info(vllm_config: Any) -> dict[str, str]:
    """Labels of `kvreshard_build_info`."""
    backend = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config or {}).backend
    nixl = next((found.version for found in metadata.distributions(name="nixl")), "")
    return {"version": __version__, "vllm": find_version() or "", "nixl": nixl, "backend": backend}


def seconds_buckets(load_timeout_s: float) -> tuple[float, ...]:
    """Bounds that reach past what a load may take."""
    beyond = {load_timeout_s, load_timeout_s * 1.25}
    return tuple(sorted({*SECONDS, *(bound for bound in beyond if bound > SECONDS[-1])}))


@dataclass
class ReshardStats(KVConnectorStats):
    """Counts of one rank between two steps.

    `data`: `samples` of each histogram, `counts` of each counter by label value, `gauges` that have changed, and `changes` of the ranks' gauges.
    """

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    def reset(self) -> None:
        """Start anew."""
        self.data = {
            "samples": {name: [] for name in HISTOGRAMS},
            "counts": {name: {} for name in COUNTERS},
            "gauges": {},
            "changes": {},
        }

    def count(self, counter: str, label: str = "", amount: int = 1) -> None:
        """Add to one counter."""
        counts = self.data["counts"][counter]
        counts[label] = counts.get(label, 0) + amount

    def sample(self, histogram: str, value: float) -> None:
        """Add to one histogram."""
        self.data["samples"][histogram].append(value)

    def note(self, results: Results) -> None:
        """Count the results of an endpoint."""
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
        for seconds, is_met in results.handshakes:
            self.sample("handshake_seconds", seconds)
            self.count("handshakes", "met" if is_met else "failed")
        self._change("peers", results.peers_change)
        self._change("stuck_threads", results.stuck_change)

    def _change(self, gauge: str, amount: int) -> None:
        if amount:
            self.data["changes"][gauge] = self.data["changes"].get(gauge, 0) + amount

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        samples, counts = self.data["samples"].values(), self.data["counts"].values()
        return not (any(samples) or any(counts) or self.data["gauges"] or self.data["changes"])

    def aggregate(self, other: KVConnectorStats) -> ReshardStats:
        """Add the counts of another rank."""
        for name, values in other.data["samples"].items():
            self.data["samples"][name].extend(values)
        for name, counts in other.data["counts"].items():
            for label, amount in counts.items():
                self.count(name, label, amount)
        self.data["gauges"].update(other.data["gauges"])
        for gauge, amount in other.data["changes"].items():
            self._change(gauge, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The values of vLLM's log line."""
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
        """The counts since the last call; None if there are none."""
        if self.is_empty():
            return None
        taken = ReshardStats(self.data)
        self.reset()
        return taken

    def _note_moved(self, moved: TransferStats) -> None:
        samples = self.data["samples"]
        samples["load_seconds"].append(moved.total_s)
        samples["bind_seconds"].append(moved.bind_s)
        samples["post_seconds"].append(moved.post_s)
        samples["load_bytes"].append(float(moved.num_read_bytes))
        samples["load_descriptors"].append(float(moved.num_copies))
        if moved.num_early_bytes:
            self.count("early_bytes", amount=moved.num_early_bytes)
        num_direct_bytes = moved.num_bytes - moved.num_staged_bytes  # read as they are, without gaps
        for counter, way, amount in (
            ("bytes", "staged", moved.num_staged_bytes),
            ("bytes", "direct", num_direct_bytes),
            ("read_bytes", "staged", moved.num_read_bytes - num_direct_bytes),
            ("read_bytes", "direct", num_direct_bytes),
        ):
            if amount:
                self.count(counter, way, amount)


class ReshardPromMetrics(KVConnectorPromMetrics):
    """The Prometheus series, in vLLM's frontend."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        load_buckets = seconds_buckets(read_load_timeout(vllm_config.kv_transfer_config))
        self._histograms = {
            name: self._histogram_cls(
                name=f"kvreshard_{name}",
                documentation=text,
                buckets=list(load_buckets if name == "load_seconds" else buckets),
                labelnames=labelnames,
            )
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._counters = {
            name: self._counter_cls(
                name=f"kvreshard_{name}",
                documentation=series.text,
                labelnames=[*labelnames, *([series.label] if series.label else [])],
            )
            for name, series in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"kvreshard_{name}",
                documentation=text,
                labelnames=labelnames,
                # Of several API servers one is told what happened in a step.
                multiprocess_mode="sum" if name in RANK_GAUGES else "mostrecent",
            )
            for name, text in {**GAUGES, **RANK_GAUGES}.items()
        }
        # Added up here: Ray's gauges can only be set.
        self._totals: defaultdict[tuple[str, int], int] = defaultdict(int)
        info = read_build_info(vllm_config)
        build = self._gauge_cls(
            name="kvreshard_build_info",
            documentation="Versions of this engine's parts, and NIXL's backend; always 1.",
            labelnames=[*labelnames, *info],
            multiprocess_mode="mostrecent",
        )
        for labels in per_engine_labelvalues.values():
            build.labels(*labels, *info.values()).set(1)
            for gauge in self._gauges.values():
                gauge.labels(*labels)
            for histogram in self._histograms.values():
                histogram.labels(*labels)
            for name, series in COUNTERS.items():
                for value in series.values:
                    self._of(name, labels, value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what the ranks counted."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, values in transfer_stats_data["samples"].items():
            series = self._histograms[name].labels(*labels)
            for value in values:
                series.observe(value)
        for name, counts in transfer_stats_data["counts"].items():
            for label, amount in counts.items():
                self._of(name, labels, label).inc(amount)
        for name, value in transfer_stats_data["gauges"].items():
            self._gauges[name].labels(*labels).set(value)
        for name, amount in transfer_stats_data["changes"].items():
            self._totals[name, engine_idx] += amount
            self._gauges[name].labels(*labels).set(self._totals[name, engine_idx])

    def _of(self, name: str, labels: list[object], value: str) -> Any:
        """A counter's series for one value of its label."""
        return self._counters[name].labels(*labels, *([value] if COUNTERS[name].label else []))
