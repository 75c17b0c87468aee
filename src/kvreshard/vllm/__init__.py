"""The connector for vLLM, and the only room that imports it.

vLLM finds `ReshardConnector` by `"kv_connector": "ReshardConnector", "kv_connector_module_path": "kvreshard.vllm"`. `ShadowConnector`, found
the same way, lets vLLM's own NixlConnector move the cache and reports what `ReshardConnector` would have done. Both are imported at first
use, so that `options`, `params` and other modules work without vLLM.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvreshard.vllm.connector import ReshardConnector
    from kvreshard.vllm.shadow import ShadowConnector

__all__ = ["ReshardConnector", "ShadowConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvreshard.vllm.versions import check_version

    check_version()
    _register()
    _join_log()
    if name == "ShadowConnector":
        from kvreshard.vllm.shadow import ShadowConnector

        return ShadowConnector
    from kvreshard.vllm.connector import ReshardConnector

    return ReshardConnector


def _register() -> None:
    """Register both by name: MultiConnector looks for its children's statistics there (`MultiConnector.build_kv_connector_stats`)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in __all__:
        with contextlib.suppress(ValueError):  # it is registered
            KVConnectorFactory.register_connector(name, __name__, name)


def _join_log() -> None:
    """Send this package's log lines to vLLM's handlers, at its level. vLLM configures only its own logger.

    A program that has configured the logger `kvreshard` itself is left alone.
    """
    ours, theirs = logging.getLogger("kvreshard"), logging.getLogger("vllm")
    if ours.handlers or ours.level != logging.NOTSET:
        return
    ours.setLevel(theirs.getEffectiveLevel())
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.propagate = not theirs.handlers
