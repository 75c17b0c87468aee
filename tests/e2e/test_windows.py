"""Does the last token of a prompt find what it looks at, where a window or a chunk begins on the border of a page behind it?

With windows of 160 tokens, chunks of 128 and pages of 128 these are the lengths at which vLLM drops a page that the last token still
needs (docs/design/0024). The texts must be an ordinary engine's, and nothing may be computed again for want of that page.
"""

from __future__ import annotations

import pytest
from tests.e2e.compare import compare
from tests.e2e.engine import EngineSpec
from tests.e2e.engines import Nursery
from tests.e2e.prompts import prompt
from tests.e2e.router import route

NOISE = 3 * 5e-6


@pytest.mark.e2e_ci
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "lengths"), [("gemma3", (286, 287, 288, 415)), ("llama4", (127, 128, 129, 384))])
def test_the_last_token_finds_what_it_looks_at(model: str, lengths: tuple[int, ...], nursery: Nursery) -> None:
    nursery.stop_all()
    prompts = [prompt(length, 11) for length in lengths]
    expected = nursery.engine(EngineSpec(model)).generate(prompts)
    source = nursery.engine(EngineSpec(model, connector="ReshardConnector", role="kv_producer"))
    target = nursery.engine(EngineSpec(model, tp=2, connector="ReshardConnector", role="kv_consumer"))
    found = compare(expected, [answer.decode for answer in route(source, target, prompts)])
    assert found.answered, str(found)
    assert not found.wrong_tokens, str(found)
    assert found.logprob_gap <= NOISE, str(found)
    assert "is computed here" not in target.log.read_text(errors="replace")
