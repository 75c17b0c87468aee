"""Is a request that is not loaded as far as it was prefilled counted each time, and told loudly once per cause?"""

from __future__ import annotations

import logging

import pytest

from kvreshard.vllm.partial_loads import PartialLoads


def test_each_is_counted_and_the_first_of_each_cause_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[tuple[str, int]] = []
    partial = PartialLoads(lambda cause, num_tokens: counted.append((cause, num_tokens)))
    with caplog.at_level(logging.INFO):
        for name, cause, num_loaded in (
            ("a", "prompt", 16),
            ("b", "prompt", 0),
            ("c", "role", 0),
            ("d", "prompt", 300),
        ):
            partial.note(name, cause, num_loaded, 300, "this and that")
    assert counted == [("prompt", 284), ("prompt", 300), ("role", 300)]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert caplog.messages[1] == "request b: 0 of the 300 tokens that were prefilled are loaded (prompt): this and that"
    assert "16 of the 300 tokens" in caplog.messages[0]
