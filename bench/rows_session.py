"""Row d: what a rank costs while it does nothing, and what it holds up while it does much.

- An idle rank, no lease outstanding: processor time of a worker process with its transport and endpoint, over ten seconds; beside
  it an agent with NIXL's progress thread, as the in-tree connector starts one.
- The time that handing in a load holds the engine's step: `Endpoint.submit` at 128k tokens.
- How soon a rank answers another peer while a long transfer runs: a notification there and its read by the transport.
- Memory per peer at 1.6 million page pieces: what handshake and first preparation leave behind.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.arena import Arena
from bench.bars import Bar
from bench.prepare import Listed, Prepared
from bench.results import Result
from bench.rows_handshake import NUM_PAGES, NUM_TOKENS, SHAPE
from bench.shapes import Shape, pool_for, request
from kvreshard.plan.compile import compile_route
from kvreshard.session.commands import EndpointOptions, Load, RemoteEngine
from kvreshard.session.endpoint import Endpoint
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease, LeaseTable
from kvreshard.session.pull import pull_steps
from kvreshard.session.seal import Seal
from kvreshard.transport.local import HostMemory
from kvreshard.transport.nixl import NixlTransport
from kvreshard.transport.nixl_agent import load_nixl

ROW = "d session"
IDLE_S = 10.0
MAX_IDLE_SHARE, MAX_HELD_MS, MAX_ANSWER_MS, MAX_MEMORY_MIB = 0.02, 1.0, 50.0, 5.0


def run(full: bool) -> Iterator[Result]:
    """All four."""
    yield _idle()
    yield _submit()
    yield _answer(full)
    yield _memory()


def _busy_share(seconds: float) -> float:
    """Share of a core that this process takes while nobody asks it anything."""
    before_s, started_s = time.process_time(), time.monotonic()
    time.sleep(seconds)
    return (time.process_time() - before_s) / (time.monotonic() - started_s)


def _idle() -> Result:
    transport = NixlTransport("idle")
    table = LeaseTable(1 << 10)
    endpoint = Endpoint(0, transport, HostMemory(), EndpointOptions(), table=table)
    endpoint.start()
    time.sleep(1.0)
    ours = _busy_share(IDLE_S)
    endpoint.close()
    transport.close()
    api = load_nixl()
    agent: Any = api.nixl_agent(f"spinning-{os.getpid()}", api.nixl_agent_config(enable_prog_thread=True))
    time.sleep(1.0)
    theirs = _busy_share(IDLE_S / 4)
    del agent
    return Result(
        ROW, "idle rank, no lease", ours * 100, "% of a core", "an agent with NIXL's progress thread", theirs * 100,
        bars=(Bar("idle rank below 2 % of a core", ours < MAX_IDLE_SHARE),),
    )  # fmt: skip


def _submit() -> Result:
    """The engine's step only hands in an order; the endpoint's thread does the rest."""
    shape = Shape("Llama-3.1-70B TP 8 -> 4", "llama-3.1-70b", "tp=8,order=HND", "tp=4,order=HND")
    src, dst = shape.layouts(pool_for(shape, 131_072))
    wanted = request(src, dst, 131_072, "random")
    transport = NixlTransport("submit")
    endpoint = Endpoint(0, transport, HostMemory(), EndpointOptions(), table=LeaseTable(1 << 10))
    load = Load(
        "r",
        RemoteEngine("p", "1", Address("127.0.0.1", 1)),
        Lease("r", 0, 1),
        wanted,
        Seal(b"", b""),
        gives_back=False,
    )
    took = []
    for _ in range(200):
        started_s = time.perf_counter()
        endpoint.submit(load)
        took.append(time.perf_counter() - started_s)
    transport.close()
    middle, worst = float(np.median(took)) * 1e3, float(np.quantile(took, 0.99)) * 1e3
    return Result(
        ROW, "time that a load of 128k tokens holds the engine's step, median", middle, "ms",
        bars=(Bar("engine's step held below 1 ms, 99th percentile", worst < MAX_HELD_MS),), details={"p99_ms": worst},
        note=f"99th percentile {worst:.3g} ms",
    )  # fmt: skip


def _answer(full: bool) -> Result:
    """One transfer after another for some seconds; meanwhile a peer's notifications must be read soon."""
    shape = Shape("Llama-3.1-70B TP 8 -> 4", "llama-3.1-70b", "tp=8,order=HND", "tp=4,order=HND")
    num_tokens = 8192
    src, dst = shape.layouts(pool_for(shape, num_tokens))
    with Arena(src, dst, 0, (0, 1)) as arena:
        route, mover = compile_route(arena.src, arena.dst, 0, way="direct"), arena.mover()
        wanted = request(arena.src, arena.dst, num_tokens, "random")
        arena.fill(wanted)
        arena.sources.call(0, "connect", "rank9", arena.transport.metadata())
        waits, started_s = [], time.monotonic()
        span_s = 10.0 if full else 4.0
        while time.monotonic() - started_s < span_s:
            steps = pull_steps(mover, route, wanted, arena.dst)
            waiting = next(steps)
            while True:
                asked_s = time.monotonic()
                arena.sources.notify(0, 9, b"are you there")
                sent_s = time.monotonic()
                while not arena.transport.notifications():
                    time.sleep(0.0005)
                waits.append(time.monotonic() - sent_s)
                if waiting is None or waiting.state.value != "pending" or time.monotonic() - asked_s > 5:
                    try:
                        waiting = next(steps)
                    except StopIteration:
                        break
        worst = float(np.quantile(waits, 0.99)) * 1e3
        return Result(
            ROW, "answer to another peer during one transfer after another, median", float(np.median(waits)) * 1e3, "ms",
            bars=(Bar("answer to a peer below 50 ms, 99th percentile", worst < MAX_ANSWER_MS),), details={"p99_ms": worst, "asked": len(waits)},
            note=f"99th percentile {worst:.3g} ms",
        )  # fmt: skip


def _resident() -> int:
    """Bytes of this process's own memory that are in use."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _memory() -> Result:
    src, dst = SHAPE.layouts(NUM_PAGES)
    with Arena(src, dst, 0, (0, 1)) as arena:
        wanted = request(arena.src, arena.dst, NUM_TOKENS, "random")
        arena.mover()
        prepared, listed = Prepared(arena), Listed.of(wanted)
        prepared.prepare(compile_route(arena.src, arena.dst, 0), listed)  # whatever grows once, has grown
        prepared.release()
        keep: list[Any] = []

        def meet() -> None:
            route = compile_route(arena.src, arena.dst, 0)
            prepared.prepare(route, listed)
            prepared.release()
            keep.append(route)

        ours = _grown(meet, 8) / 2**20
    bar = Bar("memory per peer below 5 MiB", ours < MAX_MEMORY_MIB)
    return Result(ROW, "memory per peer, 1.6 million page pieces", ours, "MiB", bars=(bar,))


def _grown(work: Callable[[], None], times: int) -> float:
    before = _resident()
    for _ in range(times):
        work()
    return max(0.0, (_resident() - before) / times)
