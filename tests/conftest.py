"""How every run of the suite is set up: how many examples, from which seed, and what happens without NIXL.

Profiles (`--hypothesis-profile`): `dev` by default and in `make check`, `ci` in `make test`, `deep` by hand, with `--timeout=0`.
A property that wants more examples than the profile gives asks for a multiple of it, so that it still follows the
profile: `@settings(max_examples=20 * settings.default.max_examples)`.
"""

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

SEED_OPTION = "hypothesis_seed"


def register_profiles() -> None:
    """Every value is spelled out: where CI=true is set, Hypothesis would have its own defaults, the same examples each time."""
    for name, max_examples in {"dev": 25, "ci": 100, "deep": 2500}.items():
        settings.register_profile(
            name,
            max_examples=max_examples,
            derandomize=False,
            deadline=None,  # a shared machine with 2 cores stalls for longer than any example takes
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        )


register_profiles()
settings.load_profile("dev")


@pytest.hookimpl(tryfirst=True)  # before the plugin of Hypothesis takes the option over
def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed here when none is given, so that a green run can be repeated as well as a red one."""
    if getattr(config.option, SEED_OPTION, None) is None:
        given = getattr(config, "workerinput", {}).get(SEED_OPTION)
        config.option.hypothesis_seed = given or str(random.SystemRandom().getrandbits(32))
    if "KVRESHARD_RESULTS" in os.environ:
        from tests.outcomes import Outcomes  # only here: this file is also run alone (unit/test_conftest.py)

        path = Path(os.environ["KVRESHARD_RESULTS"])
        config.pluginmanager.register(Outcomes(path, config.getoption(SEED_OPTION)), "kvreshard-outcomes")


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist: processes side by side are one run
def pytest_configure_node(node: Any) -> None:
    """Give each process the seed that is told at the top."""
    node.workerinput[SEED_OPTION] = node.config.getoption(SEED_OPTION)


def pytest_report_header(config: pytest.Config) -> str:
    """Say at the top what it takes to have the same run again."""
    profile, seed = settings.get_current_profile_name(), config.getoption(SEED_OPTION)
    return f"seed: {seed} (again: --hypothesis-seed={seed}, or make test SEED={seed}); hypothesis profile: {profile}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without NIXL its tests are skipped, by name; `make test`, which installs it, takes that for an error."""
    marked = [item for item in items if item.get_closest_marker("nixl")]
    if not marked or importlib.util.find_spec("nixl") is not None:
        return
    if os.environ.get("KVRESHARD_REQUIRE_NIXL") == "1":
        raise pytest.UsageError(f"{len(marked)} tests need the nixl package, and it is not installed")
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="the nixl package is not installed"))


@pytest.fixture(scope="session")
def run_seed(pytestconfig: pytest.Config) -> int:
    """The seed of this run, for randomness that does not come from Hypothesis: `np.random.default_rng(run_seed)`."""
    return int(pytestconfig.getoption(SEED_OPTION))
