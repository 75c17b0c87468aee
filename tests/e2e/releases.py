"""Rows between engines of two releases of vLLM, and of one release that is not the installed one.

Three models: one with full attention, one with windows, one with recurrent states, each at two TP sizes. Every ordered pair of releases is a row
for each of them. `ci`: rows that every run of CI has; the others are for `make test-e2e`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.e2e.cases import EXACT, Case, Shape
from tests.releases import INSTALLED, RELEASES

# Model -> TP sizes of the prefill and the decode engine.
MODELS = {"llama": (1, 2), "gemma3": (2, 1), "granite-hybrid-bf16": (1, 2)}
DENSE, WINDOWED, HYBRID = MODELS


def rows() -> Iterator[Case]:
    """Every row. Rows that share engines come together."""
    for prefill, decode in itertools.product(RELEASES, RELEASES):
        if prefill == decode == INSTALLED:
            continue  # `cases` has these
        for model, (prefill_tp, decode_tp) in MODELS.items():
            yield Case(
                f"vLLM {prefill} -> {decode}",
                model,
                Shape(prefill_tp, vllm=prefill),
                Shape(decode_tp, vllm=decode),
                EXACT,
                is_in_ci(model, prefill, decode),
            )


def is_in_ci(model: str, prefill: str, decode: str) -> bool:
    """Of each release two pairs of its own, and two with the installed one, one each way."""
    if prefill == decode:
        return model in (WINDOWED, HYBRID)
    return (decode == INSTALLED and model == HYBRID) or (prefill == INSTALLED and model == DENSE)
