"""vLLM and torch warn about themselves when they are imported; what our own code warns about still fails a test.

Tests that make whole models, and most of the simulated worlds, run with the installed release of vLLM only: they get the mark `one_release`, and
`make test-ci` leaves them out with the other releases.
"""

import importlib.util
import logging
import warnings
from collections.abc import Iterator

import pytest
from tests.releases import INSTALLED

from kvreshard.vllm.versions import find_version

# Files, and how many worlds of the simulation run with every release: five batches of four.
WITH_ONE_RELEASE = ("test_families", "test_declared", "test_defaults", "test_drafts", "test_hostile_clients")
BATCHES_WITH_EVERY_RELEASE = 5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs with one release."""
    for item in items:
        name, batch = item.path.stem, getattr(item, "callspec", None)
        is_late = name == "test_simulation" and (
            batch is None or batch.params.get("batch", BATCHES_WITH_EVERY_RELEASE) >= BATCHES_WITH_EVERY_RELEASE
        )
        if item.path.parent.name == "vllm" and (name in WITH_ONE_RELEASE or is_late):
            item.add_marker(pytest.mark.one_release)


if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.kv_cache_manager
        import vllm.v1.request  # noqa: F401


@pytest.fixture(scope="session")
def run_seed(run_seed: int) -> int:
    """Worlds of other releases than the installed one are the same in every run."""
    return run_seed if (find_version() or "").startswith(INSTALLED) else 0


@pytest.fixture(autouse=True)
def log_lines_can_be_caught(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Loading the connector may hand its lines to vLLM's handlers alone, and take vLLM's level: a test that looks at them would depend on
    those before it.
    """
    logger = logging.getLogger("kvreshard")
    monkeypatch.setattr(logger, "propagate", True)
    level = logger.level
    logger.setLevel(logging.NOTSET)
    yield
    logger.setLevel(level)
