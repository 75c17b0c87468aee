"""`kv_transfer_params` of 128k tokens are below 64 KiB, also with the ids that vLLM hands out after a while; larger than the largest is not published."""

from __future__ import annotations

import json
import logging
from itertools import pairwise

import pytest

pytest.importorskip("vllm")

from tests.vllm.params_sizes import MODELS, Churn, measure
from tests.vllm.schedulers import full, groups, producer, request

from kvreshard.session.commands import Publish, Revoke
from kvreshard.vllm import params

pytestmark = pytest.mark.vllm

LONG = 1 << 17
KIB = 1024


@pytest.mark.parametrize("model", MODELS)
def test_a_long_prompt_of_a_new_engine_has_small_parameters(model: str) -> None:
    size, as_numbers = measure(model, LONG, 0)
    assert size < 16 * KIB
    assert size < as_numbers / 4 or as_numbers < 4 * KIB


@pytest.mark.parametrize("model", ["six full", "two full, four windows"])
def test_a_long_prompt_has_small_parameters_after_ten_passes_through_the_pool(model: str) -> None:
    size, _ = measure(model, LONG, 10)
    assert size < 40 * KIB


def test_ids_at_random_take_two_bits_more_than_they_have() -> None:
    assert measure("two full, four windows", LONG, None)[0] < 64 * KIB
    size, as_numbers = measure("six full", LONG, None)
    assert 87 * KIB < size < 160 * KIB < as_numbers / 2


def test_churn_breaks_runs() -> None:
    """Otherwise the sizes above would say nothing."""
    churn = Churn(MODELS["one group"](), 20_000)
    runs = []
    for _ in range(3):
        (ids,) = churn.prefill(LONG)
        assert len(set(ids)) == len(ids) == LONG // 16
        runs.append(1 + sum(abs(b - a) != 1 for a, b in pairwise(ids)))
        churn.run(5)
    assert runs[0] < 5 < 100 < runs[1] < runs[2]


def test_what_would_be_too_large_is_not_published_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(params, "MAX_BYTES", 1500)
    side = producer(groups(full(16)))
    for number, (num_tokens, block_ids) in enumerate(
        [(4096, range(2, 514, 2)), (4096, range(2, 514, 2)), (64, range(1, 5))]
    ):
        made = request(f"p-{number}", list(range(num_tokens)))
        list(side.schedule(made))
        answer, command = side.finish(made, [list(block_ids)])
        if num_tokens == 64:
            assert isinstance(command, Publish)
            assert len(json.dumps(answer)) <= 1500
            assert len(side.leases)
        else:
            assert (answer, type(command)) == (None, Revoke)
            assert not len(side.leases)
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "request p-0 of 4096 tokens is not published" in told
    assert "of 256 pages would have 5" in told
    assert "bytes; at most 1500" in told
    assert "--block-size" in told
