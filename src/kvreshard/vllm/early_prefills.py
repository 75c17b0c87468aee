"""The prefills of one engine that readers may follow: what its scheduler tells the listener and the ranks of them.

A router gives both engines a `transfer_id` and does not wait for the prefill.

1. The request arrives: the listener has heard of it.
2. It is scheduled for the first time, under a lease: the listener gets a statement of its prompt and of what will be loaded.
3. Each step that computes it: the listener gets its new pages, the ranks the tokens before and after the step (`StepProgress`). What is final
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
from kvreshard.session.progress import MAX_TOKENS, StepProgress
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.statement import Statement
from kvreshard.vllm.groups import CacheGroup
from kvreshard.vllm.leases import owner_of
from kvreshard.vllm.params import RemotePrefill, transfer_of

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Prefill:
    """A request with a `transfer_id`. `owner`: it, or that of which it is a choice. `lease`: under which readers may follow it, if they may.

    `is_complete`: readers find its prefill complete, whichever choice that was. Under its lease: `num_tokens`: of its prompt; `num_listed`: pages
    of each group that the listener has; `step`: when its last step was scheduled, and from which token on; `num_steps`: how many there were.
    """

    request: Request
    transfer: str
    owner: str
    lease: Lease | None = None
    num_tokens: int = 0
    is_complete: bool = False
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
        self._prefills: dict[str, _Prefill] = {}
        # Of the last prefill that had some steps.
        self._clock, self._seconds_per_token = clock, float("nan")

    def on_arrival(self, request: Request) -> None:
        """A request has arrived."""
        transfer, owner = transfer_of(request.kv_transfer_params or {}), owner_of(request.request_id)
        if transfer and self._rendezvous.register(transfer, owner):
            self._prefills[request.request_id] = _Prefill(request, transfer, owner)

    def schedule(self, request: Request, lease: Lease) -> None:
        """A request that has arrived has got blocks and a lease."""
        prefill, num_tokens = self._prefills.get(request.request_id), int(request.num_prompt_tokens)
        if prefill is None or num_tokens > MAX_TOKENS:
            return
        if not any(one.lease or one.is_complete for one in self._choices(prefill.owner)):
            self._prefills[request.request_id] = _Prefill(request, prefill.transfer, prefill.owner, lease, num_tokens)

    def step(self, num_scheduled: Mapping[str, int], manager: KVCacheManager | None) -> Iterator[StepProgress]:
        """A step computes so many tokens of each request."""
        for request_id in num_scheduled if self._prefills else ():
            prefill = self._prefills.get(request_id)
            if manager is None or prefill is None or prefill.lease is None:
                continue
            num_computed = int(prefill.request.num_computed_tokens)
            start = min(num_computed, prefill.num_tokens)
            stop = min(num_computed + num_scheduled[request_id], prefill.num_tokens)
            if (prefill.has_begun or self._begin(prefill, prefill.lease)) and stop > start:
                left_s, word = self._expect(prefill, start, stop), prefill.lease.word
                self._rendezvous.extend(prefill.transfer, word, self._new_pages(prefill, manager), left_s)
                yield StepProgress(prefill.lease.slot, word, start, stop)

    def preempt(self, request_id: str) -> None:
        """A request has lost its pages."""
        if request_id in self._prefills:
            self._prefills[request_id].lease = None

    def complete(self, request_id: str, found: RemotePrefill) -> None:
        """A request has ended well. Of several choices it is the one that is kept, whichever was shown."""
        prefill = self._prefills.get(request_id)
        if prefill is not None:
            for one in self._choices(prefill.owner):
                one.lease, one.is_complete = None, True
            statement = _state(found, is_complete=True)
            self._rendezvous.complete(prefill.transfer, prefill.owner, statement, found.tables())

    def end(self, request_id: str, text: str) -> None:
        """Nothing can be read of a request any more. `text`: why, for people."""
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None and not self._choices(prefill.owner):
            self._rendezvous.end(prefill.transfer, prefill.owner, text)

    def _choices(self, owner: str) -> list[_Prefill]:
        return [one for one in self._prefills.values() if one.owner == owner]

    def _begin(self, prefill: _Prefill, lease: Lease) -> bool:
        """Show a prefill. One that may go on beyond its prompt is shown when it has ended: its windows, states and rings go on as well."""
        goes_on = prefill.request.max_tokens > 1 and len(self._groups) < self._num_groups
        found = None if goes_on else self._describe(prefill.request, lease)
        if found is not None:
            statement = _state(found, is_complete=False)
            prefill.has_begun = self._rendezvous.begin(prefill.transfer, prefill.owner, statement)
        return prefill.has_begun

    def _expect(self, prefill: _Prefill, start: int, stop: int) -> float | None:
        """Seconds that a prefill will compute after a step from token `start` to `stop`, as `Answer.left_s`."""
        now_s, (before_s, before) = self._clock(), prefill.step
        prefill.step, prefill.num_steps = (now_s, start), prefill.num_steps + 1
        # With asynchronous scheduling the second step of an idle engine is scheduled right behind the first.
        if prefill.num_steps > 2 and start > before:
            self._seconds_per_token = (now_s - before_s) / (start - before)
        left_s = (prefill.num_tokens - stop) * self._seconds_per_token
        return None if math.isnan(left_s) else left_s

    def _new_pages(self, prefill: _Prefill, manager: KVCacheManager) -> Mapping[str, list[int]]:
        """Those that the listener does not have, by group. vLLM appends blocks to those that a request has (0.32.0,
        `SingleTypeKVCacheManager.req_to_blocks`).
        """
        new: dict[str, list[int]] = {}
        for group in self._groups:
            held = manager.coordinator.single_type_managers[group.index].req_to_blocks[prefill.request.request_id]
            known = prefill.num_listed.get(group.name, 0)
            if len(held) > known:
                new[group.name] = [block.block_id for block in held[known:]]
                prefill.num_listed[group.name] = len(held)
        return new


def _state(prefill: RemotePrefill, *, is_complete: bool) -> Statement:
    """A prefill as its source's listener states it, without pages."""
    named = (*prefill.remote.name, *prefill.lease)
    return Statement(*named, prefill.num_tokens, {}, is_complete, prefill.details)
