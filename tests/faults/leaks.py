"""What is left after a thousand requests that ended in every way there is?

    python -m tests.faults.leaks [--cycles N] [--seed S] [--json FILE]

A prefill and a decode engine in this process over real NIXL agents: of a hybrid model, then of heads in equal pages. Each cycle one
request ends: loaded, loaded behind a prefix, aborted, released unread, with a lease that ran out or was never granted, with parameters that its source did not seal, revoked,
with a source that nobody knows. Every so often the prefill engine ends and comes back at its address.

1. Some cycles to warm up, then everything is counted: file descriptors, threads, resident memory, leases, quarantined loads, pages,
   scratch places, and inside the NIXL agents transfer handles, prepared lists, registered regions and peers.
2. After the cycles it is counted again. Nothing may have grown but resident memory, and that by less than a bound.
3. Apart from that, since it is NIXL's own: a peer that lives on is removed and added again some times, and the file descriptors
   that this costs are counted per time and side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import msgspec
import numpy as np
from tests.soak.decode import Ended, Loads
from tests.soak.engine import Counters, Engine
from tests.soak.prefill import Params, Prefills, seal_params
from tests.soak.shapes import SHAPES

from kvreshard.model.changed import replace
from kvreshard.session.commands import EndpointOptions, RemoteEngine
from kvreshard.session.handshake_messages import Address
from kvreshard.tools.observer import ObserverOptions
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.nixl import NixlTransport

OPTIONS = EndpointOptions(
    handshake_timeout_s=0.3,
    load_timeout_s=20.0,
    settle_timeout_s=5.0,
    heartbeat_s=0.05,
    retry_s=0.05,
)
WATCHED = ObserverOptions(digest_share=0.2)
PATIENCE_S = 60.0
WARM_UP = 100
RESTART_EVERY = 40
PAIRS = (("hybrid-p0", "hybrid-d0"), ("heads-p1", "heads-d0"))
LONG_S, SHORT_S = 30.0, 0.002
ENDS = (
    ("loaded",) * 6
    + ("prefix",) * 3
    + ("aborted",) * 4
    + ("released", "expired", "expired", "stale", "forged", "revoked")
)
# Without InfiniBand: see tests/soak/run.py.
ENVIRONMENT = {"UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib", "NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"}
# Measured over 1,000 cycles: 2 to 9 MB, most of it in the first hundreds. One cache of the engines here has 1 MB.
MAX_GROWTH_BYTES = 32 << 20
# What may be more at one moment than at another without being a leak.
FREE_TO_CHANGE = {"resident_bytes"}


@dataclass(frozen=True)
class Leaks:
    """Counters of both engines before and after, and how the requests ended."""

    pair: tuple[str, str]
    seed: int
    cycles: int
    restarts: int
    ends: dict[str, int]
    wrong: int
    before: tuple[Counters, Counters]
    after: tuple[Counters, Counters]
    nixl_fds_per_return: float

    @property
    def grown(self) -> dict[str, int]:
        """What is more than before, but for memory within its bound."""
        found = {}
        for side, before, after in zip(("prefill", "decode"), self.before, self.after, strict=True):
            for name in (field.name for field in fields(Counters)):
                more = getattr(after, name) - getattr(before, name)
                if more > (MAX_GROWTH_BYTES if name in FREE_TO_CHANGE else 0):
                    found[f"{side} {name}"] = more
        return found


class Cycles:
    """Both engines, and one request after the other."""

    def __init__(self, seed: int, pair: tuple[str, str]) -> None:
        self.rng = random.Random(seed)
        self.number = 0
        self.ends: Counter[str] = Counter()
        self.wrong = self.restarts = 0
        src, dst = (next(shape for shape in SHAPES if shape.name == name) for name in pair)
        self.source, self.reader = (Engine(shape, OPTIONS, self.rng, watched=WATCHED) for shape in (src, dst))
        self.prefills, self.loads = Prefills(self.source), Loads(self.reader)

    def restart_source(self) -> None:
        """The prefill engine ends, and starts again at its address as another instance id."""
        port = self.source.listener.address.port
        self.source.close()
        self.source = Engine(self.source.shape, OPTIONS, self.rng, port, WATCHED)
        self.prefills = Prefills(self.source)
        self.restarts += 1

    def run(self, count: int) -> None:
        """So many requests."""
        for _ in range(count):
            self.number += 1
            if self.number % RESTART_EVERY == 0:
                self.restart_source()
            if self.number % RESTART_EVERY == 1:
                self._one("nobody")
            else:
                self._one(self.rng.choice(ENDS))

    def _one(self, end: str) -> None:
        name, rng = f"r{self.number}", self.rng
        num_tokens = rng.randrange(1, 600)
        ttl_s = SHORT_S if end == "expired" else LONG_S
        params = self.prefills.begin(name, num_tokens, rng.getrandbits(32), ttl_s, end == "revoked")
        if end == "revoked":
            self.ends[end] += 1
            return
        assert params is not None
        if end == "expired" and rng.random() < 0.5:  # the other half meets its end somewhere on the way
            self.until(lambda: not len(self.prefills))
        if end == "released":
            self.loads.release(params)
            self.until(lambda: not len(self.prefills))
            self.ends[end] += 1
            return
        prefix = rng.randrange(num_tokens) if end == "prefix" else 0
        self.loads.begin(name, self._forged(params, end), prefix, is_watched=rng.random() < 0.5)
        if end == "aborted":
            self.loads.abort(name)
        ended = self.until(lambda: not len(self.loads))
        if end in ("forged", "stale", "nobody"):
            self.loads.release(params)
        self.until(lambda: not len(self.prefills))
        assert len(ended) == 1, f"request {name} ended {len(ended)} times"
        self.ends[f"{end}: {ended[0].kind}"] += 1
        self.wrong += ended[0].num_wrong

    def _forged(self, params: Params, end: str) -> Params:
        """The parameters as they were, or as no source has them."""
        if end == "forged":
            return msgspec.structs.replace(params, lease=params.lease._replace(word=1))
        if end == "stale":
            former = msgspec.structs.replace(params, lease=params.lease._replace(word=1))
            return msgspec.structs.replace(former, code=seal_params(self.source, former.lease, former.src_tables))
        if end == "nobody":
            return msgspec.structs.replace(params, remote=RemoteEngine("nobody", "life", Address("127.0.0.1", 1)))
        return params

    def until(self, condition: Callable[[], bool]) -> list[Ended]:
        """Collect from both engines until something is so; the loads that ended meanwhile."""
        deadline_s, ended = time.monotonic() + PATIENCE_S, []
        while True:
            ended += self.loads.collect(self.reader.collect())
            self.prefills.collect(self.source.collect())
            if condition():
                return ended
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"cycle {self.number}: what should happen has not within {PATIENCE_S:g} s")
            time.sleep(0.0005)

    def count(self) -> tuple[Counters, Counters]:
        """Of both engines, once everything has come to rest, with a peer that was read from."""
        self.number += 1
        self._one("loaded")
        self.reader.read_from(self.source, 20)
        found: list[tuple[Counters, Counters]] = []

        def is_steady() -> bool:
            now = self.source.count(self.prefills.num_pages), self.reader.count(self.loads.num_pages)
            at_rest = all(c.jobs + c.handles + c.leases + c.quarantined == 0 for c in now)
            steady = bool(found) and _settled(found[-1]) == _settled(now) and at_rest
            found.append(now)
            return steady

        self.until(is_steady)
        return found[-1]

    def close(self) -> None:
        self.reader.close()
        self.source.close()


def _settled(counters: tuple[Counters, Counters]) -> tuple[Counters, ...]:
    return tuple(replace(counter, resident_bytes=0) for counter in counters)


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """NIXL on this machine only, and silent."""
    before = {key: os.environ.get(key) for key in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def measure(cycles: int, seed: int, pair: tuple[str, str] = PAIRS[0]) -> Leaks:
    """Run them. Whatever leaks shows from the second count to the third."""
    with surroundings():
        both = Cycles(seed, pair)
        try:
            both.run(WARM_UP)
            before = both.count()
            both.run(cycles)
            after = both.count()
        finally:
            both.close()
        ends = dict(sorted(both.ends.items()))
        return Leaks(pair, seed, cycles, both.restarts, ends, both.wrong, before, after, count_returns(20))


def count_returns(times: int) -> float:
    """File descriptors that one removal and return of a peer that lives on costs, both sides in this process."""
    memory = np.zeros(4096, np.uint8)
    near, far = NixlTransport("near"), NixlTransport("far")
    try:
        near.register([MemoryRegion(int(memory.ctypes.data), memory.nbytes)])
        counts = []
        for _ in range(times):
            near.add_peer("far", far.metadata())
            near.notify("far", b"x")
            deadline_s = time.monotonic() + PATIENCE_S
            while not far.notifications():
                assert time.monotonic() < deadline_s, "a notification did not arrive"
            near.remove_peer("far")
            counts.append(len(os.listdir("/proc/self/fd")))
        return (counts[-1] - counts[1]) / (times - 2)
    finally:
        near.close()
        far.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What is left after a thousand requests that ended in every way?")
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    found = [measure(options.cycles, options.seed, pair) for pair in PAIRS]
    for leaks in found:
        _print(leaks)
    if options.json:
        rows = [{**asdict(leaks), "grown": leaks.grown} for leaks in found]
        options.json.write_text(json.dumps({"kind": "leaks", "rows": rows}, indent=1) + "\n")
    return 1 if any(leaks.grown or leaks.wrong for leaks in found) else 0


def _print(leaks: Leaks) -> None:
    print(" -> ".join(leaks.pair))
    for end, count in leaks.ends.items():
        print(f"  {end:28} {count}")
    for field in fields(Counters):
        rows = [
            (getattr(one, field.name), getattr(two, field.name))
            for one, two in zip(leaks.before, leaks.after, strict=True)
        ]
        print(f"  {field.name:18} prefill {rows[0][0]} -> {rows[0][1]}, decode {rows[1][0]} -> {rows[1][1]}")
    print(f"  NIXL: {leaks.nixl_fds_per_return:.2f} file descriptors per return of a peer that lives on")
    print(
        f"{leaks.cycles} cycles, {leaks.restarts} restarts, {leaks.wrong} wrong bytes, grown: {leaks.grown or 'nothing'}"
    )


if __name__ == "__main__":
    sys.exit(main())
