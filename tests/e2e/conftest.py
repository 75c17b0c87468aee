"""Engines for the tests here: skipped without vLLM, one pool of engines per run, results kept for `tests.e2e.table`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cases import IN_TREE
from tests.e2e.engines import Nursery

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies here, and skip it where vLLM is missing. The test process itself never imports vLLM."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if HERE not in item.path.parents:
            continue
        item.add_marker(pytest.mark.e2e)
        if missing and "nursery" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed"))


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The pool. Fails at the end if an engine left anything in shared memory or would not stop.

    vLLM's own connector is excused: where it refuses a pair, the prefill engine holds on to what nobody fetched, and is
    killed when its lease outlasts the shutdown.
    """
    with Nursery() as started:
        yield started
    assert not [words for spec, words in started.complaints if spec.connector != IN_TREE]
