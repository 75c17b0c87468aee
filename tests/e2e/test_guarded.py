"""Are real engines exact with everything on that guards them: keys, digests of every request, the flight recorder; who is let in?

Llama (and a hybrid), prefill TP 1, decode TP 2. A stranger's request fails or is computed by the stranger itself, as its policy
says; both engines live on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e import engine_log
from tests.e2e.compare import compare
from tests.e2e.engine import EngineSpec
from tests.e2e.engines import Nursery
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import ladder, prompt
from tests.e2e.router import route
from tests.e2e.test_life import DECODE, OPTIONS, PREFILL, check_all_free, check_honest, failed, prefilled, texts
from tests.e2e.verdicts import LEAST_FLOOR

from kvreshard.model.changed import replace
from kvreshard.session.keys import write_keys

pytestmark = pytest.mark.timeout(600)


class Guard:
    """Specs of engines that share a key, compare every request and leave records of failures in `records`."""

    def __init__(self, folder: Path) -> None:
        self.records = folder / "records"
        self.key = str(write_keys(folder, "fleet")[1])
        self.foreign_key = str(write_keys(folder, "foreign")[1])

    def of(self, spec: EngineSpec, key: str | None) -> EngineSpec:
        options = [*OPTIONS, ("digest_share", 1.0), ("flight_recorder_dir", str(self.records))]
        return replace(spec, extra=tuple(options + ([("curve_secret_key_file", key)] if key else [])))

    def num_records(self) -> int:
        return len(list(self.records.iterdir())) if self.records.exists() else 0


@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Guard:
    return Guard(tmp_path_factory.mktemp("guard"))


@pytest.fixture(scope="module", autouse=True)
def enough_memory(nursery: Nursery) -> Iterator[None]:
    """Engines of this module are of no use to another, nor those of others to it."""
    nursery.stop_all()
    yield
    nursery.stop_all()


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.e2e_ci), "nemotron-h"])
def test_a_guarded_pair_is_exact_and_compares_every_request(model: str, guard: Guard, nursery: Nursery) -> None:
    prefill, decode = (
        nursery.engine(replace(guard.of(spec, guard.key), model=model, prefix_caching=False))
        for spec in (PREFILL, DECODE)
    )
    prompts = ladder(128, seed=21)[1:]  # of one token nothing is loaded
    found = compare(
        nursery.engine(EngineSpec(model, tp=2)).generate(prompts),
        [answer.decode for answer in route(prefill, decode, prompts)],
    )
    assert found.answered, str(found)
    assert not found.wrong_tokens, str(found)
    assert found.logprob_gap <= 6 * LEAST_FLOOR, str(found)

    # All were loaded by both ranks; all of that was compared, and nothing else happened.
    least = 2 * len(prompts)
    num_loads = await_total(decode, "kvreshard_load_seconds_count", least)
    assert num_loads == least
    assert total(decode, 'kvreshard_digest_checks_total{result="equal"') == num_loads
    assert total(decode, "kvreshard_digest_checks_total") == num_loads
    for engine in (prefill, decode):
        assert total(engine, "kvreshard_failures_total") == total(engine, "kvreshard_fallbacks_total") == 0
    assert guard.num_records() == 0
    assert "to engines with a trusted key" in prefill.log.read_text(errors="replace")


@pytest.mark.parametrize("has_key", [False, True], ids=["without a key", "with another key"])
@pytest.mark.parametrize("recompute", [False, True], ids=["fails", "recomputes"])
def test_a_stranger_is_refused(recompute: bool, has_key: bool, guard: Guard, nursery: Nursery) -> None:
    prefill, decode = (nursery.engine(guard.of(spec, guard.key)) for spec in (PREFILL, DECODE))
    key = guard.foreign_key if has_key else None
    stranger = nursery.engine(guard.of(replace(DECODE, tp=1, recompute=recompute), key))
    check_honest(nursery, prefill, decode, 50)
    num_records, words = guard.num_records(), prompt(150, 51 + recompute + 2 * has_key)
    start = engine_log.size(stranger.log)
    (output,) = stranger.generate([words], 8, [prefilled(prefill, words)])
    if recompute:
        assert output.tokens == texts(nursery, [words])[0]
    else:
        assert failed(output), output
    told = stranger.log.read_bytes()[start:].decode(errors="replace")
    assert "handshake" in told
    assert ("none of the 1 keys that this one trusts" if has_key else "wants a key and this one has none") in told, told
    assert guard.num_records() == num_records + 1
    check_honest(nursery, prefill, decode, 60 + recompute + 2 * has_key)
    (alone,) = stranger.generate([words], 8)
    assert alone.tokens == texts(nursery, [words])[0]
    for engine in (prefill, decode, stranger):
        check_all_free(engine)
