"""What becomes of requests whose life is not as the table's: wrong references, lost peers, aborts, retries, preemption?

One promise throughout: a request ends, with the text of an ordinary engine or with an error, both engines go on, and no page
is lost. Engines: Llama, prefill TP 1, decode TP 2.
"""

from __future__ import annotations

import random
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.e2e import engine_log
from tests.e2e.cases import OURS
from tests.e2e.engine import Engine, EngineSpec, Output
from tests.e2e.engines import Nursery
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import prompt
from tests.e2e.router import PREFILL_PARAMS, route
from tests.ports import free_ports

from kvreshard.model.changed import replace
from kvreshard.vllm.page_list import write_pages

LEASE_S = 4
OPTIONS = (("kv_lease_duration", LEASE_S), ("handshake_timeout_s", 3), ("load_timeout_s", 20), ("retry_s", 0))
PREFILL = EngineSpec("llama", connector=OURS, role="kv_producer", prefix_caching=True, extra=OPTIONS)
DECODE = EngineSpec("llama", tp=2, connector=OURS, role="kv_consumer", prefix_caching=True, extra=OPTIONS)
RECOMPUTES = replace(DECODE, recompute=True)
PATIENCE_S = 60.0
Change = Callable[[dict[str, Any]], Any]
pytestmark = [pytest.mark.timeout(600), pytest.mark.e2e_ci]


@pytest.fixture
def pair(nursery: Nursery) -> tuple[Engine, Engine]:
    if {spec.model for spec in nursery.engines} - {"llama", "qwen3"}:
        nursery.stop_all()
    return nursery.engine(PREFILL), nursery.engine(DECODE)


