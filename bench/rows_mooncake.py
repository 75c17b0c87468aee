"""Mooncake's transfer engine over TCP, beside NIXL over TCP.

Its wheel without CUDA, `mooncake-transfer-engine-non-cuda`, links against libibverbs, which no package index has; where the
library is missing the row says so. The comparison itself is not written.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from bench.results import Result, skipped

ROW = "g mooncake"


def run(full: bool) -> Iterator[Result]:
    """Why not."""
    try:
        importlib.import_module("mooncake.engine")
        why = "it can be imported here, but the comparison is not written"
    except ImportError as error:
        why = f"{error} (pip install mooncake-transfer-engine-non-cuda; it needs the system's libibverbs1)"
    yield skipped(ROW, "Mooncake over TCP beside NIXL over TCP", why)
