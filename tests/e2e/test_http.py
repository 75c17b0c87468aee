"""Is it exact with two servers as users start them: HTTP, processes spawned, nothing of vLLM replaced?"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.cases import IN_TREE, OURS
from tests.e2e.compare import compare
from tests.e2e.engine import RELEASE
from tests.e2e.engines import EngineSpec, Nursery
from tests.e2e.http_engine import HttpEngine
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import ladder
from tests.e2e.router import route
from tests.e2e.verdicts import LEAST_FLOOR


@pytest.fixture(params=[pytest.param(OURS, marks=pytest.mark.e2e_ci), IN_TREE])
def pair(request: pytest.FixtureRequest, nursery: Nursery) -> Iterator[tuple[HttpEngine, HttpEngine]]:
    nursery.ask((RELEASE, False), "make_model", "llama")
    nursery.stop_all()  # four more processes that import vLLM are enough
    specs = [
        EngineSpec("llama", tp=tp, connector=request.param, role=role, prefix_caching=True)
        for tp, role in ((1, "kv_producer"), (2, "kv_consumer"))
    ]
    # vLLM binds sockets below it, whose paths may have 107 characters at most; pytest's own folders are too long.
    folder = nursery.folder / request.param
    with HttpEngine(specs[0], folder / "p") as prefill, HttpEngine(specs[1], folder / "d") as decode:
        yield prefill, decode


@pytest.mark.timeout(900)
def test_two_servers(pair: tuple[HttpEngine, HttpEngine], nursery: Nursery) -> None:
    prefill, decode = pair
    prompts = ladder(128, seed=11)
    expected = nursery.engine(EngineSpec("llama")).generate(prompts)
    floor = compare(expected, nursery.engine(EngineSpec("llama", tp=2)).generate(prompts))
    for _ in range(2):  # the second time with prefix hits
        found = compare(expected, [answer.decode for answer in route(prefill, decode, prompts)])
        assert found.answered, str(found)
        assert not found.wrong_tokens, str(found)
        assert found.logprob_gap <= 3 * max(floor.logprob_gap, LEAST_FLOOR), str(found)
    assert "vllm:" in decode.get("/metrics")
    if prefill.spec.connector == OURS:
        check_metrics(prefill, decode, len(prompts))


def check_metrics(prefill: HttpEngine, decode: HttpEngine, num_prompts: int) -> None:
    """All prompts of the first round were loaded by both ranks, nothing failed, and every lease ended as it should."""
    assert await_total(decode, "kvreshard_load_seconds_count", 2 * num_prompts) >= 2 * num_prompts
    assert await_total(prefill, 'kvreshard_leases_total{end="reported"', 2 * num_prompts) == 2 * num_prompts
    for engine in (prefill, decode):
        for name in ("kvreshard_failures_total", "kvreshard_fallbacks_total", 'kvreshard_leases_total{end="expired"'):
            assert total(engine, name) == 0, name
    assert total(decode, "kvreshard_bytes_total") > 0
