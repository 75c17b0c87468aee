"""What did one pair of engines do with one row of the table?

1. Ordinary engines at TP 1 and at either side's TP give the expected texts, and the noise between them.
2. All prompts go through the pair at once, then once more (hits in the prefix caches), then each with words added
   (partial hits).
3. The tokens that the decode side loaded are compared, byte for byte in logical coordinates, with the prefill side's pages;
   tokens that it had cached may be its own, and are compared within `CLOSE`.
4. Some prompts go through alone, and the loaded pages are compared with those of an ordinary engine: equal, or within
   `CLOSE` of it, since sums run in another order at another TP size.

The outcome is `exact`, `wrong` (how), `refused` (no request was served, and what the logs say) or `failed` (some were).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.e2e import engine_log
from tests.e2e.cases import EXACT, REFUSED, WRONG, Case
from tests.e2e.compare import Difference, compare
from tests.e2e.engine import Engine, EngineFailed, Output
from tests.e2e.engines import Nursery
from tests.e2e.logical import Incomplete, Logical, first_difference, logical_cache
from tests.e2e.prompts import ladder, prompt
from tests.e2e.router import Routed, find_listeners, route, route_early
from tests.e2e.snapshots import Snapshot, read_compatibility, read_snapshots
from tests.e2e.zoo import MODELS

from kvreshard.model.changed import replace

FAILED = "failed"
MAX_TOKENS = 8
# The noise of float32 on one machine; the measured floor is 0 when both sides have the same shape.
LEAST_FLOOR = 5e-6
CLOSE = {"float32": 1e-4, "bfloat16": 5e-2}
ALONE = (1, 17, 300)
# Early: its prefill takes long enough for the decode engine to read something meanwhile.
LONG = 900
ADDED = 40


@dataclass(slots=True)
class Measured:
    """One row with one connector."""

    case: str
    connector: str
    outcome: str = EXACT
    details: list[str] = field(default_factory=list)
    floor: float = 0.0
    logprob_gap: float = 0.0
    compared_bytes: int = 0
    ordinary_bytes: str = "equal"
    start_seconds: dict[str, float] = field(default_factory=dict)
    run_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def found(self, outcome: str, detail: str) -> None:
        """Keep the worst: something wrong outweighs what failed or was refused."""
        ranking = [EXACT, REFUSED, FAILED, WRONG]
        self.outcome = max(self.outcome, outcome, key=ranking.index)
        if _kind(detail) not in map(_kind, self.details):  # the first of each kind says enough
            self.details.append(detail)


def _kind(detail: str) -> str:
    return re.sub(r"[\d.]+", "", detail)[:24]


class Bench:
    """A row's two engines and the ordinary ones."""

    def __init__(self, nursery: Nursery, case: Case, connector: str, *, is_early: bool = False) -> None:
        self._is_early, self._num_routed = is_early, 0
        self.case, self.result = case, Measured(case.name, connector)
        self.dtype = MODELS[case.model].dtype
        self.judged_by_text = self.dtype == "float32"
        arguments = case.prefill.arguments if is_early else ()  # the same chunks
        self.ordinary = {
            tp: nursery.engine(replace(case.ordinary(tp), arguments=arguments))
            for tp in sorted({1, case.prefill.tp, case.decode.tp})
        }
        self.prefill = nursery.engine(case.engine(case.prefill, connector))
        self.decode = nursery.engine(case.engine(case.decode, connector, "kv_consumer"))
        for side, engine in (("prefill", self.prefill), ("decode", self.decode)):
            self.result.start_seconds[side] = round(engine.start_seconds, 1)
        self.logs = [(engine, engine_log.size(engine.log)) for engine in (self.prefill, self.decode)]

    def run(self) -> None:
        """All rounds, until one fails outright."""
        started = time.monotonic()
        pages = [engine.about["block_size"] for engine in (self.prefill, self.decode)]
        window = MODELS[self.case.model].config.get("sliding_window")
        prompts = ladder(max(pages), seed=self.case.seed, window=window)
        longer = [words + prompt(ADDED, self.case.seed + 1) for words in prompts]
        rounds = [prompts, prompts, longer] if MODELS[self.case.model].prefix_caching else [prompts, prompts]
        for texts in rounds:
            if not self._round(texts):
                break
        else:
            for length in (*ALONE, LONG) if self._is_early else ALONE:
                self._alone(prompt(length, self.case.seed + 2))
        if self.result.outcome in (REFUSED, FAILED):
            for engine, start in self.logs:
                for line in engine_log.errors(engine.log, start)[:4]:
                    self.result.details.append(f"{engine.spec}: {line}")
        self.result.run_seconds = round(time.monotonic() - started, 1)

    def _round(self, texts: Sequence[Sequence[int]]) -> bool:
        """All texts at once; whether every one was answered."""
        expected = self.ordinary[1].generate(texts, MAX_TOKENS)
        for tp, engine in self.ordinary.items():
            floor = compare(expected, engine.generate(texts, MAX_TOKENS)) if tp > 1 else None
            self.result.floor = max(self.result.floor, floor.logprob_gap if floor else 0.0)
        routed = self._route(texts)
        answered = self._judge(expected, [answer.decode for answer in routed])
        for answer in routed:
            if answer.decode.tokens:
                self._compare_with_prefill(answer)
        return answered

    def _route(self, texts: Sequence[Sequence[int]]) -> list[Routed]:
        """One after the other, or early: then either side hears of the texts first, in turns."""
        if not self._is_early:
            return route(self.prefill, self.decode, texts, MAX_TOKENS)
        listeners = find_listeners(self.prefill, prompt(5, 0))
        self._num_routed += 1
        is_decode_first = self._num_routed % 2 == 0
        return route_early(self.prefill, self.decode, listeners, texts, MAX_TOKENS, is_decode_first=is_decode_first)

    def _judge(self, expected: Sequence[Output], got: Sequence[Output]) -> bool:
        found: Difference = compare(expected, got)
        served = found.num_prompts - len(found.empty) - len(found.failed)
        if not found.answered:
            words = [*dict.fromkeys(found.failed)][:2] + (
                [f"{len(found.empty)} without a token"] if found.empty else []
            )
            self.result.found(
                FAILED if served else REFUSED, f"{served} of {found.num_prompts} served: {'; '.join(words)}"
            )
        self.result.logprob_gap = max(self.result.logprob_gap, found.logprob_gap)
        limit = 3 * max(self.result.floor, LEAST_FLOOR)
        if self.judged_by_text and (found.wrong_tokens or found.logprob_gap > limit):
            off = f"log-probabilities off by {found.logprob_gap:.1e}"
            self.result.found(WRONG, f"{len(found.wrong_tokens)} of {served} texts differ, {off}")
        return found.answered

    def _compare_with_prefill(self, answer: Routed) -> tuple[dict[str, Logical], int, int] | None:
        """Compare what was loaded; what it is, for how many tokens of how many that were prefilled. None when nothing was loaded."""
        loaded = read_snapshots(self.decode.snapshots, "loaded", answer.decode_id)
        kept = _await_snapshots(self.prefill, answer.prefill_id)
        try:
            if not loaded or not kept:
                return None
            tokens = min(loaded[0].held.num_tokens, kept[0].held.num_tokens)
            cached = loaded[0].held.num_tokens - loaded[0].held.loaded_tokens
            for first, tolerance in ((cached, 0.0), (0, CLOSE[self.dtype])):
                got = logical_cache(read_compatibility(self.decode.snapshots), loaded, tokens, first)
                expected = logical_cache(read_compatibility(self.prefill.snapshots), kept, tokens, first)
                difference = first_difference(expected, got, tolerance)
                if difference is not None:
                    self.result.found(WRONG, f"loaded pages are not the prefill engine's: {difference}")
                self.result.compared_bytes += 0 if tolerance else sum(cache.cells.size for cache in got.values())
            return got, tokens, kept[0].held.num_tokens
        except Incomplete as error:
            self.result.found(WRONG, f"loaded pages: {error}")
            return None
        finally:
            _forget(self.decode, answer.decode_id)
            _forget(self.prefill, answer.prefill_id)

    def _alone(self, text: list[int]) -> None:
        """One text with nothing beside it, against the pages of an ordinary engine of the prefill side's TP."""
        loaded = self._compare_with_prefill(self._route([text])[0])
        if loaded is None:
            return
        got, tokens, prefilled = loaded
        engine = self.ordinary[self.case.prefill.tp]
        name = engine.new_id()
        # A draft's cache of a token depends on the next one too: the same text, and not only what was loaded of it.
        engine.generate([text[:prefilled]], 1, request_ids=[name])
        try:
            expected = logical_cache(read_compatibility(engine.snapshots), _await_snapshots(engine, name), tokens)
            if first_difference(expected, got) is not None:
                self.result.ordinary_bytes = "close"
                difference = first_difference(expected, got, CLOSE[self.dtype])
                if difference is not None:
                    self.result.ordinary_bytes = "different"
                    self.result.found(WRONG, f"loaded pages are not an ordinary engine's: {difference}")
        except Incomplete as error:
            self.result.found(WRONG, f"pages of an ordinary engine: {error}")
        finally:
            _forget(engine, name)


def measure(nursery: Nursery, case: Case, connector: str, *, is_early: bool = False) -> Measured:
    """Run one row with one connector. An engine that does not start is a refusal, with its message."""
    try:
        bench = Bench(nursery, case, connector, is_early=is_early)
    except EngineFailed as error:
        return Measured(case.name, connector, REFUSED, [str(error)])
    bench.run()
    return bench.result


def _await_snapshots(engine: Engine, request_id: str, seconds: float = 5.0) -> list[Snapshot]:
    """All ranks' snapshots of a finished request; they are written in the step after its answer."""
    ranks = engine.spec.tp * engine.spec.pp
    deadline = time.monotonic() + seconds
    while (
        len(found := read_snapshots(engine.snapshots, "finished", request_id)) < ranks and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return found


def _forget(engine: Engine, request_id: str) -> None:
    for path in engine.snapshots.glob(f"*-{request_id}-*rank*.npz"):
        path.unlink()
