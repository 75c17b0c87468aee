"""Digests of a prompt's prefixes, by which the decode engine finds how much of its prompt the prefill engine has computed.

A router may send another text to the decode engine: a placeholder, or one token more or less. The prefill side sends a digest every
`step` tokens and at the end; the decode side computes its own and takes the longest prefix on which both agree. Only those tokens are
loaded. Where the prompts differ, fewer than `step` equal tokens are computed again: 15 or fewer of prompts up to 4,096 tokens, below
1/256 of longer ones and 15 more.

All digests have a key that the two engines share (`session.seal`), another one for each request. So whoever reads them on their way cannot
guess a text piece by piece, recognise a picture or a `cache_salt`, or compare those of two requests.

The digest of a prefix covers the token ids, the adapter (LoRA) and prompt embeddings. Multimodal items and the `cache_salt` travel beside
it, since platforms send the decode engine another item, or none, on purpose (`kvreshard.vllm.items`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from kvreshard.vllm.items import MAX_POSITION, Item, digest_with_key, with_key

DIGEST_BYTES = 8
MARK_DIGITS = 2 * DIGEST_BYTES
MIN_STEP_TOKENS = 16
MAX_MARKS = 256
MAX_ITEMS = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a request, and what they do not show: multimodal items, the adapter (`adapters`), a digest of prompt embeddings and the
    `cache_salt`; each empty where there is none.
    """

    token_ids: Sequence[int]
    items: tuple[Item, ...] = ()
    adapter: str = ""
    embeds: str = ""
    salt: str = ""


class PromptDigest(msgspec.Struct, frozen=True):
    """Digests of prefixes: `whole` of all `num_tokens` tokens, `marks` one after another of the first `step`, `2 * step` and so on;
    hexadecimal. `items`: those that begin among these tokens, with keyed digests. `salt`: a keyed digest of the `cache_salt`.
    """

    num_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
    step: Annotated[int, msgspec.Meta(ge=1, le=MAX_POSITION)]
    whole: Annotated[str, msgspec.Meta(max_length=MARK_DIGITS)]
    marks: Annotated[
        str, msgspec.Meta(max_length=MAX_MARKS * MARK_DIGITS, pattern=rf"\A([0-9a-f]{{{MARK_DIGITS}}})*\Z")
    ] = ""
    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    salt: Annotated[str, msgspec.Meta(max_length=64)] = ""


def digest_prompt(prompt: Prompt, num_tokens: int, key: bytes) -> PromptDigest:
    """The digests of the first `num_tokens` tokens under a request's `key`."""
    step = -(-num_tokens // MAX_MARKS // MIN_STEP_TOKENS) * MIN_STEP_TOKENS or MIN_STEP_TOKENS
    ends = [*range(step, num_tokens + 1, step), num_tokens]
    *marks, whole = _digests(prompt, ends, key)
    items = with_key((item for item in prompt.items if item.first < num_tokens), key)
    return PromptDigest(num_tokens, step, whole, "".join(marks), items, digest_with_key(prompt.salt, key))


def count_matching(theirs: PromptDigest, prompt: Prompt, key: bytes) -> int:
    """How many leading tokens of `prompt` are proved to be those that `theirs` was made of under `key`."""
    if theirs.step < 1 or theirs.num_tokens < 0:
        return 0
    num_tokens = len(prompt.token_ids)
    marks = [theirs.marks[i : i + MARK_DIGITS] for i in range(0, len(theirs.marks), MARK_DIGITS)]
    num_marks = min(len(marks), num_tokens // theirs.step)
    ends = [(i + 1) * theirs.step for i in range(num_marks)]
    reaches_end = theirs.num_tokens <= num_tokens and theirs.num_tokens >= (ends[-1] if ends else 0)
    found = _digests(prompt, [*ends, theirs.num_tokens] if reaches_end else ends, key)
    if reaches_end and found[-1] == theirs.whole:
        return theirs.num_tokens
    return max((end for end, mine, mark in zip(ends, found, marks, strict=False) if mine == mark), default=0)


def _digests(prompt: Prompt, ends: Sequence[int], key: bytes) -> list[str]:
    """Keyed digests of the prefixes that end at `ends`, which ascend and lie within the prompt."""
    tokens = np.asarray(prompt.token_ids[: ends[-1]] if ends else [], dtype="<i8").tobytes()
    state = hashlib.blake2b(repr((prompt.adapter, prompt.embeds)).encode(), key=key, digest_size=DIGEST_BYTES)
    found, start = [], 0
    for end in ends:
        state.update(tokens[start * 8 : end * 8])
        found.append(state.copy().hexdigest())
        start = end
    return found
