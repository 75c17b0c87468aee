"""Engines whose compute and link are slower than this machine's, by a known amount: what hides behind what is then seen.

Over shared memory a cache of megabytes takes milliseconds, and a tiny model's prefill not much more. `PacedReshardConnector` and
`PacedPushConnector` are the connectors of their names in engines in which

1. each attention layer of a prefill ends at its time, `seconds_per_token` times tokens, shared by all layers (`pace_compute`);
2. each transfer of NIXL's takes its bytes over `link_bytes_per_s`, one after the other, as a link does (`pace_link`). Words of a few bytes
   take no time.

The paces are in a file, `Pace`, that every process reads anew for each step and transfer. Workers append what happened, with the time, to
the file of events: `computed` (a step with prefills has ended), `moving` (bytes are on the link until they have passed), `loaded` (a request's
load is reported). Schedulers append `allocated` (a request has blocks for a load).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPushConnector

from bench.pace import Pace, note
from kvreshard.vllm.connector import ReshardConnector

SMALL_BYTES = 4096


class _Link:
    """One link: when it is free again, and when what was given to it has passed. In front of the methods of NIXL's agent."""

    def __init__(self, agent: Any) -> None:
        names = (
            "get_xfer_descs",
            "prep_xfer_dlist",
            "make_prepped_xfer",
            "initialize_xfer",
            "transfer",
            "check_xfer_state",
        )
        self._inner = {name: getattr(agent, name) for name in names}
        self._free_s = 0.0
        # Of lists of NIXL's, which are kept so that no other takes their place: bytes of each entry. Of transfers: bytes, and their end.
        self._lengths: dict[int, tuple[object, Any]] = {}
        self._bytes: dict[int, int] = {}
        self._ends_s: dict[int, float] = {}
        for name in names:
            setattr(agent, name, self._method(name))

    def _method(self, name: str) -> Callable[..., Any]:
        def method(agent: Any, *given: Any, **named: Any) -> Any:
            return getattr(self, name)(agent, *given, **named)

        return method

    def get_xfer_descs(self, agent: Any, given: Any, *more: Any, **named: Any) -> Any:
        found = self._inner["get_xfer_descs"](agent, given, *more, **named)
        self._note(found, given)
        return found

    def prep_xfer_dlist(self, agent: Any, name: str, given: Any, *more: Any, **named: Any) -> Any:
        found = self._inner["prep_xfer_dlist"](agent, name, given, *more, **named)
        known = self._lengths.get(id(given))
        if known is not None:
            self._lengths[id(found)] = found, known[1]
        else:
            self._note(found, given)
        return found

    def make_prepped_xfer(self, agent: Any, operation: str, local: Any, indices: Any, *more: Any, **named: Any) -> Any:
        handle = self._inner["make_prepped_xfer"](agent, operation, local, indices, *more, **named)
        known = self._lengths.get(id(local))
        self._bytes[id(handle)] = 0 if known is None else sum(int(known[1][index]) for index in indices)
        return handle

    def initialize_xfer(self, agent: Any, operation: str, local: Any, *more: Any, **named: Any) -> Any:
        handle = self._inner["initialize_xfer"](agent, operation, local, *more, **named)
        known = self._lengths.pop(id(local), None)
        self._bytes[id(handle)] = 0 if known is None else int(sum(known[1]))
        return handle

    def transfer(self, agent: Any, handle: Any, *more: Any, **named: Any) -> str:
        rate, num_bytes = Pace.read().link_bytes_per_s, self._bytes.get(id(handle), 0)
        if not rate or num_bytes <= SMALL_BYTES:
            return str(self._inner["transfer"](agent, handle, *more, **named))
        self._free_s = max(self._free_s, time.monotonic()) + num_bytes / rate
        self._ends_s[id(handle)] = self._free_s
        note("moving", until_s=self._free_s, num_bytes=num_bytes)
        return "PROC"

    def check_xfer_state(self, agent: Any, handle: Any) -> str:
        if time.monotonic() < self._ends_s.get(id(handle), 0.0):
            return "PROC"
        has_passed = self._ends_s.pop(id(handle), None) is not None
        return str(self._inner["transfer" if has_passed else "check_xfer_state"](agent, handle))

    def _note(self, found: object, given: Any) -> None:
        """Bytes of each entry of a list. Rows of five columns stand for as many entries as the last says."""
        if isinstance(given, list):
            self._lengths[id(found)] = found, [one[1] for one in given]
        elif getattr(given, "ndim", 0) == 2:
            repeats = given[:, 4].astype(np.int64) if given.shape[1] == 5 else 1
            self._lengths[id(found)] = found, np.repeat(given[:, 1], repeats)


def pace_link() -> None:
    """Of every agent that this process makes from now on: bytes are moved when they would have passed a link."""
    from nixl._api import nixl_agent

    if not hasattr(nixl_agent, "link"):
        nixl_agent.link = _Link(nixl_agent)


def pace_compute(num_layers: int) -> None:
    """Each attention layer of this process ends at its time."""
    from vllm.model_executor.layers.attention import Attention

    if hasattr(Attention, "_paced"):
        return
    Attention._paced, inner = True, Attention.forward
    state = {"layer": 0, "began_s": 0.0}

    def forward(self: Any, query: Any, *more: Any, **named: Any) -> Any:
        num_tokens, seconds = int(query.shape[0]), Pace.read().seconds_per_token
        if num_tokens > 1 and seconds:
            if state["layer"] % num_layers == 0:
                state["layer"], state["began_s"] = 0, time.monotonic()
            state["layer"] += 1
            ends_s = state["began_s"] + seconds * num_tokens * state["layer"] / num_layers
            time.sleep(max(0.0, ends_s - time.monotonic()))
        found = inner(self, query, *more, **named)
        if num_tokens > 1 and seconds and state["layer"] == num_layers:
            note("computed")
        return found

    Attention.forward = forward


class _Paced:
    """Comes before a connector class among the bases."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        if role == KVConnectorRole.WORKER:
            pace_link()
            pace_compute(vllm_config.model_config.hf_text_config.num_hidden_layers)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]
        if num_external_tokens:
            note("allocated", request=request.request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        for request in results.finished_recving or ():
            note("loaded", request=request)
        return results


class PacedReshardConnector(_Paced, ReshardConnector):
    """Ours. Without `Pace.tells_layers` progress is told by chunk."""

    def save_kv_layer(self, *given: Any, **named: Any) -> None:
        if Pace.read().tells_layers:
            super().save_kv_layer(*given, **named)


class PacedPushConnector(_Paced, NixlPushConnector):
    """vLLM's own, which writes when the prefill has ended."""
