"""How fast is a load on this device, beside plain copies? And what do pieces, posts, and an idle rank cost?"""

from __future__ import annotations

import time

import numpy as np

from bench.gpu.findings import Bench
from bench.gpu.pair import Pair, spend
from bench.shapes import Shape
from kvreshard.plan.copies import CopyList
from kvreshard.plan.cost import usual_cost
from kvreshard.plan.reads import plan_reads
from kvreshard.testing.pieces import posted
from kvreshard.testing.rank_memory import time_plain_copy
from kvreshard.testing.ranks import ProcessRanks
from kvreshard.transport.base import Direction

MODEL = "llama-3.1-70b"
SHAPES = [
    Shape(f"Llama-3.1-70B HND TP {src} -> {dst}", MODEL, f"tp={src},order=HND", f"tp={dst},order=HND", None)
    for src, dst in ((8, 8), (8, 4), (4, 8))
]
TOKENS, REHEARSAL_TOKENS = (1024, 8192, 32_768), (256,)
PIECES = ((256, 10_000), (4096, 10_000), (65_536, 2000), (1 << 20, 200))
IDLE_S = 2.0


def run(bench: Bench) -> None:
    """Loads of three pairs of engines, then single posts."""
    _copies(bench)
    _posts(bench)
    lengths = REHEARSAL_TOKENS if bench.is_rehearsal else TOKENS
    for shape in SHAPES[:2] if bench.is_rehearsal else SHAPES:
        with bench.check(f"{shape.name}: all of it"), Pair(shape, max(lengths), bench.device) as pair:
            pair.fill()
            for num_tokens in lengths:
                for table in ("fresh", "random"):
                    measure_load(bench, shape, pair, num_tokens, table)
            _idle(bench, pair)


def measure_load(bench: Bench, shape: Shape, pair: Pair, num_tokens: int, table: str) -> None:
    with bench.check(f"{shape.name}, {num_tokens} tokens, {table} pages") as found:
        mover, wanted, route = pair.mover(), pair.request(num_tokens, table), pair.route(cost=usual_cost(bench.device))
        assert mover.staging is not None
        plan = plan_reads(route, wanted, mover.staging.half_bytes)
        num_bytes = pair.load(mover, route, wanted)
        spent = spend(lambda: pair.load(mover, route, wanted), budget_s=6.0)
        copied_s = min(time_plain_copy(num_bytes, bench.device) for _ in range(3))
        found.ratio = copied_s / spent.wall_s
        found.figure(
            ms=spent.wall_s * 1e3,
            gb_per_s=num_bytes / spent.wall_s / 1e9,
            processor_ms=spent.cpu_s * 1e3,
            mib=num_bytes / (1 << 20),
            direct_copies=sum(copies.num_copies for copies in plan.direct),
            staged_reads=sum(batch.reads.num_copies for batch in plan.batches),
            plain_copy_ms=copied_s * 1e3,
        )


def _idle(bench: Bench, pair: Pair) -> None:
    with bench.check(f"an idle rank with {len(pair.names)} peers") as found:
        shares = []
        for is_attentive in (False, True):
            pair.transport.set_attentive(is_attentive)
            time.sleep(0.6)  # the pace stays fast for a while after the last event
            cpu_s, wall_s = time.process_time(), time.monotonic()
            time.sleep(IDLE_S / 4 if bench.is_rehearsal else IDLE_S)
            shares.append((time.process_time() - cpu_s) / (time.monotonic() - wall_s))
        pair.transport.set_attentive(False)
        found.figure(percent_of_a_core=100 * shares[0], percent_with_leases=100 * shares[1])


def _posts(bench: Bench) -> None:
    size = 256 << 20
    for local, remote in ((bench.device, bench.device), ("cpu", "cpu")):
        with ProcessRanks(2, size, devices=[local, remote]) as ranks:
            ranks.connect_all()
            ranks.attend(1, True)
            rng = np.random.default_rng(0)
            for direction in Direction:
                for length, count in PIECES:
                    with bench.check(f"{local} {direction.name} {remote}: pieces of {length:,} B") as found:
                        here, there = (
                            rng.permutation(size // length)[:count].astype(np.uint64) * np.uint64(length)
                            for _ in range(2)
                        )
                        copies = posted(direction, ranks.address(0) + here, ranks.address(1) + there, length)
                        seconds = [
                            ranks.run(0, 1, direction, copies).seconds or 1.0
                            for _ in range(3 if bench.is_rehearsal else 7)
                        ]
                        each_s = float(np.median(seconds[1:])) / copies.num_copies
                        found.figure(
                            us_each=each_s * 1e6,
                            per_second=1 / each_s,
                            gb_per_s=length / each_s / 1e9,
                            first_ms=seconds[0] * 1e3,
                        )
            with bench.check(f"{local} READ {remote}: one piece of 8 B, from post to settled") as found:
                one = CopyList.of([ranks.address(1)], [ranks.address(0)], 8)
                latencies = [ranks.run(0, 1, Direction.READ, one).seconds or 1.0 for _ in range(50)]
                found.figure(
                    median_us=float(np.median(latencies)) * 1e6, p90_us=float(np.quantile(latencies, 0.9)) * 1e6
                )
        if bench.device == "cpu":
            return


def _copies(bench: Bench) -> None:
    num_bytes = (64 << 20) if bench.is_rehearsal else (2 << 30)
    with bench.check("plain copies") as found:
        found.figure(within_gb_per_s=num_bytes / min(time_plain_copy(num_bytes, bench.device) for _ in range(3)) / 1e9)
        if bench.device == "cpu":
            return
        import torch

        host = {
            "pageable": torch.zeros(num_bytes // 4, dtype=torch.uint8),
            "pinned": torch.zeros(num_bytes // 4, dtype=torch.uint8).pin_memory(),
        }
        there = torch.zeros(num_bytes // 4, dtype=torch.uint8, device=bench.device)
        for name, memory in host.items():
            for way, (target, source) in {"to_device": (there, memory), "to_host": (memory, there)}.items():
                seconds = []
                for _ in range(4):
                    torch.cuda.synchronize()
                    started_s = time.perf_counter()
                    target.copy_(source, non_blocking=True)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - started_s)
                found.figure(**{f"{name}_{way}_gb_per_s": memory.nbytes / min(seconds) / 1e9})
