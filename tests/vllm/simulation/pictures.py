"""A world in which prompts have a picture, and the decode engine has the same, another or none.

Few prompts and few pictures, so that engines hold much of what they are asked for: whatever a prefix hit serves, kernels find there what
their own prompt's picture left, and no engine computes the tokens of a picture that it does not have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.simulation.engine import Engine
from tests.vllm.simulation.text import Picture, Text
from tests.vllm.simulation.world import BEYOND, World

PLACEHOLDER = 499
PICTURES = 3
ROUTER = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class PictureWorld(World):
    """See the module. `num_asked`: decode requests by what they have."""

    num_asked: Counter[str] = field(default_factory=Counter)

    def submit(self) -> None:
        rng = self.rng
        first, num_tokens = rng.choice([0, 5, 16, 30]), rng.choice([3, 16, 40])
        prompt = [*range(first), *[PLACEHOLDER] * num_tokens, *range(rng.choice([1, 2, 20, 40]))]
        picture = Picture(rng.randint(1, PICTURES), first, num_tokens)
        if rng.random() < 0.4:  # nobody's prefill: with a picture, or the same tokens as text
            seen = rng.choice([picture, None])
            engine = rng.choice(list(self.by_name.values()))
            self._ask(engine, Text(prompt, 4 + BEYOND, seen), len(prompt), 4, None, False, None, picture=seen)
            return
        src = rng.choice(self.can_prefill)
        self._ask(
            src, Text(prompt, 1 + BEYOND, picture), len(prompt), 1, ROUTER, False,
            lambda answer: self._decode(src, prompt, picture, answer), picture=picture,
        )  # fmt: skip

    def _decode(self, src: Engine, prompt: list[int], picture: Picture, answer: dict[str, Any] | None) -> None:
        if answer is None:
            return
        rng = self.rng
        other = Picture(picture.number % PICTURES + 1, picture.first, picture.num_tokens)
        kind, mine = rng.choice([("same", picture), ("none", None), ("another", other)])
        self.num_asked[kind] += 1
        is_blind = mine is not picture
        text = Text(prompt, 8 + BEYOND, picture, is_blind=is_blind)
        dst = rng.choice(self.can_decode)
        self.num_asked["blind, itself"] += dst is src and is_blind
        wants_load = dst is not src and picture.first + picture.num_tokens < len(prompt)
        self._later.append(lambda: self._ask(dst, text, len(prompt), 8, answer, wants_load, None, picture=mine))
