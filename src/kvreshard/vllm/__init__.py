"""The connector for vLLM, and the only room that imports it.

vLLM finds `ReshardConnector` here: `"kv_connector": "ReshardConnector", "kv_connector_module_path": "kvreshard.vllm"`. It is
imported when it is asked for, so that what needs no vLLM can be used without. `ShadowConnector`, found the same way, lets
vLLM's own NixlConnector do the work and reports what ours would have done.

Both are registered under their names then, since MultiConnector looks for its children's statistics there, and nowhere else
(vLLM 0.32.0, `multi_connector.py:677`).
"""

from __future__ import annotations

import contextlib
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
    if name == "ShadowConnector":
        from kvreshard.vllm.shadow import ShadowConnector

        return ShadowConnector
    from kvreshard.vllm.connector import ReshardConnector

    return ReshardConnector


def _register() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in __all__:
        with contextlib.suppress(ValueError):  # it is registered
            KVConnectorFactory.register_connector(name, __name__, name)
