"""An engine sleeps and wakes up: its caches are in other memory, and its peers meet it anew.

One promise: whoever has met it before reads nothing by the former registration. Engines of vLLM 0.33: Llama, prefill TP 1, decode TP 2.
"""

from __future__ import annotations

import pytest
from tests import releases
from tests.e2e.cases import OURS
from tests.e2e.engine import RELEASE, Engine, EngineSpec
from tests.e2e.engines import Nursery
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import prompt
from tests.e2e.router import PREFILL_PARAMS, route
from tests.releases import INSTALLED, NEWEST

OPTIONS = (("kv_lease_duration", 4), ("handshake_timeout_s", 3), ("load_timeout_s", 20), ("retry_s", 0))
PREFILL = EngineSpec("llama", connector=OURS, vllm=NEWEST, sleeps=True, prefix_caching=True, extra=OPTIONS)
DECODE = EngineSpec("llama", tp=2, connector=OURS, vllm=NEWEST, sleeps=True, recompute=True, extra=OPTIONS)
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.e2e_ci,
    pytest.mark.skipif(RELEASE != INSTALLED, reason="it names its release itself"),
]


@pytest.fixture
def pair(nursery: Nursery) -> tuple[Engine, Engine]:
    releases.fetch(NEWEST)
    if {(spec.model, spec.vllm) for spec in nursery.engines} - {("llama", NEWEST)}:
        nursery.stop_all()
    return nursery.engine(PREFILL), nursery.engine(DECODE)


def check_loads(nursery: Nursery, prefill: Engine, decode: Engine, seed: int) -> None:
    """The pair serves, by loading."""
    words = [prompt(length, seed) for length in (200, 63, 300)]
    expected = [output.tokens for output in nursery.engine(EngineSpec("llama", tp=2, vllm=NEWEST)).generate(words)]
    before = total(decode, "kvreshard_load_bytes_count")
    answers = route(prefill, decode, words)
    assert [answer.decode.tokens for answer in answers] == expected, [answer.decode.error for answer in answers]
    assert await_total(decode, "kvreshard_load_bytes_count", before + 2 * len(words)) == before + 2 * len(words)


def test_a_source_that_has_slept_is_met_anew(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """What it published before is read by nobody, neither while it sleeps nor when it is awake."""
    prefill, decode = pair
    check_loads(nursery, prefill, decode, 60)
    words = prompt(200, 61)
    (output,) = prefill.generate([words], 1, [dict(PREFILL_PARAMS)])
    expected = nursery.engine(EngineSpec("llama", tp=2, vllm=NEWEST)).generate([words])[0].tokens
    prefill.sleep()
    loaded = total(decode, "kvreshard_load_bytes_count")
    for wakes in (True, False):
        (answer,) = decode.generate([words], 8, [output.kv_transfer_params])
        assert answer.tokens == expected, answer
        if wakes:
            prefill.wake_up()
    assert await_total(decode, "kvreshard_load_bytes_count", loaded) == loaded
    check_loads(nursery, prefill, decode, 62)


def test_a_reader_that_has_slept_reads_again(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """Also if loads were under way, and requests came while it slept."""
    prefill, decode = pair
    check_loads(nursery, prefill, decode, 63)
    words = [prompt(400, 64 + number) for number in range(6)]
    prefilled = prefill.generate(words, 1, [dict(PREFILL_PARAMS) for _ in words])
    pending = [
        decode.submit(one, 8, output.kv_transfer_params, decode.new_id())
        for one, output in zip(words, prefilled, strict=True)
    ]
    decode.sleep()
    for future in pending:
        decode.wait(future)  # aborted, or answered before
    late = decode.submit(prompt(100, 75), 8, None, decode.new_id())
    decode.wake_up()
    assert not decode.wait(late).error
    check_loads(nursery, prefill, decode, 76)


def test_weights_are_loaded_and_caches_reset_while_the_caches_have_no_memory(
    pair: tuple[Engine, Engine], nursery: Nursery
) -> None:
    """As trainers do: the weights wake first, then the caches; more than once."""
    prefill, decode = pair
    for number in range(3):
        for engine in pair:
            engine.sleep(2, "keep" if number == 2 else "abort")
        for tags in (["weights"], ["kv_cache"]):
            for engine in pair:
                if tags == ["kv_cache"]:
                    assert engine.reset_prefix_cache()
                engine.wake_up(tags)
        check_loads(nursery, prefill, decode, 80 + number)


def test_roles_change_while_engines_run(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """Both engines are `kv_both`: each prefills for the other in turn, and at the same time."""
    first, second = pair
    words = [prompt(length, 90) for length in (200, 63, 300)]
    expected = [output.tokens for output in nursery.engine(EngineSpec("llama", tp=2, vllm=NEWEST)).generate(words)]
    for prefill, decode in (pair, (second, first), pair):
        before = total(decode, "kvreshard_load_bytes_count")
        first.reset_prefix_cache()
        answers = route(prefill, decode, words)
        assert [answer.decode.tokens for answer in answers] == expected
        assert await_total(decode, "kvreshard_load_bytes_count", before + 1) > before
