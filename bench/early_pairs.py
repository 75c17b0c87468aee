"""Pairs of real engines with paced compute and link, and one request at a time through them: after the prefill, beside it, or pushed."""

from __future__ import annotations

import itertools
import json
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.engine import EngineSpec, Output
from tests.e2e.engines import Nursery
from tests.e2e.router import PREFILL_PARAMS

from bench.pace import EVENT_FILE, PACE_FILE, Pace

NUM_TOKENS, NUM_LAYERS = 1536, 32
# Keys and values of two heads, 64 numbers of 4 bytes.
CACHE_BYTES = NUM_TOKENS * NUM_LAYERS * 2 * 2 * 64 * 4
OURS, PUSHED = "PacedReshardConnector", "PacedPushConnector"
NUM_SAID = 2
# Events are in the file a moment after a request has ended.
SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Passage:
    """One request. Seconds: from the client's send to the first token, to the last computed token, and from there to the loaded cache.

    `held_s`: from the blocks of the decode engine to the loaded cache. `events`: what happened when, in seconds from the send (`paced`).
    """

    first_token_s: float
    prefill_s: float
    exposed_s: float
    held_s: float
    output: Output
    events: Sequence[dict[str, Any]]


class Paces:
    """The files that all engines of a run share."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="kvreshard-paced-"))
        self._pace, self._events = folder / "pace.json", folder / "events"
        self._events.touch()
        self.set(Pace())

    @property
    def environment(self) -> tuple[tuple[str, str], ...]:
        return (PACE_FILE, str(self._pace)), (EVENT_FILE, str(self._events))

    def set(self, pace: Pace) -> None:
        """From the next step on."""
        pace.write(self._pace)

    def since(self, began_s: float) -> list[dict[str, Any]]:
        """What has happened since a time of the monotonic clock, in seconds from it."""
        found = [json.loads(line) for line in self._events.read_text().splitlines()]
        return [
            {name: value - began_s if name.endswith("_s") else value for name, value in one.items()}
            for one in found
            if one["at_s"] >= began_s
        ]


class PacedPair:
    """A prefill engine with chunks of `chunk` tokens and a decode engine."""

    def __init__(self, nursery: Nursery, paces: Paces, connector: str, chunk: int) -> None:
        self._paces = paces
        self.prefill, self.decode = (
            nursery.engine(_spec(connector, role, tokens, paces))
            for role, tokens in (("kv_producer", chunk), ("kv_consumer", NUM_TOKENS))
        )
        self._numbers = itertools.count()
        self._where: dict[str, Any] = {}

    def sequential(self, prompt: Sequence[int]) -> Passage:
        """The decode engine hears of the request when the prefill has answered."""
        began_s = time.monotonic()
        answer = self.prefill.wait(self.prefill.submit(prompt, 1, dict(PREFILL_PARAMS), self.prefill.new_id()))
        assert answer.kv_transfer_params is not None, answer
        self._where = answer.kv_transfer_params
        pending = self.decode.submit(prompt, NUM_SAID, answer.kv_transfer_params, self.decode.new_id())
        return self._ended(began_s, self.decode.wait(pending))

    def early(self, prompt: Sequence[int]) -> Passage:
        """Both engines get the request at once. After a first `sequential`, which says where the prefill engine listens."""
        transfer = {"transfer_id": f"x-{next(self._numbers)}-{random.getrandbits(32)}"}
        where = {name: self._where[name] for name in ("remote_host", "remote_port")}
        began_s = time.monotonic()
        first = self.prefill.submit(prompt, 1, {**PREFILL_PARAMS, **transfer}, self.prefill.new_id())
        wanted = {"do_remote_prefill": True, "do_remote_decode": False, **transfer, **where}
        output = self.decode.wait(self.decode.submit(prompt, NUM_SAID, wanted, self.decode.new_id()))
        self.prefill.wait(first)
        return self._ended(began_s, output)

    def pushed(self, prompt: Sequence[int]) -> Passage:
        """Both at once, under one request id, as vLLM's push wants it."""
        name = f"push-{next(self._numbers)}"
        names = "remote_engine_id", "remote_host", "remote_port", "tp_size", "pp_size"
        where = {key: self._where[key] for key in names if key in self._where}
        began_s = time.monotonic()
        first = self.prefill.submit(prompt, 1, dict(PREFILL_PARAMS), name)
        wanted = {"do_remote_prefill": True, "do_remote_decode": False, "remote_request_id": name, **where}
        output = self.decode.wait(self.decode.submit(prompt, NUM_SAID, {"remote_block_ids": None, **wanted}, name))
        self.prefill.wait(first)
        return self._ended(began_s, output)

    def sleep(self) -> None:
        """Take no processor time: threads of NIXL's spin in the in-tree connector's engines."""
        for engine in (self.prefill, self.decode):
            engine.signal(signal.SIGSTOP)

    def wake(self) -> None:
        """Go on."""
        for engine in (self.prefill, self.decode):
            engine.signal(signal.SIGCONT)
        time.sleep(SETTLE_S)

    def learn(self, prompt: Sequence[int]) -> None:
        """Where the prefill engine is, by a request of its own."""
        answer = self.prefill.wait(self.prefill.submit(prompt, 1, dict(PREFILL_PARAMS), "learn"))
        assert answer.kv_transfer_params is not None, answer
        self._where = answer.kv_transfer_params

    def _ended(self, began_s: float, output: Output) -> Passage:
        assert output.first_token_s is not None, output
        time.sleep(SETTLE_S)
        events = self._paces.since(began_s)
        allocated, computed, loaded = (
            max((one["at_s"] for one in events if one["event"] == event), default=0.0)
            for event in ("allocated", "computed", "loaded")
        )
        first_token_s = output.first_token_s - began_s
        return Passage(first_token_s, computed, loaded - computed, loaded - allocated, output, events)


def prompt(seed: int) -> list[int]:
    """As long as all of them, and like no other."""
    rng = random.Random(seed)
    return [rng.randrange(5, 500) for _ in range(NUM_TOKENS)]


def _spec(connector: str, role: str, tokens_per_step: int, paces: Paces) -> EngineSpec:
    arguments = (
        ("max_model_len", NUM_TOKENS + 32),
        ("max_num_batched_tokens", tokens_per_step),
        ("max_num_seqs", 4),
        ("kv_cache_memory_bytes", 4 * CACHE_BYTES),
    )
    return EngineSpec(
        "llama-deep", connector=connector, role=role, block_size=32, arguments=arguments, environment=paces.environment
    )
