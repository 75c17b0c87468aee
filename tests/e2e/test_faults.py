"""Does a pair of real engines survive the death, the sleep and the restart of either side?

Whatever happens, a text that is served is that of an ordinary engine, the survivor goes on serving, and its pages come back.
The decode engine recomputes what it could not load, so that every request has a text.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.engine import Engine
from tests.e2e.engines import Nursery
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import prompt
from tests.e2e.router import PREFILL_PARAMS
from tests.e2e.test_life import PREFILL, RECOMPUTES, check_all_free, check_honest, prefilled, texts
from tests.ports import free_ports

from kvreshard.model.changed import replace

pytestmark = [pytest.mark.timeout(900), pytest.mark.e2e_ci]


@pytest.fixture(autouse=True)
def only_llamas(nursery: Nursery) -> None:
    """Before any engine of a test is started."""
    if {spec.model for spec in nursery.engines} - {"llama"}:
        nursery.stop_all()


@pytest.fixture
def port() -> int:
    """Where the prefill engine listens, in all of its lives."""
    return free_ports(1)


@pytest.fixture
def decode(nursery: Nursery, only_llamas: None) -> Engine:
    return nursery.engine(RECOMPUTES)


@pytest.fixture
def prefill(nursery: Nursery, port: int, only_llamas: None) -> Iterator[Engine]:
    """An engine of this test's own."""
    spec = replace(PREFILL, environment=(("VLLM_NIXL_SIDE_CHANNEL_PORT", port),))
    yield nursery.engine(spec)
    nursery.stop(spec)


def test_the_prefill_engine_is_killed(prefill: Engine, decode: Engine, nursery: Nursery) -> None:
    prompts = [prompt(300 + i, 200 + i) for i in range(6)]
    expected = texts(nursery, prompts)
    check_honest(nursery, prefill, decode, 30)
    params = [prefilled(prefill, words) for words in prompts]
    pending = [
        decode.submit(words, 8, given, decode.new_id()) for words, given in zip(prompts[:3], params[:3], strict=True)
    ]
    nursery.kill(prefill.spec)
    outputs = [decode.wait(future) for future in pending] + decode.generate(prompts[3:], 8, params[3:])
    assert [output.tokens for output in outputs] == expected
    check_all_free(decode)
    check_honest(nursery, nursery.engine(prefill.spec), decode, 31)


def test_the_prefill_engine_sleeps(prefill: Engine, decode: Engine, nursery: Nursery) -> None:
    """Stopped before it is read, longer than its leases and than a load may take; then it wakes up."""
    check_honest(nursery, prefill, decode, 32)
    words = prompt(400, 33)
    params = prefilled(prefill, words)
    prefill.signal(signal.SIGSTOP)
    try:
        (output,) = decode.generate([words], 8, [params])
    finally:
        prefill.signal(signal.SIGCONT)
    assert output.tokens == texts(nursery, [words])[0]
    check_honest(nursery, prefill, decode, 34)
    check_all_free(decode)
    check_all_free(prefill)


@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_what_comes_to_a_paused_decode_engine_keeps_its_prefill(
    prefill: Engine, decode: Engine, nursery: Nursery, mode: str
) -> None:
    """For longer than a lease: that of a prefill which nobody wants runs out meanwhile."""
    check_honest(nursery, prefill, decode, 37)
    words, unwanted = prompt(400, 38), prompt(400, 39)
    (expected,) = texts(nursery, [words])
    ended, counted = 'kvreshard_leases_total{end="expired"', ("kvreshard_failures_total", "kvreshard_fallbacks_total")
    before = [total(decode, series) for series in counted]
    decode.pause(mode, clear_cache=True)
    try:
        pending = decode.submit(words, 8, prefilled(prefill, words), decode.new_id())
        num_ended = total(prefill, ended)
        prefilled(prefill, unwanted)
        await_total(prefill, ended, num_ended + 1)
    finally:
        decode.resume()
    assert decode.wait(pending).tokens == expected
    assert [total(decode, series) for series in counted] == before
    check_all_free(decode)
    check_all_free(prefill)


def test_the_decode_engine_is_killed(prefill: Engine, nursery: Nursery) -> None:
    prompts = [prompt(300 + i, 300 + i) for i in range(6)]
    victim = nursery.engine(replace(RECOMPUTES, tp=1))
    check_honest(nursery, prefill, victim, 35)
    params = [prefilled(prefill, words) for words in prompts]
    for words, given in zip(prompts[:3], params[:3], strict=True):
        victim.submit(words, 64, given, victim.new_id())
    nursery.kill(victim.spec)
    check_all_free(prefill)
    check_honest(nursery, prefill, nursery.engine(RECOMPUTES), 36)


def test_aborts_and_a_restarted_decode_engine(prefill: Engine, decode: Engine, nursery: Nursery) -> None:
    """Requests all along; some are aborted, and the decode engine is killed in the middle and comes back."""
    drawn = random.Random(5)
    prompts = [prompt(drawn.randrange(1, 600), 400 + i % 20) for i in range(48)]
    expected = texts(nursery, prompts, 16)
    served: dict[int, str] = {}
    current = {"decode": decode}

    def one(i: int) -> None:
        first = prefill.submit(prompts[i], 1, dict(PREFILL_PARAMS), prefill.new_id())
        params: dict[str, Any] | None = prefill.wait(first).kv_transfer_params
        engine = current["decode"]
        name = engine.new_id()
        future = engine.submit(prompts[i], 16, params, name)
        if i % 5 == 0:
            engine.abort_after(drawn.random() * 0.2, name)
        output = engine.wait(future)
        if output.error is not None:
            served[i] = "lost with its engine"
        elif output.tokens == expected[i]:
            served[i] = "whole"
        else:
            served[i] = "aborted" if output.tokens == expected[i][: len(output.tokens)] else f"wrong: {output}"

    for first in range(0, len(prompts), 8):
        threads = [threading.Thread(target=one, args=(i,)) for i in range(first, first + 8)]
        for thread in threads:
            thread.start()
        if first == 24:
            nursery.kill(decode.spec)
            current["decode"] = nursery.engine(decode.spec)
        for thread in threads:
            thread.join(120.0)
            assert not thread.is_alive()
    assert len(served) == len(prompts)
    counts = {outcome: list(served.values()).count(outcome) for outcome in set(served.values())}
    assert set(counts) <= {"whole", "aborted", "lost with its engine"}, counts
    assert counts["whole"] >= 30, counts
    check_all_free(current["decode"])
    check_all_free(prefill)
