"""What lay in a request's pages, the moment before anybody computes with them?

Runs inside the engines. `recorded(cls)` extends any connector class, and only reads:

1. the scheduler's side notes the block ids of a request when its load is allocated and when it has finished, and sends
   them along with the connector's own metadata;
2. a worker writes down the pages of a **finished** request before its next forward pass, and those of a **loaded** one
   when its connector reports the load, which is before the scheduler may run it.

`RecordConnector` does that in an ordinary engine: it moves nothing, and holds finished requests until they are written.
The form of the files is in `tests.e2e.snapshots`.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.snapshots import Held, write_layout, write_pages
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

FOLDER = "KVRESHARD_E2E_SNAPSHOTS"


@dataclass
class Noted(KVConnectorMetadata):
    """The connector's own metadata, and what the workers shall write down."""

    inner: Any
    loading: list[Held] = field(default_factory=list)
    finished: list[Held] = field(default_factory=list)


class Recording:
    """Comes before a connector class among the bases of `recorded(cls)`."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._cache = vllm_config, kv_cache_config
        self._noted = Noted(None)
        self._loading: dict[str, Held] = {}
        self._cached: dict[str, int] = {}
        self._kv_caches: dict[str, Any] = {}

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._cached[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        cached = self._cached.pop(request.request_id, 0)
        if num_external_tokens > 0:
            tokens = cached + num_external_tokens
            self._noted.loading.append(_held(request, blocks.get_block_ids(), tokens, num_external_tokens))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        delayed, parameters = super().request_finished_all_groups(request, block_ids)
        if delayed:
            ids = _offered(parameters or {}, block_ids, self._cache.transfer_group_ids)
            self._noted.finished.append(_held(request, ids, request.num_computed_tokens, 0))
        return delayed, parameters

    def build_connector_meta(self, scheduler_output: Any) -> Noted:
        noted, self._noted = self._noted, Noted(None)
        noted.inner = super().build_connector_meta(scheduler_output)
        return noted

    # The workers' side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._kv_caches = kv_caches
        write_layout(Path(os.environ[FOLDER]), self._config, self._cache, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Noted) -> None:
        super().handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: Noted) -> None:
        super().bind_connector_metadata(connector_metadata.inner)
        self._loading.update((held.request_id, held) for held in connector_metadata.loading)
        for held in connector_metadata.finished:
            self._write("finished", held)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results: KVConnectorTransferResults = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving or ():
            held = self._loading.pop(request_id, None)
            if held is not None and request_id not in (results.failed_recving or ()):
                self._write("loaded", held)
        return results

    def _write(self, when: str, held: Held) -> None:
        try:
            write_pages(Path(os.environ[FOLDER]), when, held, self._config, self._cache, self._kv_caches)
        except Exception:  # noqa: BLE001  recording must not change what the engine does
            traceback.print_exc()


def _offered(parameters: dict[str, Any], block_ids: Any, transferred: Sequence[int]) -> Any:
    """The blocks that the other side is told of: ours keeps some that vLLM has dropped by then (`kvreshard.vllm.last_pages`)."""
    from kvreshard.vllm.params import ParamsError, read_params

    try:
        prefill = read_params(parameters)
    except ParamsError:  # another connector's
        return block_ids
    told = [list(ids) for ids in block_ids]
    for index, group, table in zip(transferred, prefill.groups, prefill.tables().values(), strict=True):
        if group.page_tokens is not None:
            told[index] = [0] * group.first_page + table.pages.tolist()
    return told


def _held(request: Any, block_ids: Any, tokens: int, loaded: int) -> Held:
    return Held(request.request_id, tuple(tuple(ids) for ids in block_ids), int(tokens), int(loaded))


def recorded(cls: type) -> type:
    """`cls`, writing snapshots. It keeps its name: vLLM ties defaults to that."""
    return type(cls.__name__, (Recording, cls), {"__module__": cls.__module__})


def install(folder: str) -> None:
    """In this process and its forks, every connector class that vLLM looks up is recorded."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    os.environ[FOLDER] = folder
    looked_up = KVConnectorFactory.get_connector_class.__func__
    known: dict[type, type] = {}

    def look_up(factory: Any, kv_transfer_config: Any) -> type:
        cls = looked_up(factory, kv_transfer_config)
        return known.setdefault(cls, recorded(cls)) if cls not in known.values() else cls

    KVConnectorFactory.get_connector_class = classmethod(look_up)


class RecordConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves nothing. A finished request is held until the workers have seen its id, so that its pages can be written."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._held: set[str] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return True, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return set(finished_req_ids), None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return
