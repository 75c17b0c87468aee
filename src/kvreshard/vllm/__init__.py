"""The connector for vLLM, and the only room that imports it.

vLLM finds `ReshardConnector` here: `"kv_connector": "ReshardConnector", "kv_connector_module_path": "kvreshard.vllm"`. It is
imported when it is asked for, so that what needs no vLLM can be used without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvreshard.vllm.connector import ReshardConnector

__all__ = ["ReshardConnector"]


def __getattr__(name: str) -> Any:
    if name != "ReshardConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvreshard.vllm.versions import check_version

    check_version()
    from kvreshard.vllm.connector import ReshardConnector

    return ReshardConnector
