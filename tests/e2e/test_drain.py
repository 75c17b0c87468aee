"""A prefill server that is asked to end waits for the decode engines that will still read from it, with vLLM's `--shutdown-timeout`."""

from __future__ import annotations

import time

import pytest
from tests.e2e.cases import OURS
from tests.e2e.engine import RELEASE, EngineSpec
from tests.e2e.engines import Nursery
from tests.e2e.http_engine import HttpEngine
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import prompt
from tests.e2e.router import PREFILL_PARAMS

LEASE_S = 120
NUM_PROMPTS = 3


@pytest.mark.e2e_ci
@pytest.mark.timeout(900)
def test_a_server_ends_when_its_last_prefill_has_been_read(nursery: Nursery) -> None:
    """Long before the leases would run out, and not before: its listener and its caches stay until then."""
    nursery.stop_all()
    nursery.ask((RELEASE, False), "make_model", "llama")
    words = [prompt(150 + number, 91) for number in range(NUM_PROMPTS)]
    decode = nursery.engine(EngineSpec("llama", tp=2, connector=OURS, role="kv_consumer"))
    expected = [output.tokens for output in nursery.engine(EngineSpec("llama", tp=2)).generate(words)]
    spec = EngineSpec(
        "llama",
        connector=OURS,
        role="kv_producer",
        extra=(("kv_lease_duration", LEASE_S),),
        arguments=(("shutdown_timeout", LEASE_S),),
    )
    with HttpEngine(spec, nursery.folder / "drain") as prefill:
        prefilled = prefill.generate(words, 1, [dict(PREFILL_PARAMS) for _ in words])
        assert all(output.kv_transfer_params for output in prefilled), prefilled
        asked_s = time.monotonic()
        prefill.process.terminate()
        for number, output in enumerate(prefilled):
            time.sleep(2.0)
            assert prefill.process.poll() is None, "it has ended before its prefills were read"
            (answer,) = decode.generate([words[number]], kv_transfer_params=[output.kv_transfer_params])
            assert answer.tokens == expected[number], answer
        assert prefill.process.wait(timeout=60) == 0
        assert time.monotonic() - asked_s < LEASE_S
    assert await_total(decode, "kvreshard_load_seconds_count", 2 * NUM_PROMPTS) == 2 * NUM_PROMPTS
    assert total(decode, "kvreshard_fallbacks_total") == total(decode, "kvreshard_failures_total") == 0
