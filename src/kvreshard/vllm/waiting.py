"""The requests of one engine that have a source elsewhere, from their arrival to the end of their load."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreshard.session.commands import Failure
from kvreshard.vllm.following import Following
from kvreshard.vllm.groups import CacheGroup, blocks_to_load
from kvreshard.vllm.params import RemotePrefill
from kvreshard.vllm.sources import Source

if TYPE_CHECKING:
    from vllm.v1.request import Request

# An early load begins so many times its reading time before the end of its prefill, since both are estimates, and so many seconds: a step of
# the engine and the first progress words come before the first page is read.
LEAD_FACTOR, MIN_LEAD_S = 2.0, 0.5
# Each load counts for twice as much as the one before it.
DECAY = 0.5


@dataclass(slots=True)
class Waiting:
    """A request between its arrival and the end of its load.

    `is_answer`: its source is an answer, and it is prefilled here. `key`: of its source, after the handshake; `unmet`: why that failed.
    `num_loadable`: leading tokens, once known; `refusal`: why they must not be read all the same. `num_blocks`: that it holds, of a load that
    has begun before its prefill had ended.
    """

    request: Request
    prefill: RemotePrefill
    is_answer: bool
    key: bytes | None = None
    unmet: Failure | None = None
    num_loadable: int | None = None
    refusal: Failure | None = None
    num_computed: int = 0
    is_loading: bool = False
    is_aborted: bool = False
    num_blocks: int = 0

    @property
    def is_early(self) -> bool:
        """Whether its prefill is under way, as far as is known here."""
        statement = self.prefill.statement
        return statement is not None and not statement.is_complete

    @property
    def num_missing(self) -> int:
        """Tokens to load, once known."""
        return max(0, (self.num_loadable or 0) - self.num_computed)

    @property
    def is_unmet(self) -> bool:
        """Whether the handshake failed and nothing was read. Ranks may differ: one whose handshake succeeded may have loaded its part."""
        return self.refusal is not None or (self.key is None and self.unmet is not None)


class TransferPace:
    """How long loads take for each token, the last ones foremost."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def note(self, seconds: float, num_tokens: int) -> None:
        """A load took so long on one rank."""
        self._seconds, self._tokens = self._seconds * DECAY + seconds, self._tokens * DECAY + num_tokens

    def lead_s(self, num_tokens: int) -> float:
        """How long before the end of its prefill a load of so many tokens begins; infinite before the first load has ended."""
        return LEAD_FACTOR * num_tokens * self._seconds / self._tokens + MIN_LEAD_S if self._tokens else math.inf


class WaitingRequests:
    """By request id, in the order of arrival.

    Loads that begin before their prefill has ended hold at most `max_early_blocks` together, and begin when `following` says that the end is near.
    """

    def __init__(self, groups: Sequence[CacheGroup], following: Following) -> None:
        self._groups, self._following = groups, following
        self._waiting: dict[str, Waiting] = {}
        # Of the same requests: those whose load is under way, and those of each source.
        self._loading: set[str] = set()
        self._of_source: dict[Source, set[str]] = {}
        self.max_early_blocks, self._num_early_blocks = 0, 0
        self._pace = TransferPace()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._waiting))

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_loading(self) -> int:
        """Requests whose load is under way."""
        return len(self._loading)

    @property
    def num_early(self) -> int:
        """Loads under way that have begun before their prefill had ended."""
        return sum(self._waiting[request_id].is_early for request_id in self._loading)

    def wait_for_prefills(self) -> bool:
        """Whether all of them wait for prefills that are under way, and for nothing else."""
        return all(one.is_early and (one.is_loading or not self.may_begin(one)) for one in self._waiting.values())

    def may_begin(self, waiting: Waiting) -> bool:
        """Whether its load may begin now. One whose prefill is under way may if the prefill is about to end, and if all such loads hold few enough blocks."""
        if not waiting.is_early:
            return True
        wanted = blocks_to_load(self._groups, waiting.prefill.num_tokens)
        if self._num_early_blocks + wanted > self.max_early_blocks:
            return False
        return self._following.is_near(waiting.request.request_id, self._pace.lead_s(waiting.num_missing))

    def note_pace(self, request_id: str, seconds: float) -> None:
        """A rank has loaded its part of a request in so many seconds."""
        waiting = self._waiting.get(request_id)
        if waiting is not None and waiting.num_missing > 0:
            self._pace.note(seconds, waiting.num_missing)

    def get(self, request_id: str) -> Waiting | None:
        """The request, None if it is not here any more."""
        return self._waiting.get(request_id)

    def add(self, request_id: str, waiting: Waiting) -> None:
        """A request has arrived."""
        self.forget(request_id)
        self._waiting[request_id] = waiting
        self._of_source.setdefault(waiting.prefill.source, set()).add(request_id)

    def begin_load(self, request_id: str, num_blocks: int) -> None:
        """Its load begins, into so many blocks."""
        waiting = self._waiting[request_id]
        waiting.is_loading = True
        waiting.num_blocks = num_blocks if waiting.is_early else 0
        self._num_early_blocks += waiting.num_blocks
        self._loading.add(request_id)

    def forget(self, request_id: str) -> Waiting | None:
        """The request is over; what was known of it."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._loading.discard(request_id)
            self._num_early_blocks -= waiting.num_blocks
            self._of_source[waiting.prefill.source].discard(request_id)
            if not self._of_source[waiting.prefill.source]:
                del self._of_source[waiting.prefill.source]
        return waiting

    def has_source(self, source: Source) -> bool:
        """Whether a request here still uses a source."""
        return source in self._of_source

    def find_longest(self) -> str | None:
        """The request that waits longest for its load to begin."""
        return next((name for name, waiting in self._waiting.items() if not waiting.is_loading), None)

    def find_youngest_early(self) -> str | None:
        """Of the loads that wait for their prefills, that of the request that has arrived last."""
        early = [name for name in self._waiting if name in self._loading and self._waiting[name].is_early]
        return next(reversed(early), None)
