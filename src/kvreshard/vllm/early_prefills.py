"""The prefills of one engine that readers may follow: what its scheduler tells the listener and the ranks of them.

A router gives both engines a `transfer_id` and does not wait for the prefill.

1. The request arrives: the listener has heard of it.
2. It is scheduled for the first time, under a lease: the listener gets a statement of its prompt and of what will be loaded.
3. Each step that computes it: the listener gets its new pages, the ranks the tokens before and after the step (`Computed`). What is final
   after the step is known when it is scheduled, so it does not matter how many steps are under way. Blocks of a prefix hit are final after
   the request's own first step: a step under way may still write them. The listener also learns for how long the prefill will compute after
   this step, at the pace of the last one, so that readers allocate blocks shortly before its end.
4. It is preempted: its lease ends, and it begins again under another one. It finishes: the listener gets the block tables of all groups.

Of several choices of one request the first that is scheduled is shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvreshard.session.lease import Lease
from kvreshard.session.progress import MAX_TOKENS, Computed
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.statement import Statement
from kvreshard.vllm.groups import CacheGroup
from kvreshard.vllm.params import RemotePrefill, transfer_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Shown:
    """A prefill that readers may follow. `num_listed`: pages of each group that the listener has. `step`: when its last step was scheduled,
    and from which token on; `num_steps`: how many there were.
    """

    request: Request
    transfer: str
    lease: Lease
    num_tokens: int
    has_begun: bool = False
    num_listed: dict[str, int] = field(default_factory=dict)
    step: tuple[float, int] = (0.0, 0)
    num_steps: int = 0


class EarlyPrefills:
    """See the module. `describe`: a request that is being computed, under a lease, as its readers will find it."""

    def __init__(
        self,
        groups: tuple[CacheGroup, ...],
        rendezvous: Rendezvous,
        describe: Callable[[Request, Lease], RemotePrefill | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._groups, self._num_groups = [group for group in groups if group.is_append_only], len(groups)
        self._rendezvous, self._describe = rendezvous, describe
        # By request id: its transfer, and those that are computed.
        self._transfers: dict[str, str] = {}
        self._owners: dict[str, str] = {}
        # Transfers that readers find complete.
        self._complete: set[str] = set()
        self._shown: dict[str, _Shown] = {}
        # Of the last prefill that had some steps.
        self._clock, self._seconds_per_token = clock, float("nan")

    def hear(self, request: Request, owner: str) -> None:
        """A request has arrived. `owner`: it, or that of which it is a choice."""
        transfer = transfer_of(request.kv_transfer_params or {})
        if transfer and self._rendezvous.hear(transfer, owner):
            self._transfers[request.request_id] = transfer
            self._owners[request.request_id] = owner

    def schedule(self, request: Request, lease: Lease) -> None:
        """A request that has arrived has got blocks and a lease."""
        transfer = self._transfers.get(request.request_id)
        is_other = transfer in self._complete or any(one.transfer == transfer for one in self._shown.values())
        if transfer is not None and not is_other and request.num_prompt_tokens <= MAX_TOKENS:
            self._shown[request.request_id] = _Shown(request, transfer, lease, int(request.num_prompt_tokens))

    def step(self, num_scheduled: Mapping[str, int], manager: KVCacheManager | None) -> Iterator[Computed]:
        """A step computes so many tokens of each request."""
        if manager is None or not self._shown:
            return
        for request_id in [name for name in self._shown if name in num_scheduled]:
            shown = self._shown[request_id]
            start = min(int(shown.request.num_computed_tokens), shown.num_tokens)
            stop = min(int(shown.request.num_computed_tokens) + num_scheduled[request_id], shown.num_tokens)
            if (shown.has_begun or self._begin(shown)) and stop > start:
                left_s = self._expect(shown, start, stop)
                self._rendezvous.extend(shown.transfer, shown.lease.word, self._new_pages(shown, manager), left_s)
                yield Computed(shown.lease.slot, shown.lease.word, start, stop)

    def preempt(self, request_id: str) -> None:
        """A request has lost its pages."""
        self._shown.pop(request_id, None)

    def complete(self, request_id: str, prefill: RemotePrefill) -> None:
        """A request has ended well. Of several choices it is the one that is kept, whichever was shown."""
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._shown = {name: one for name, one in self._shown.items() if one.transfer != transfer}
            self._complete.add(transfer)
            statement = _state(prefill, is_complete=True)
            self._rendezvous.complete(transfer, self._owners[request_id], statement, prefill.tables())

    def end(self, request_id: str, text: str) -> None:
        """Nothing can be read of a request any more. `text`: why, for people."""
        self._shown.pop(request_id, None)
        transfer, owner = self._transfers.pop(request_id, None), self._owners.pop(request_id, "")
        if transfer is not None and owner not in self._owners.values():
            self._complete.discard(transfer)
            self._rendezvous.end(transfer, owner, text)

    def _begin(self, shown: _Shown) -> bool:
        """Show a prefill. One that may go on beyond its prompt is shown when it has ended: its windows, states and rings go on as well."""
        goes_on = shown.request.max_tokens > 1 and len(self._groups) < self._num_groups
        prefill = None if goes_on else self._describe(shown.request, shown.lease)
        if prefill is None:
            return False
        owner, statement = self._owners[shown.request.request_id], _state(prefill, is_complete=False)
        shown.has_begun = self._rendezvous.begin(shown.transfer, owner, statement)
        return shown.has_begun

    def _expect(self, shown: _Shown, start: int, stop: int) -> float | None:
        """Seconds that a prefill will compute after a step from token `start` to `stop`, as `Answer.left_s`."""
        now_s, (before_s, before) = self._clock(), shown.step
        shown.step, shown.num_steps = (now_s, start), shown.num_steps + 1
        # With asynchronous scheduling the second step of an idle engine is scheduled right behind the first.
        if shown.num_steps > 2 and start > before:
            self._seconds_per_token = (now_s - before_s) / (start - before)
        left_s = (shown.num_tokens - stop) * self._seconds_per_token
        return None if math.isnan(left_s) else left_s

    def _new_pages(self, shown: _Shown, manager: KVCacheManager) -> Mapping[str, list[int]]:
        """Those that the listener does not have, by group. vLLM appends blocks to those that a request has (0.32.0, `SingleTypeKVCacheManager.req_to_blocks`)."""
        new: dict[str, list[int]] = {}
        for group in self._groups:
            held = manager.coordinator.single_type_managers[group.index].req_to_blocks[shown.request.request_id]
            known = shown.num_listed.get(group.name, 0)
            if len(held) > known:
                new[group.name] = [block.block_id for block in held[known:]]
                shown.num_listed[group.name] = len(held)
        return new


def _state(prefill: RemotePrefill, *, is_complete: bool) -> Statement:
    """A prefill as its source's listener states it, without pages."""
    named = (*prefill.remote.name, *prefill.lease)
    return Statement(*named, prefill.num_tokens, {}, is_complete, prefill.details)
