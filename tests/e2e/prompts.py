"""Which prompts does a case send? Lengths from one token to several pages, with the same tokens in every run."""

from __future__ import annotations

import random

from tests.e2e.tiny import VOCABULARY

FIRST_TOKEN = 3  # below it lie padding, start and end


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random tokens; equal for equal arguments, and different from the first token on for others."""
    drawn = random.Random(1000 * seed + length)
    return [drawn.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length)]


def ladder(tokens_per_page: int, longest: int = 900, seed: int = 0, window: int | None = None) -> list[list[int]]:
    """One token, a part of a page, pages that end on their border and beside it, several pages.

    With a `window` in tokens: also a prompt after which the next token's window begins on a border, so that the last of its own
    looks at one token of the page before.
    """
    page = tokens_per_page
    lengths = [1, 2, 17, page - 1, page, page + 1, 2 * page, 2 * page + page // 2 + 1, 4 * page + 3]
    lengths += [] if window is None else [page + window - 1]
    return [prompt(length, seed) for length in dict.fromkeys(min(length, longest) for length in lengths if length > 0)]
