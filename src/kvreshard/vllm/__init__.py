"""The connector for vLLM, and the only room that imports it.

vLLM finds `ReshardConnector` by its name alone, since `plugin.register` is an entry point, or by name and
`"kv_connector_module_path": "kvreshard.vllm"`. With the module path, the name `NixlConnector` is the same class, for platforms that know no
other. `ShadowConnector` lets vLLM's own NixlConnector move the cache and reports what `ReshardConnector` would have done. The classes are
imported at first use, so that `options`, `params` and other modules work without vLLM.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvreshard.vllm.connector import ReshardConnector
    from kvreshard.vllm.connector import ReshardConnector as NixlConnector
    from kvreshard.vllm.shadow import ShadowConnector

__all__ = ["NixlConnector", "ReshardConnector", "ShadowConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvreshard.vllm.plugin import register
    from kvreshard.vllm.versions import check_version

    check_version()
    register()  # where the package's metadata is not installed: MultiConnector looks for its children's statistics by class name
    _join_log()
    if name == "ShadowConnector":
        from kvreshard.vllm.shadow import ShadowConnector

        return ShadowConnector
    from kvreshard.vllm.connector import ReshardConnector

    return ReshardConnector


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
