"""The text of an engine without a model, and the content of its cache.

Every token follows from all before it, as in a model: the next one, and what the cache of a token holds, are functions of a hash
of the prefix. So all that will be said is known before it is, and a page with another text's tokens is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

VOCABULARY = 500
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Picture:
    """What stands behind some tokens of a prompt, whose ids say nothing of it."""

    number: int
    first: int
    num_tokens: int

    def __contains__(self, place: int) -> bool:
        return self.first <= place < self.first + self.num_tokens


class Text:
    """A prompt with what follows. `hashes[i]`: of the first i tokens. `picture`: what was seen of it; `is_blind`: not by the engine that has this text."""

    def __init__(
        self, prompt: Sequence[int], num_more: int, picture: Picture | None = None, *, is_blind: bool = False
    ) -> None:
        self.tokens, self.picture, self.is_blind = list(prompt), picture, is_blind
        self.hashes = [0x9E3779B97F4A7C15]
        for place, token in enumerate(prompt):
            seen = VOCABULARY * picture.number if picture is not None and place in picture else 0
            self.hashes.append(_mixed(self.hashes[-1], token + seen))
        for _ in range(num_more):
            self.tokens.append(next_token(self.hashes[-1]))
            self.hashes.append(_mixed(self.hashes[-1], self.tokens[-1]))

    def can_compute(self, first: int, end: int) -> bool:
        """Whether an engine with this text has what stands behind these tokens."""
        unseen = self.picture if self.is_blind else None
        return unseen is None or end <= unseen.first or first >= unseen.first + unseen.num_tokens

    def held(self, positions: np.ndarray) -> np.ndarray:
        """What the cache of these tokens holds: shape of `positions`, uint64."""
        return np.array(self.hashes, dtype=np.uint64)[positions + 1]

    def state(self, num_tokens: int) -> np.uint64:
        """What a state holds that has seen so many tokens."""
        return np.uint64(self.hashes[num_tokens])


def next_token(prefix: int) -> int:
    return (prefix >> 31) % VOCABULARY


def _mixed(prefix: int, token: int) -> int:
    mixed = ((prefix ^ (token + 0x5851F42D)) * 0xD6E8FEB86659FD93) & _MASK
    return (mixed ^ (mixed >> 32)) * 0xD6E8FEB86659FD93 & _MASK
