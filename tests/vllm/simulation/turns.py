"""A world of conversations: what was prefilled and answered elsewhere is read back when the conversation goes on.

A router as vLLM's own one for this mode: the parameters of a decode engine's answer go to a prefill engine with the next turn, whose
prompt is the last one, the answer and new text. Some clients change the answer, cut it short, or ask for another one; some routers pick
any engine, or send the same parameters twice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.simulation.base import LONGEST
from tests.vllm.simulation.engine import Engine
from tests.vllm.simulation.text import VOCABULARY, Text
from tests.vllm.simulation.world import BEYOND, World

FIRST = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip
MAX_TURNS = 3
MAX_PROMPT, MAX_SAID = 60, 12


@dataclass
class TurnWorld(World):
    """See the module. `edits`: share of turns whose history is not what was answered. `twice`: of parameters that are sent twice.

    `num_turns`: turns that named an answer, by what their prompt is to it. `num_read_back`: tokens that prefill engines have loaded.
    `not_there`: turns with another engine's whole answer, of which a prefill engine neither had nor could load all but the last token.
    """

    edits: float = 0.0
    twice: float = 0.0
    num_turns: Counter[str] = field(default_factory=Counter)
    num_read_back: int = 0
    not_there: list[tuple[str, int, int]] = field(default_factory=list)

    def submit(self) -> None:
        prompt = [1, *self.make_prompt()[:MAX_PROMPT]]
        self._begin_turn(prompt, dict(FIRST), "first", 0, 1)

    def _begin_turn(self, prompt: list[int], params: dict[str, Any], what: str, num_answered: int, number: int) -> None:
        src = self.rng.choice(self.can_prefill)
        self.num_turns[what] += 1
        names: list[str] = []

        def then(answer: dict[str, Any] | None) -> None:
            if what != "first":
                self.num_read_back += src.read_back.get(names[0], 0)
            if (
                what == "same"
                and params["remote_engine_id"] != src.name
                and src.loadable.get(names[0], 0) < num_answered - 1
            ):
                self.not_there.append((names[0], src.loadable.get(names[0], 0), num_answered))
            self._decode(src, prompt, answer, number)

        self._ask(src, Text(prompt, 1 + BEYOND), len(prompt), 1, params, False, then)
        names.append(next(reversed(self.asked)))

    def _decode(self, src: Engine, prompt: list[int], answer: dict[str, Any] | None, number: int) -> None:
        others = [engine for engine in self.can_decode if engine is not src] or self.can_decode
        dst, num_tokens = self.rng.choice(others), self.rng.randint(1, MAX_SAID)
        text = Text(prompt, num_tokens + BEYOND)
        stop = self.rng.choice(text.tokens[len(prompt) :][:num_tokens]) if self.rng.random() < 0.3 else None
        said = text.tokens[len(prompt) :][:num_tokens]
        said = said[: said.index(stop) + 1] if stop in said else said
        params = answer or {"do_remote_prefill": False, "do_remote_decode": False, "of": "a router"}
        self._later.append(
            lambda: self._ask(
                dst, text, len(prompt), num_tokens, params, False,
                lambda back: self._go_on(prompt, said, back, number), stop,
            )
        )  # fmt: skip

    def _go_on(self, prompt: list[int], said: list[int], back: dict[str, Any] | None, number: int) -> None:
        rng = self.rng
        if number >= MAX_TURNS or rng.random() < self.weather.unwanted:
            return
        what, history = "same", [*prompt, *said]
        if rng.random() < self.edits:
            what = rng.choice(["again", "shorter", "other", "stripped"])
            history = {
                "again": list(prompt),
                "shorter": history[: rng.randint(1, len(history))],
                "other": [*history[: rng.randint(1, len(history))], *(rng.randrange(VOCABULARY) for _ in said)],
                "stripped": [*prompt, *said[len(said) // 2 :]],
            }[what]
        more = [
            rng.randrange(VOCABULARY)
            for _ in range(rng.choice([0, 1, 2, 20]) if what == "again" else rng.randint(1, 30))
        ]
        following = [*history, *more][:LONGEST]
        if back is None:
            self._later.append(lambda: self._begin_turn(following, dict(FIRST), "first", 0, number + 1))
            return
        assert (back["do_remote_decode"], back["do_remote_prefill"]) == (True, False)
        for _ in range(2 if rng.random() < self.twice else 1):
            params = back | {"do_remote_decode": True, "do_remote_prefill": False}
            self._later.append(
                lambda params=params: self._begin_turn(following, params, what, len(history), number + 1)
            )
