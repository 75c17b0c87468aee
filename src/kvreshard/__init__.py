"""Move a request's KV cache from one inference engine to another, whatever the two layouts are.

The names of this module are the public API. From the first release on, one that changes or goes is first deprecated for a release. So are the connectors
that vLLM loads from `kvreshard.vllm` with their options, the commands with their options and exit codes, and for whoever writes a transport
`kvreshard.testing.contract` and `kvreshard.testing.ranks`. Everything else, in whatever module, is private and may change in any release.
Names are loaded when they are first used.

| to | use |
|---|---|
| describe an engine | `load` a model, `parse_engine` an engine, `describe` both to an `EngineLayout`; `relocate` it to real addresses; `encode_layout`, `decode_layout` |
| compile a pair of engines | `compile_routes`: a proved `Route` per rank of the decode engine, with a `CostModel`; `explain`, `name_fields` for people |
| bind a request | `Request` with a `PageTable` per group; `bind` to `CopyList`s, `find_unwritten` for what is zeroed |
| move it | a `Transport` (`NixlTransport`, or `MemoryTransport` on a `Fabric`) with its `MemoryRegion`s; a `Mover` with `HostMemory`; `pull`, `push` |
| verify it | `digest_transfers` of both sides, `compare`; `oracle_transfer` for what all memory must be |
| check a machine | `check_host`, `check_route` |

What is wrong with an engine, a pair, a request or a call is a `KvReshardError`: `UsageError` (a function was given something else than it takes), `LayoutError`,
`LayoutMismatch`, `BindError`, `WireError`; and `TransportError` for what goes wrong underneath. A transfer that does not settle in time is Python's
`TimeoutError`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvreshard.catalog import describe as describe
    from kvreshard.catalog import load as load
    from kvreshard.catalog import parse_engine as parse_engine
    from kvreshard.cli.doctor import check_host as check_host
    from kvreshard.cli.doctor import check_route as check_route
    from kvreshard.kinds.assemble import relocate as relocate
    from kvreshard.model import BindError as BindError
    from kvreshard.model import EngineLayout as EngineLayout
    from kvreshard.model import KvReshardError as KvReshardError
    from kvreshard.model import LayoutError as LayoutError
    from kvreshard.model import LayoutMismatch as LayoutMismatch
    from kvreshard.model import UsageError as UsageError
    from kvreshard.model import WireError as WireError
    from kvreshard.model.tables import PageTable as PageTable
    from kvreshard.model.tables import Request as Request
    from kvreshard.model.wire import decode as decode_layout  # noqa: F401
    from kvreshard.model.wire import encode as encode_layout  # noqa: F401
    from kvreshard.plan import CopyList as CopyList
    from kvreshard.plan import Route as Route
    from kvreshard.plan import bind as bind
    from kvreshard.plan import compile_routes as compile_routes
    from kvreshard.plan import find_unwritten as find_unwritten
    from kvreshard.plan.cost import CostModel as CostModel
    from kvreshard.plan.explain import explain as explain
    from kvreshard.plan.explain import name_fields as name_fields
    from kvreshard.session.mover import Mover as Mover
    from kvreshard.session.transfer import pull as pull
    from kvreshard.session.transfer import push as push
    from kvreshard.testing.oracle import oracle_transfer as oracle_transfer
    from kvreshard.tools.digest import compare as compare
    from kvreshard.tools.digest import digest_transfers as digest_transfers
    from kvreshard.transport.base import MemoryRegion as MemoryRegion
    from kvreshard.transport.base import Transport as Transport
    from kvreshard.transport.base import TransportError as TransportError
    from kvreshard.transport.local import HostMemory as HostMemory
    from kvreshard.transport.memory import Fabric as Fabric
    from kvreshard.transport.memory import MemoryTransport as MemoryTransport
    from kvreshard.transport.nixl import NixlTransport as NixlTransport

__version__ = "0.1.0"

# Where each public name is; `module:name` where it has another one there. `tests/unit/test_public_api.py` holds it to the imports above.
_PLACES = {
    **dict.fromkeys(("describe", "load", "parse_engine"), "catalog"),
    **dict.fromkeys(("check_host", "check_route"), "cli.doctor"),
    "relocate": "kinds.assemble",
    **dict.fromkeys(
        ("BindError", "EngineLayout", "KvReshardError", "LayoutError", "LayoutMismatch", "UsageError", "WireError"),
        "model",
    ),
    **dict.fromkeys(("PageTable", "Request"), "model.tables"),
    "decode_layout": "model.wire:decode",
    "encode_layout": "model.wire:encode",
    **dict.fromkeys(("CopyList", "Route", "bind", "compile_routes", "find_unwritten"), "plan"),
    "CostModel": "plan.cost",
    **dict.fromkeys(("explain", "name_fields"), "plan.explain"),
    "Mover": "session.mover",
    **dict.fromkeys(("pull", "push"), "session.transfer"),
    "oracle_transfer": "testing.oracle",
    **dict.fromkeys(("MemoryRegion", "Transport", "TransportError"), "transport.base"),
    "HostMemory": "transport.local",
    **dict.fromkeys(("Fabric", "MemoryTransport"), "transport.memory"),
    "NixlTransport": "transport.nixl",
    **dict.fromkeys(("compare", "digest_transfers"), "tools.digest"),
}
__all__ = [*sorted(_PLACES), "__version__"]  # noqa: PLE0604 (they are names)


def __getattr__(name: str) -> Any:
    """A public name, at its first use."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(
            f"module 'kvreshard' has no public name '{name}'; its names are {', '.join(sorted(_PLACES))}"
        )
    module, _, there = place.partition(":")
    found = getattr(importlib.import_module(f"kvreshard.{module}"), there or name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
