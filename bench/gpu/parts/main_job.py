"""Does the cache of a real model get from one engine to another on a device, every byte of it? `kvreshard verify --device`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from bench.gpu.findings import Bench

MODELS = {
    "llama-3.1-8b": (("tp=1", "tp=2"), ("tp=4,order=NHD", "tp=2,order=HND"), ("tp=2,page=16", "tp=3,page=64")),
    "gemma-4-26b-a4b": (("tp=1", "tp=2"), ("tp=4", "tp=2"), ("tp=2", "tp=3")),
    "deepseek-v3": (("tp=1", "tp=2"), ("tp=4", "tp=2"), ("tp=2,page=16", "tp=3,page=64")),
    "nemotron-3-nano-30b-a3b": (("tp=1", "tp=2"), ("tp=4", "tp=2"), ("tp=2", "tp=3")),
}
TOKENS, LAYERS = "300", "8"
RANKS_AT_ONCE = 6


def run(bench: Bench) -> None:
    """Every pair, some at once; a rehearsal takes one pair of two models."""
    pairs = [(model, *pair) for model, pairs in MODELS.items() for pair in pairs]
    if bench.is_rehearsal:
        chosen = [pairs[1], pairs[9]]
        for model, src, dst in (pair for pair in pairs if pair not in chosen):
            bench.skip(f"{model}: {src} -> {dst}", "a rehearsal takes two pairs; the others run in `make test`")
        pairs = chosen
    with ThreadPoolExecutor(max(1, bench.cores // RANKS_AT_ONCE)) as pool:
        list(pool.map(lambda pair: _one(bench, *pair), pairs))


def _one(bench: Bench, model: str, src: str, dst: str) -> None:
    with bench.check(f"{model}: {src} -> {dst}") as found:
        words = [
            "--model",
            model,
            "--prefill",
            src,
            "--decode",
            dst,
            "--tokens",
            TOKENS,
            "--layers",
            LAYERS,
            "--device",
            bench.device,
        ]
        asked = [sys.executable, "-m", "kvreshard", "verify", "--json", *words]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=150, check=False)
        try:
            document = json.loads(done.stdout)
        except ValueError:
            raise RuntimeError(f"exit {done.returncode}: {(done.stderr or done.stdout)[-600:]}") from None
        if "error" in document:
            raise RuntimeError(document["error"]["message"])
        found.figure(**dict(_figures(document)))
        for finding in document["findings"][:3]:
            found.fail(finding)
        if not document["passed"] and not document["findings"]:
            found.fail("it did not pass, and named nothing")


def _figures(document: dict[str, float]) -> Iterator[tuple[str, float]]:
    yield "mib_moved", document["num_bytes"] / (1 << 20)
    yield "mib_compared", document["num_bytes_compared"] / (1 << 20)
    yield "descriptors", document["num_descriptors"]
    yield "mib_staged", document["num_staged_bytes"] / (1 << 20)
    yield "transfer_ms", document["transfer_seconds"] * 1e3
