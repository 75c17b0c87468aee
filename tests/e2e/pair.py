"""One pair of engines by hand.

    python -m tests.e2e.pair --model llama --prefill tp=1 --decode tp=2 --connector ReshardConnector

Sends a ladder of prompts through the pair, and prints what differs from an ordinary engine at TP 1. The floor is what
an ordinary engine of the decode side's shape differs by. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from tests.e2e import engine_log, models
from tests.e2e.compare import compare
from tests.e2e.engines import EngineFailed, EngineSpec, Nursery
from tests.e2e.prompts import ladder
from tests.e2e.router import route

SHAPE = {"tp": "tp", "pp": "pp", "dp": "dp", "page": "block_size", "block_size": "block_size"}


def side(model: str, text: str, **more: Any) -> EngineSpec:
    """The spec of 'tp=2,pp=1,page=64'."""
    numbers = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in SHAPE or not value.isdigit():
            raise SystemExit(f"'{part}': write {', '.join(SHAPE)} and a number, like tp=2,page=64")
        numbers[SHAPE[name]] = int(value)
    return EngineSpec(model, **numbers, **more)


def pairs(items: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """(name, value) of each 'name=value'; numbers and booleans are read as such."""
    read: list[tuple[str, Any]] = []
    for item in items:
        name, _, value = item.partition("=")
        known = {"true": True, "false": False}
        read.append(
            (name, known[value.lower()] if value.lower() in known else int(value) if value.isdigit() else value)
        )
    return tuple(read)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.pair", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="llama", choices=sorted(models.MODELS))
    parser.add_argument("--prefill", default="tp=1", help="shape of the prefill engine, like tp=2,page=64")
    parser.add_argument("--decode", default="tp=2", help="shape of the decode engine")
    parser.add_argument("--connector", default="NixlConnector")
    parser.add_argument("--extra", action="append", default=[], help="connector option, like lease_seconds=5")
    parser.add_argument(
        "--env", action="append", default=[], help="variable of both engines, like VLLM_LOGGING_LEVEL=DEBUG"
    )
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--repeat", type=int, default=1, help="how many times the prompts are sent")
    parser.add_argument("--logs", action="store_true", help="print the end of both logs")
    chosen = parser.parse_args(arguments)
    shared: dict[str, Any] = {"prefix_caching": chosen.prefix_caching, "environment": pairs(chosen.env)}
    linked = {**shared, "connector": chosen.connector, "extra": pairs(chosen.extra)}
    source = side(chosen.model, chosen.prefill, role="kv_producer", **linked)
    target = side(chosen.model, chosen.decode, role="kv_consumer", **linked)
    with Nursery() as nursery:
        print(f"logs: {nursery.logs}")
        try:
            return run(nursery, source, target, chosen.repeat, chosen.logs)
        except EngineFailed as error:
            print(error)
            return 2


def run(nursery: Nursery, source: EngineSpec, target: EngineSpec, repeat: int, logs: bool) -> int:
    """Start, send, compare. 0 when the pair agrees with ordinary engines within three times their own noise."""
    prefill, decode = nursery.engine(source), nursery.engine(target)
    for engine in (prefill, decode):
        print(f"{engine.spec}: up in {engine.start_seconds:.1f} s, {engine.memory_bytes() >> 20} MiB, {engine.about}")
    prompts = ladder(max(prefill.about["block_size"], decode.about["block_size"]))
    ordinary = {"connector": None, "extra": (), "role": "kv_both"}
    at_one = nursery.engine(dataclasses.replace(target, tp=1, pp=1, dp=1, **ordinary)).generate(prompts)
    at_tp = nursery.engine(dataclasses.replace(target, **ordinary)).generate(prompts)
    floor = compare(at_one, at_tp)
    print(f"ordinary, {target.tp} against 1: {floor}")
    worst = 0
    for _ in range(repeat):
        started = time.monotonic()
        routed = route(prefill, decode, prompts)
        found = compare(at_one, [answer.decode for answer in routed])
        print(f"{source} -> {target}: {found} ({time.monotonic() - started:.1f} s)")
        for prompt, answer in zip(prompts, routed, strict=True):
            print(f"  {len(prompt):4} tokens: {answer.decode.tokens} {answer.decode.error or ''}")
        agrees = found.answered and not found.wrong_tokens and found.logprob_gap <= 3 * max(floor.logprob_gap, 5e-6)
        worst = max(worst, 0 if agrees else 1)
    for engine in (prefill, decode):
        for line in engine_log.errors(engine.log):
            print(f"  {engine.spec}: {line}")
        if logs:
            print(f"--- {engine.log}\n{engine.log.read_text(errors='replace')[-6000:]}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
