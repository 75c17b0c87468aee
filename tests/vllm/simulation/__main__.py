"""Simulate worlds from a seed on for some seconds: python -m tests.vllm.simulation SEED SECONDS"""

from __future__ import annotations

import logging
import sys
import time
import traceback

from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import draw
from tests.vllm.simulation.world import World

from kvreshard.vllm import idle


def main(seed: int, seconds: float) -> int:
    """Exit status 1 if anything was wrong in any world."""
    base = base_config()
    logging.disable(logging.CRITICAL)
    idle.PATIENCE_S = 0.0
    started_s, num_worlds, num_bad = time.monotonic(), 0, 0
    totals = dict.fromkeys(("ended", "loaded", "looked at", "preempted", "given up"), 0)
    while time.monotonic() < started_s + seconds:
        model, shapes, weather = draw(seed)
        world = World(shapes, base, seed, weather)
        try:
            world.run(20)
        except Exception as error:  # noqa: BLE001  whatever it is, the next worlds are looked at too
            num_bad += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            print(f"seed {seed}, {model.kind}: {type(error).__name__} in {where.name}: {str(error)[:400]}", flush=True)
        finally:
            world.close()
        engines = world.by_name.values()
        counted = (
            world.num_ended, world.num_loaded, sum(e.runner.num_tokens_looked_at for e in engines),
            sum(e.num_preempted for e in engines), sum(len(e.given_up) for e in engines),
        )  # fmt: skip
        totals = {name: total + more for (name, total), more in zip(totals.items(), counted, strict=True)}
        num_worlds, seed = num_worlds + 1, seed + 1
    print(f"{num_worlds} worlds, {num_bad} with something wrong: {totals}")
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
