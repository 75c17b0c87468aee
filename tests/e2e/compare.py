"""Do two answers agree, and if not, how far apart are they?

Tokens alone are weak: a corrupted state once gave equal ones. So log-probabilities are compared too, of every token
that both engines list at a step, as far as the two texts are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.e2e.engine import Output


@dataclass(frozen=True, slots=True)
class Difference:
    """How one set of answers differs from the expected one.

    `wrong_tokens`: prompts whose tokens differ. `empty`: prompts that came back without a token. `failed`: messages.
    `logprob_gap`: the largest difference of a log-probability, over the steps before the texts part.
    """

    num_prompts: int
    wrong_tokens: tuple[int, ...]
    empty: tuple[int, ...]
    failed: tuple[str, ...]
    logprob_gap: float

    @property
    def answered(self) -> bool:
        return not self.empty and not self.failed

    def __str__(self) -> str:
        words = [f"{len(self.wrong_tokens)} of {self.num_prompts} texts differ" if self.wrong_tokens else "texts equal"]
        words += [f"{len(self.empty)} empty"] if self.empty else []
        words += [f"{len(self.failed)} failed: {self.failed[0]}"] if self.failed else []
        return f"{', '.join(words)}, log-probabilities within {self.logprob_gap:.1e}"


def compare(expected: Sequence[Output], got: Sequence[Output]) -> Difference:
    wrong, empty, failed, gap = [], [], [], 0.0
    for number, (right, answer) in enumerate(zip(expected, got, strict=True)):
        if answer.error is not None:
            failed.append(answer.error)
            continue
        if not answer.tokens:
            empty.append(number)
            continue
        if answer.tokens != right.tokens:
            wrong.append(number)
        gap = max(gap, logprob_gap(right, answer))
    return Difference(len(expected), tuple(wrong), tuple(empty), tuple(failed), gap)


def logprob_gap(right: Output, answer: Output) -> float:
    """The largest difference up to and including the first step at which the texts part; inf without log-probabilities."""
    gap, compared = 0.0, 0
    for step, (known, listed) in enumerate(zip(right.logprobs, answer.logprobs, strict=False)):
        shared = known.keys() & listed.keys()
        compared += len(shared)
        gap = max([gap, *(abs(known[token] - listed[token]) for token in shared)])
        if right.tokens[step] != answer.tokens[step]:
            break
    return gap if compared else float("inf")
