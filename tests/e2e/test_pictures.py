"""Is the text that of the prefill's picture, whatever the decode engine has in its place, and is nobody else served its cache?

A tiny BLIP-2: prefill TP 1, decode TP 2. The decode engine gets the same tokens with the same picture, with none, with another on purpose,
or with embeddings as a placeholder.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.e2e.cases import OURS
from tests.e2e.compare import compare, logprob_gap
from tests.e2e.engine import Engine, EngineSpec, Output, Picture
from tests.e2e.engines import Nursery
from tests.e2e.metrics import await_total, total
from tests.e2e.prompts import prompt
from tests.e2e.router import PREFILL_PARAMS
from tests.e2e.tiny import PICTURE_TOKEN
from tests.e2e.zoo import MODELS

MODEL = "blip2"
OPTIONS = (("handshake_timeout_s", 3), ("retry_s", 0))
PREFILL = EngineSpec(MODEL, connector=OURS, role="kv_producer", prefix_caching=True, extra=OPTIONS)
# What fails is computed here, if it can be.
DECODE = EngineSpec(MODEL, tp=2, connector=OURS, role="kv_consumer", prefix_caching=True, recompute=True, extra=OPTIONS)
ORDINARY = EngineSpec(MODEL)
NOISE = 1e-4
LOADS, REFUSALS = "kvreshard_load_seconds_count", "kvreshard_refusals_total"
WORDS = 100
# vLLM puts the picture's tokens before the text, where it is given one.
SEEN = [PICTURE_TOKEN] * MODELS[MODEL].picture_tokens
pytestmark = [pytest.mark.timeout(600)]


@pytest.fixture
def pair(nursery: Nursery) -> tuple[Engine, Engine]:
    if {spec.model for spec in nursery.engines} - {MODEL}:
        nursery.stop_all()
    return nursery.engine(PREFILL), nursery.engine(DECODE)


def ask(
    engine: Engine,
    words: list[int],
    picture: Picture | None,
    params: dict[str, Any] | None = None,
    max_tokens: int = 8,
) -> Output:
    """One request. Without a picture its tokens stand in the prompt all the same."""
    tokens = words if picture is not None else [*SEEN, *words]
    return engine.wait(engine.submit(tokens, max_tokens, params, engine.new_id(), None, picture))


def check_text(nursery: Nursery, words: list[int], picture: Picture | None, answer: Output) -> None:
    """The answer is what an ordinary engine says to that picture."""
    expected = ask(nursery.engine(ORDINARY), words, picture)
    found = compare([expected], [answer])
    assert found.answered, str(found)
    assert not found.wrong_tokens, str(found)
    assert found.logprob_gap < NOISE, str(found)


CAT, DOG, PLACEHOLDER = Picture(1), Picture(2), Picture(3, is_embedded=True)


@pytest.mark.parametrize(
    ("number", "mine"),
    [
        pytest.param(0, CAT, id="same picture"),
        pytest.param(1, None, id="ids only", marks=pytest.mark.e2e_ci),
        pytest.param(2, DOG, id="another picture", marks=pytest.mark.e2e_ci),
        pytest.param(3, PLACEHOLDER, id="placeholder embeddings"),
    ],
)
def test_the_text_is_that_of_the_picture_that_was_prefilled(
    number: int, mine: Picture | None, pair: tuple[Engine, Engine], nursery: Nursery
) -> None:
    prefill, decode = pair
    words = prompt(WORDS, 100 + number)
    answers, num_loads = {}, total(decode, LOADS)
    for _ in range(2):  # the second time, prefix hits may serve it
        params = ask(prefill, words, CAT, dict(PREFILL_PARAMS), 1).kv_transfer_params
        answers[CAT] = ask(decode, words, mine, params)
        check_text(nursery, words, CAT, answers[CAT])
        num_loads += DECODE.tp
        assert await_total(decode, LOADS, num_loads) == num_loads
        for other in (None, DOG, CAT, PLACEHOLDER):  # the same tokens, by themselves
            answers[other] = ask(decode, words, other)
            check_text(nursery, words, other, answers[other])
    for other in (None, DOG, PLACEHOLDER):
        assert logprob_gap(answers[CAT], answers[other]) > 100 * NOISE, f"{other} makes no difference"


@pytest.mark.e2e_ci
def test_a_picture_that_is_not_here_is_not_computed(pair: tuple[Engine, Engine], nursery: Nursery) -> None:
    """A retry comes when the source has its blocks back; a router drops the field that it does not know."""
    prefill, decode = pair
    words, refused = prompt(WORDS, 200), total(decode, REFUSALS)
    params = ask(prefill, words, CAT, dict(PREFILL_PARAMS), 1).kv_transfer_params
    assert params is not None
    check_text(nursery, words, CAT, ask(decode, words, None, params))
    for known in (params, {name: value for name, value in params.items() if name != "kvreshard"}):
        answer = ask(decode, words, None, known)
        assert answer.finish_reason == "error" or answer.error, answer
        assert not answer.tokens
        check_text(nursery, words, CAT, ask(decode, words, CAT, known))  # the picture is here
    assert await_total(decode, REFUSALS, refused + 2) == refused + 2
    assert "is refused" in decode.log.read_text(errors="replace")
