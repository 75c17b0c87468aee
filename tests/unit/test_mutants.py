"""Does every mutant still break something? One whose text is gone from the code is tried by nobody, and nobody would notice."""

from __future__ import annotations

from pathlib import Path

import pytest

MUTATIONS = Path(__file__).parents[1] / "mutations"


def test_the_text_of_every_mutant_is_in_the_code_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MUTATIONS)
    import run  # the runner and its lists are scripts beside one another

    assert len(run.MUTANTS) > 150
    assert run.check_texts(run.MUTANTS) == []
