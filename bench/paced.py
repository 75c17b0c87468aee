"""Engines whose compute and link are slower than this machine's, by a known amount: what hides behind what is then seen.

Over shared memory a cache of megabytes takes milliseconds, and a tiny model's prefill not much more. `PacedReshardConnector` and
`PacedPushConnector` are the connectors of their names in engines in which

1. each attention layer of a prefill ends at its time, `seconds_per_token` times tokens, shared by all layers (`pace_compute`);
2. each transfer of NIXL's takes its bytes over `link_bytes_per_s`, one after the other, as a link does (`pace_link`). Words of a few bytes
   take no time.

The paces are in a file, `Pace`, that every process reads anew for each step and transfer. Workers append what happened, with the time, to
the file of events: `computed` (a step with prefills has ended), `loaded` (a request's load is reported).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPushConnector

from kvreshard.vllm.connector import ReshardConnector

PACE_FILE, EVENT_FILE = "KVRESHARD_BENCH_PACE", "KVRESHARD_BENCH_EVENTS"
SMALL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Pace:
    """Zero: as fast as it goes. `tells_layers`: progress is told by layer, not only by chunk."""

    seconds_per_token: float = 0.0
    link_bytes_per_s: float = 0.0
    tells_layers: bool = True

    def write(self, path: Path) -> None:
        """Set the paces of all engines that read this file."""
        path.with_suffix(".new").write_text(json.dumps(asdict(self)))
        path.with_suffix(".new").replace(path)

    @classmethod
    def read(cls) -> Pace:
        """As of now."""
        return cls(**json.loads(Path(os.environ[PACE_FILE]).read_text()))


def note(event: str, **details: object) -> None:
    """Append an event. All processes of a machine share the monotonic clock."""
    line = json.dumps({"event": event, "at_s": time.monotonic(), **details})
    with open(os.environ[EVENT_FILE], "a") as file:
        file.write(line + "\n")


class _Link:
    """One link: when it is free again, and when each transfer that was given to it has passed."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self._ends_s: dict[int, float] = {}
        self._started: set[int] = set()
        self._bytes: dict[int, int] = {}

    def describe(self, handle: object, num_bytes: int) -> None:
        self._bytes[id(handle)] = num_bytes

    def begin(self, handle: object) -> bool:
        """Whether a transfer takes time."""
        rate, num_bytes = Pace.read().link_bytes_per_s, self._bytes.get(id(handle), 0)
        self._started.discard(id(handle))
        if not rate or num_bytes <= SMALL_BYTES:
            return False
        self._free_s = max(self._free_s, time.monotonic()) + num_bytes / rate
        self._ends_s[id(handle)] = self._free_s
        return True

    def is_under_way(self, handle: object) -> bool:
        return time.monotonic() < self._ends_s.get(id(handle), 0.0)

    def has_passed(self, handle: object) -> bool:
        """Whether a transfer has just passed, and its bytes are to be moved now."""
        return self._ends_s.pop(id(handle), None) is not None


def pace_link() -> None:
    """Of every agent that this process makes from now on: bytes are moved when they would have passed a link."""
    from nixl._api import nixl_agent

    if hasattr(nixl_agent, "_paced"):
        return
    nixl_agent._paced, link = True, _Link()
    lengths: dict[int, tuple[object, Any]] = {}

    def wrap(name: str, make: Callable[[Any], Any]) -> None:
        setattr(nixl_agent, name, make(getattr(nixl_agent, name)))

    def descs(inner: Any) -> Any:
        def get_xfer_descs(self: Any, given: Any, *more: Any, **named: Any) -> Any:
            found = inner(self, given, *more, **named)
            if isinstance(given, list):
                lengths[id(found)] = found, [one[1] for one in given]
            elif getattr(given, "ndim", 0) == 2:
                lengths[id(found)] = found, given[:, 1]
            return found

        return get_xfer_descs

    def prep(inner: Any) -> Any:
        def prep_xfer_dlist(self: Any, agent: str, given: Any, *more: Any, **named: Any) -> Any:
            found = inner(self, agent, given, *more, **named)
            known = lengths.get(id(given))
            if known is not None:
                lengths[id(found)] = found, known[1]
            elif getattr(given, "ndim", 0) == 2:  # rows of five columns stand for as many entries as the last says
                repeats = given[:, 4].astype(np.int64) if given.shape[1] == 5 else 1
                lengths[id(found)] = found, np.repeat(given[:, 1], repeats)
            return found

        return prep_xfer_dlist

    def made(inner: Any) -> Any:
        def make_prepped_xfer(self: Any, operation: str, local: Any, indices: Any, *more: Any, **named: Any) -> Any:
            handle = inner(self, operation, local, indices, *more, **named)
            known = lengths.get(id(local))
            link.describe(handle, 0 if known is None else sum(int(known[1][index]) for index in indices))
            return handle

        return make_prepped_xfer

    def initialized(inner: Any) -> Any:
        def initialize_xfer(self: Any, operation: str, local: Any, *more: Any, **named: Any) -> Any:
            handle = inner(self, operation, local, *more, **named)
            known = lengths.pop(id(local), None)
            link.describe(handle, 0 if known is None else int(sum(known[1])))
            return handle

        return initialize_xfer

    def transferred(inner: Any) -> Any:
        def transfer(self: Any, handle: Any, *more: Any, **named: Any) -> str:
            return "PROC" if link.begin(handle) else str(inner(self, handle, *more, **named))

        return transfer

    def checked(inner: Any) -> Any:
        move = nixl_agent.transfer_now

        def check_xfer_state(self: Any, handle: Any) -> str:
            if link.is_under_way(handle):
                return "PROC"
            return str(move(self, handle)) if link.has_passed(handle) else str(inner(self, handle))

        return check_xfer_state

    nixl_agent.transfer_now = nixl_agent.transfer
    for name, make in (
        ("get_xfer_descs", descs), ("prep_xfer_dlist", prep), ("make_prepped_xfer", made), ("initialize_xfer", initialized),
        ("transfer", transferred), ("check_xfer_state", checked),
    ):  # fmt: skip
        wrap(name, make)


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
