"""What does an engine without a model say, and what does its cache hold?

Every token follows from all before it, as in a model: the next one, and what the cache of a token holds, are functions of a hash
of the prefix. So all that will be said is known before it is, and a page with another text's tokens is seen.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

VOCABULARY = 500
_MASK = (1 << 64) - 1


class Text:
    """A prompt with what follows. `hashes[i]`: of the first i tokens."""

    def __init__(self, prompt: Sequence[int], num_more: int) -> None:
        self.tokens = list(prompt)
        self.hashes = [0x9E3779B97F4A7C15]
        for token in prompt:
            self.hashes.append(_mixed(self.hashes[-1], token))
        for _ in range(num_more):
            self.tokens.append(next_token(self.hashes[-1]))
            self.hashes.append(_mixed(self.hashes[-1], self.tokens[-1]))

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
