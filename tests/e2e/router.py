"""How does one request go through two engines?

What every disaggregating proxy of vLLM does, and nothing else:

1. the prompt goes to the prefill engine with `do_remote_decode` and `max_tokens=1`;
2. the `kv_transfer_params` of its answer go, as they are, with the same prompt to the decode engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tests.e2e.engine import Output

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
