"""How does one request go through two engines?

What every disaggregating proxy of vLLM does, and nothing else:

1. the prompt goes to the prefill engine with `do_remote_decode` and `max_tokens=1`;
2. the `kv_transfer_params` of its answer go, as they are, with the same prompt to the decode engine.

Or both get it at once, with one `transfer_id` (`route_early`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from tests.e2e.engine import Engine, Output

# The fields that vLLM's own proxies send; engines fill them in.
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Answers(Protocol):
    """What the router needs of an engine, forked or a server."""

    def new_id(self) -> str: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = ...,
        kv_transfer_params: Sequence[dict[str, Any] | None] | None = ...,
        request_ids: Sequence[str] | None = ...,
    ) -> list[Output]: ...


@dataclass(frozen=True, slots=True)
class Routed:
    """Both answers for one prompt, and the ids that the two engines knew it by."""

    prefill_id: str
    decode_id: str
    prefill: Output
    decode: Output


def route(prefill: Answers, decode: Answers, prompts: Sequence[Sequence[int]], max_tokens: int = 8) -> list[Routed]:
    """All prompts at once through the pair, in order. A prompt that the prefill engine fails is not sent on."""
    prefill_ids = [prefill.new_id() for _ in prompts]
    prefilled = prefill.generate(prompts, 1, [dict(PREFILL_PARAMS) for _ in prompts], prefill_ids)
    decode_ids = [decode.new_id() for _ in prompts]
    failed = Output(error="not sent: the prefill engine failed it")
    sent = [i for i, output in enumerate(prefilled) if output.error is None]
    answers = decode.generate(
        [prompts[i] for i in sent],
        max_tokens,
        [prefilled[i].kv_transfer_params for i in sent],
        [decode_ids[i] for i in sent],
    )
    decoded = dict(zip(sent, answers, strict=True))
    return [Routed(prefill_ids[i], decode_ids[i], prefilled[i], decoded.get(i, failed)) for i in range(len(prompts))]


Listeners = dict[int | None, dict[str, Any]]
"""Where a prefill engine listens, by data-parallel rank; None: it has one rank, which a request need not name."""


def find_listeners(prefill: Engine, prompt: Sequence[int]) -> Listeners:
    """Known from the answers to a prompt."""
    found: Listeners = {}
    for rank in range(prefill.spec.dp) if prefill.spec.dp > 1 else (None,):
        answer = prefill.wait(prefill.submit(prompt, 1, dict(PREFILL_PARAMS), prefill.new_id(), rank))
        assert answer.kv_transfer_params is not None, answer
        found[rank] = {name: answer.kv_transfer_params[name] for name in ("remote_host", "remote_port")}
    return found


def route_early(
    prefill: Engine,
    decode: Engine,
    listeners: Listeners,
    prompts: Sequence[Sequence[int]],
    max_tokens: int = 8,
    *,
    is_decode_first: bool = False,
) -> list[Routed]:
    """All prompts at once to both engines, under one transfer id each. The prefill engine's data-parallel ranks take turns."""
    names = [f"early-{prefill.new_id()}" for _ in prompts]
    ids = [(prefill.new_id(), decode.new_id()) for _ in prompts]
    ranks = list(itertools.islice(itertools.cycle(listeners), len(prompts)))

    def to_prefill() -> list[Future[Any]]:
        return [
            prefill.submit(prompt, 1, {**PREFILL_PARAMS, "transfer_id": name}, mine, rank)
            for prompt, name, rank, (mine, _) in zip(prompts, names, ranks, ids, strict=True)
        ]

    def to_decode() -> list[Future[Any]]:
        wanted = {"do_remote_prefill": True, "do_remote_decode": False}
        return [
            decode.submit(prompt, max_tokens, {**wanted, **listeners[rank], "transfer_id": name}, mine)
            for prompt, name, rank, (_, mine) in zip(prompts, names, ranks, ids, strict=True)
        ]

    if is_decode_first:
        decoding = to_decode()
        prefilling = to_prefill()
    else:
        prefilling = to_prefill()
        decoding = to_decode()
    return [
        Routed(*mine, prefill.wait(first), decode.wait(second))
        for mine, first, second in zip(ids, prefilling, decoding, strict=True)
    ]
