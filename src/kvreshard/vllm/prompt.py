"""How much of the decode engine's prompt is what the prefill engine computed?

A router may send another text to the decode engine: a placeholder, one token more or less, another image. The prefill side
sends digests of its prompt's prefixes, every `step` tokens and at the end; the decode side computes its own and takes the
longest prefix on which both agree. Only those tokens are loaded, so that no tail of another text is ever kept.

Digests have a key that the two engines share (`session.seal`), another one for each request: whoever reads them on their way can neither
guess a text piece by piece nor compare those of two requests.

A digest covers the token ids, what multimodal items stand where (vLLM's hash of each, and how many tokens it has: two engines may make
more or less of one image), and the adapter (LoRA).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

DIGEST_BYTES = 8
MIN_STEP_TOKENS = 16
MAX_MARKS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a request, and what they do not say: (first token, hash) of multimodal items, and the adapter (`adapters`)."""

    token_ids: Sequence[int]
    items: tuple[tuple[int, str], ...] = ()
    adapter: str = ""


class PromptDigest(msgspec.Struct, frozen=True):
    """Digests of prefixes: `marks[i]` of the first `(i + 1) * step` tokens, `whole` of all `num_tokens`; hexadecimal."""

    num_tokens: int
    step: int
    marks: tuple[str, ...]
    whole: str


def digest_prompt(prompt: Prompt, num_tokens: int, key: bytes) -> PromptDigest:
    """The digests of the first `num_tokens` tokens under a request's `key`."""
    step = -(-num_tokens // MAX_MARKS // MIN_STEP_TOKENS) * MIN_STEP_TOKENS or MIN_STEP_TOKENS
    ends = [*range(step, num_tokens + 1, step), num_tokens]
    *marks, whole = _digests(prompt, ends, key)
    return PromptDigest(num_tokens, step, tuple(marks), whole)


def count_matching(theirs: PromptDigest, prompt: Prompt, key: bytes) -> int:
    """How many leading tokens of `prompt` are surely the ones that `theirs` was made of under `key`."""
    if theirs.step < 1 or theirs.num_tokens < 0:
        return 0
    num_tokens = len(prompt.token_ids)
    num_marks = min(len(theirs.marks), num_tokens // theirs.step)
    ends = [(i + 1) * theirs.step for i in range(num_marks)]
    reaches_end = theirs.num_tokens <= num_tokens and theirs.num_tokens >= (ends[-1] if ends else 0)
    found = _digests(prompt, [*ends, theirs.num_tokens] if reaches_end else ends, key)
    if reaches_end and found[-1] == theirs.whole:
        return theirs.num_tokens
    return max((end for end, mine, mark in zip(ends, found, theirs.marks, strict=False) if mine == mark), default=0)


def _digests(prompt: Prompt, ends: Sequence[int], key: bytes) -> list[str]:
    """Keyed digests of the prefixes that end there; ascending, within the prompt."""
    tokens = np.asarray(prompt.token_ids[: ends[-1]] if ends else [], dtype="<i8").tobytes()
    state = hashlib.blake2b(prompt.adapter.encode(), key=key, digest_size=DIGEST_BYTES)
    items = sorted(prompt.items)
    found, start, item = [], 0, 0
    for end in ends:
        state.update(tokens[start * 8 : end * 8])
        while item < len(items) and items[item][0] < end:
            state.update(repr(items[item]).encode())
            item += 1
        found.append(state.copy().hexdigest())
        start = end
    return found