def texts(nursery: Nursery, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[list[int]]:
    """What an ordinary engine answers."""
    return [output.tokens for output in nursery.engine(EngineSpec("llama", tp=2)).generate(prompts, max_tokens)]


def prefilled(engine: Engine, words: Sequence[int]) -> dict[str, Any]:
    (output,) = engine.generate([words], 1, [dict(PREFILL_PARAMS)])
    assert output.kv_transfer_params is not None, output
    return output.kv_transfer_params


def failed(output: Output) -> bool:
    return bool(output.error) or (output.finish_reason == "error" and not output.tokens)


def check_honest(nursery: Nursery, prefill: Engine, decode: Engine, seed: int) -> None:
    """The pair still serves, by loading."""
    words = [prompt(200, seed)]
    (answer,) = route(prefill, decode, words)
    assert answer.decode.tokens == texts(nursery, words)[0], answer.decode


def num_quarantined(engine: Engine) -> float:
    """Blocks that are out of the pool."""
    kept, freed = (total(engine, f'kvreshard_quarantined_blocks_total{{event="{event}"') for event in ("kept", "freed"))
    return kept - freed


def check_all_free(engine: Engine) -> None:
    """vLLM resets its prefix cache only when no request holds a block, and no block is kept for a read that has not come to rest."""
    deadline = time.monotonic() + PATIENCE_S
    while not engine.reset_prefix_cache() or num_quarantined(engine):
        assert time.monotonic() < deadline, f"{engine.spec} still holds pages:\n{engine.last_words()}"
        engine.generate([[5, 6, 7]], 1)  # an engine that does nothing does not look at what its ranks have finished


def dropped(*names: str) -> Change:
    return lambda params: [params.pop(name) for name in names]


def put(value: Any, *path: str) -> Change:
    def change(params: Any) -> None:
        for key in path[:-1]:
            params = params[key]
        params[path[-1]] = value

    return change


COMPUTED, FAILS = "computed", "fails"
PAGES = "kvreshard", "pages", "g0"
NOT_SEALED = "were not sealed by that engine"


@pytest.mark.parametrize(
    ("change", "expected", "told"),
    [
        pytest.param(dropped("kvreshard"), COMPUTED, "no field 'kvreshard'", id="no field of ours"),
        pytest.param(lambda p: p["kvreshard"].pop("pages"), COMPUTED, "`pages`", id="no block lists"),
        pytest.param(put("x", "remote_port"), COMPUTED, "remote_port", id="a port that is a word"),
        pytest.param(put("x", "kvreshard", "seal"), COMPUTED, "kvreshard.seal", id="a seal that is none"),
        pytest.param(put("00" * 16, "kvreshard", "seal"), FAILS, NOT_SEALED, id="another seal"),
        pytest.param(put("", *PAGES), FAILS, NOT_SEALED, id="block ids dropped"),
        pytest.param(put(write_pages((1, 2, 3)), *PAGES), FAILS, NOT_SEALED, id="another request's blocks"),
        pytest.param(put(write_pages((10**6, 1)), *PAGES), FAILS, NOT_SEALED, id="a block that does not exist"),
        pytest.param(put("BQAAAAE=", *PAGES), COMPUTED, "pages of group 'g0'", id="a block list that is none"),
        pytest.param(put(write_pages((1,)), *PAGES), FAILS, NOT_SEALED, id="too few blocks"),
        pytest.param(put(10**6, "kvreshard", "slot"), FAILS, NOT_SEALED, id="a slot that does not exist"),
        pytest.param(put("0" * 15 + "7", "kvreshard", "word"), FAILS, NOT_SEALED, id="another word"),
        pytest.param(put("ab" * 16, "kvreshard", "instance_id"), FAILS, "restarted", id="a former life"),
        pytest.param(put("other", "remote_engine_id"), FAILS, "'other'", id="another engine's id"),
    ],
)
def test_wrong_references(
    change: Change, expected: str, told: str, pair: tuple[Engine, Engine], nursery: Nursery
) -> None:
    prefill, decode = pair
    words = prompt(150, 1)
    params = prefilled(prefill, words)
    change(params)
    start = engine_log.size(decode.log)
    (output,) = decode.generate([words], 8, [params])
    if expected == COMPUTED:
        assert output.tokens == texts(nursery, [words])[0]
    else:
        assert failed(output), output
    assert told in decode.log.read_bytes()[start:].decode(errors="replace")
    check_honest(nursery, prefill, decode, 2)
    check_all_free(decode)
    check_all_free(prefill)


def test_a_failed_load_is_computed_if_that_is_asked_for(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    decode, words = nursery.engine(RECOMPUTES), prompt(150, 3)
    params = prefilled(pair[0], words)
    put(10**6, "kvreshard", "slot")(params)
    (output,) = decode.generate([words], 8, [params])
    assert output.tokens == texts(nursery, [words])[0]
    check_all_free(decode)


class Rude(socketserver.BaseRequestHandler):
    """A server of another protocol."""

    def handle(self) -> None:
        self.request.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@contextmanager
def another_server() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", free_ports(1)), Rude) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_nobody_is_there_and_somebody_else_is_there(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """A life that has been met is known by whatever address it is called."""
    prefill = pair[0]
    nursery.stop(DECODE)
    decode, words = nursery.engine(DECODE), prompt(150, 4)
    with another_server() as port:
        for other in (free_ports(1), port):
            params = prefilled(prefill, words) | {"remote_port": other}
            (output,) = decode.generate([words], 8, [params])
            assert failed(output), output
            assert f"127.0.0.1:{other}" in decode.log.read_text()
    check_honest(nursery, prefill, decode, 5)
    (output,) = decode.generate([words], 8, [prefilled(prefill, words) | {"remote_port": free_ports(1)}])
    assert [output.tokens] == texts(nursery, [words])
    check_all_free(decode)
    check_all_free(prefill)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "qwen3"}, "model is"),
        ({"arguments": (("dtype", "bfloat16"),)}, "dtype is 'torch.bfloat16' there and 'torch.float32' here"),
        ({"arguments": (("revision", "other"),)}, "revision is 'other' there and 'None' here"),
    ],
)
def test_another_model_is_refused_in_both_logs(
    change: dict[str, Any], told: str, pair: tuple[Engine, Engine], nursery: Nursery
) -> None:
    prefill, decode = pair
    other, words = nursery.engine(replace(PREFILL, **change)), prompt(150, 6)
    (output,) = decode.generate([words], 8, [prefilled(other, words)])
    assert failed(output), output
    for engine, sentence in ((decode, "cannot read from engine"), (other, "cannot read from here")):
        log = engine.log.read_text()
        assert sentence in log
        assert told in log
    check_honest(nursery, prefill, decode, 7)
    nursery.stop(other.spec)


def test_the_prefill_engine_restarts_in_between(nursery: Nursery) -> None:
    decode, words = nursery.engine(DECODE), prompt(150, 8)
    spec = replace(PREFILL, environment=(("VLLM_NIXL_SIDE_CHANNEL_PORT", free_ports(1)),))
    prefill = nursery.engine(spec)
    check_honest(nursery, prefill, decode, 9)
    params = prefilled(prefill, words)
    nursery.stop(spec)
    restarted = nursery.engine(spec)
    (output,) = decode.generate([words], 8, [params])
    assert failed(output), output
    check_honest(nursery, restarted, decode, 10)
    check_all_free(decode)
    nursery.stop(spec)


def test_requests_are_aborted_at_any_time(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    prefill, decode = pair
    drawn = random.Random(12)
    prompts = [prompt(drawn.randrange(1, 700), 100 + i) for i in range(40)]
    expected = texts(nursery, prompts, 24)
    outcomes = {"whole": 0, "aborted": 0}

    def one(i: int) -> None:
        name, other = prefill.new_id(), decode.new_id()
        first = prefill.submit(prompts[i], 1, dict(PREFILL_PARAMS), name)
        if i % 4 == 0:
            prefill.abort_after(drawn.random() * 0.2, name)
        params = prefill.wait(first).kv_transfer_params
        if i % 4 == 1:  # the router dies: nobody comes for it
            return
        second = decode.submit(prompts[i], 24, params, other)
        if i % 4 == 2:
            decode.abort_after(drawn.random() * 0.3, other)
        output = decode.wait(second)
        assert not output.error, output
        whole = output.tokens == expected[i]
        assert whole or (i % 4 == 2 and output.tokens == expected[i][: len(output.tokens)]), (i, output)
        outcomes["whole" if whole else "aborted"] += 1

    for first in range(0, len(prompts), 8):
        threads = [threading.Thread(target=one, args=(i,)) for i in range(first, first + 8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
    assert sum(outcomes.values()) == 30
    check_honest(nursery, prefill, decode, 13)
    check_all_free(decode)
    check_all_free(prefill)


def test_a_retry_on_another_decode_engine(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """Both take the same parameters; whoever comes after the pages are free says so."""
    prefill, decode = pair
    other, words = nursery.engine(replace(DECODE, tp=1)), prompt(300, 14)
    (expected,) = texts(nursery, [words])
    params = prefilled(prefill, words)
    pending = [engine.submit(words, 8, dict(params), engine.new_id()) for engine in (decode, other)]
    outputs = [engine.wait(future) for engine, future in zip((decode, other), pending, strict=True)]
    assert any(output.tokens == expected for output in outputs)
    assert all(output.tokens == expected or failed(output) for output in outputs)
    (late,) = other.generate([[*words, 9]], 8, [dict(params)])
    assert failed(late) or late.tokens == texts(nursery, [[*words, 9]])[0]
    check_honest(nursery, prefill, other, 15)
    check_all_free(prefill)


@pytest.mark.parametrize("case", ["longer", "shorter", "another", "one token"])
def test_the_decode_prompt_differs(case: str, pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    prefill, decode = pair
    words = prompt(300, 16)
    mine = {"longer": words + prompt(77, 17), "shorter": words[:201], "another": prompt(300, 18), "one token": [9]}[
        case
    ]
    (output,) = decode.generate([mine], 8, [prefilled(prefill, words)])
    assert output.tokens == texts(nursery, [mine])[0]
    check_all_free(prefill)


def test_the_decode_engine_preempts(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """Its pool holds some of the requests that run at once; the others are thrown out, and computed here later."""
    decode = nursery.engine(replace(DECODE, block_size=32, arguments=(("num_gpu_blocks_override", 33),)))
    prompts = [prompt(200 + i, 20 + i) for i in range(8)]
    expected = texts(nursery, prompts, 64)
    for answer, tokens in zip(route(pair[0], decode, prompts, 64), expected, strict=True):
        assert answer.decode.tokens == tokens, answer.decode
    check_all_free(decode)
    check_all_free(pair[0])


BOTH = replace(PREFILL, role="kv_both")


def test_one_engine_is_picked_for_prefill_and_decode(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """By a router that takes any; it goes on with what it has."""
    both, prompts = nursery.engine(BOTH), [prompt(length, 30 + length) for length in (1, 64, 300)]
    expected = texts(nursery, prompts)
    for answer, tokens in zip(route(both, both, prompts), expected, strict=True):
        assert answer.decode.tokens == tokens, answer.decode
    check_all_free(both)
    check_honest(nursery, both, pair[1], 40)


def test_engines_that_wait_for_one_another_in_a_circle_go_on(nursery: Nursery) -> None:
    """Each keeps seven of eleven blocks for the other, which needs seven to read them."""
    small = replace(BOTH, block_size=32, arguments=(("num_gpu_blocks_override", 12), ("max_model_len", 256)))
    nursery.stop_all()
    first, second = nursery.engine(small), nursery.engine(replace(small, tp=2))
    words = {engine: prompt(200, seed) for engine, seed in ((first, 41), (second, 42))}
    params = {engine: prefilled(engine, words[engine]) for engine in (first, second)}
    pending = [
        (reader, source, reader.submit(words[source], 8, params[source], reader.new_id()))
        for reader, source in ((first, second), (second, first))
    ]
    answers = {source: reader.wait(future, PATIENCE_S) for reader, source, future in pending}
    expected = texts(nursery, [words[first], words[second]])
    assert [answers[first].tokens, answers[second].tokens] == expected
    check_all_free(first)
    check_all_free(second)


def test_several_answers_to_one_prompt(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """vLLM makes a request of each of the `n` choices, all with the same parameters. One comes when the pages have been given back."""
    prefill, decode = pair
    for words in (prompt(300, 43), prompt(40, 44)):
        (expected,) = texts(nursery, [words])
        params = prefilled(prefill, words)
        pending = [decode.submit(words, 8, dict(params), decode.new_id()) for _ in range(5)]
        answers = [decode.wait(future) for future in pending]
        answers += decode.generate([words], 8, [dict(params)])
        assert [answer.tokens for answer in answers] == [expected] * 6, [answer.error for answer in answers]
    check_all_free(prefill)
    check_all_free(decode)


# What nobody reads is held so long, and an engine that is stopped waits for it.
READS_BACK = (("bidirectional_kv_xfer", True), ("kv_recompute_threshold", 1), ("decoder_kv_blocks_ttl", 20))


def test_the_next_turn_reads_back_what_the_decode_engine_has(nursery: Nursery) -> None:
    """TP 1 and 2, other pages. The prefill engine has nothing of the conversation itself, or all whole pages of its prompt."""
    nursery.stop_all()
    decode = nursery.engine(replace(DECODE, block_size=64, extra=(*OPTIONS, *READS_BACK)))
    words = prompt(200, 50)
    for caches in (False, True):
        prefill = nursery.engine(replace(PREFILL, prefix_caching=caches, extra=(*OPTIONS, *READS_BACK)))
        (first,) = route(prefill, decode, [words], 24)
        back = first.decode.kv_transfer_params
        assert back is not None
        assert (back["do_remote_decode"], back["remote_num_tokens"]) == (True, 200 + 24 - 1)
        following = [*words, *first.decode.tokens, *prompt(30, 51)]
        loaded = total(prefill, "kvreshard_load_bytes_sum")
        (again,) = prefill.generate([following], 1, [{**back, "do_remote_decode": True, "do_remote_prefill": False}])
        assert await_total(prefill, "kvreshard_load_bytes_sum", loaded + 1) > loaded
        assert again.kv_transfer_params is not None
        (answer,) = decode.generate([following], 8, [again.kv_transfer_params])
        assert [first.decode.tokens] == texts(nursery, [words], 24)
        assert [answer.tokens] == texts(nursery, [following])
        nursery.stop(prefill.spec)
