"""vLLM's entry point of this package: registers the connectors by name, so that a configuration needs no `kv_connector_module_path`.

vLLM calls `register` in each of its processes, also of engines that use another connector, in any version, and several times
(`vllm.general_plugins`). So it imports no connector, checks no version and raises nothing: what cannot work is refused when a connector is
used.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

PACKAGE = "kvreshard"
MODULE = "kvreshard.vllm"
# Not `NixlConnector`: without a module path, that name stays vLLM's own connector.
NAMES = ("ReshardConnector", "ShadowConnector")


def register() -> None:
    """Register the connectors in vLLM's factory, once. A name that another package has registered stays that package's; one line says so."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        for name in NAMES:
            _register_name(KVConnectorFactory, name)
    except Exception:  # noqa: BLE001  no factory, or one of another form: this vLLM may have no use for it
        from kvreshard.model.logs import get_logger  # it loads the room `model`, for a line that is rarely written

        get_logger(__name__).debug("kvreshard: its connectors are not registered in this vLLM", exc_info=True)


def _register_name(factory: Any, name: str) -> None:
    loader = factory._registry.get(name)
    if loader is None:
        factory.register_connector(name, MODULE, name)
        return
    module = _module_of(loader)
    if module.split(".")[0] != PACKAGE:
        _warn(name, module)


@functools.cache  # one line per process
def _warn(name: str, module: str) -> None:
    from kvreshard.model.logs import fields, get_logger

    logger = get_logger(__name__)
    logger.warning(
        "the connector name %s is registered for %s, so that kvreshard does not register it for %s; to use kvreshard's, give "
        '"kv_connector_module_path":"%s" beside the name',
        *(name, module, MODULE, MODULE),
        extra=fields("name_taken", name_taken=name, module_path=module),
    )


def _module_of(loader: Any) -> str:
    """The module that a loader of vLLM's registry imports: it is what `register_connector` was called with, kept in a closure."""
    try:
        return str(inspect.getclosurevars(loader).nonlocals["module_path"])
    except (TypeError, KeyError):
        return str(getattr(loader, "__module__", None) or loader)
