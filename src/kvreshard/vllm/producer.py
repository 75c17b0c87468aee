"""The prefill side in vLLM's scheduler: which requests get a lease, and what does the router get back?

1. A request with `do_remote_decode` arrives: its last tokens are dropped that the decode side must compute itself.
2. It is scheduled for the first time: it gets a lease slot, and every rank writes its word.
3. It finishes: its blocks stay, unless another choice of the same request has left its own (`choices`), with those that the decode side's first token looks at (`last_pages`), every rank keeps the lease, and
   the router gets `kv_transfer_params`.
4. Every rank has said that the lease is over: vLLM frees the blocks, the slot is free again.
5. vLLM's caches are reset, connector included: the leases are revoked, since what they hold is of before (`reset`).

A request that is aborted, or gets no slot, is freed at once and offers nothing; the decode side then computes the prompt. So does one
whose state or ring has gone beyond its tokens, in a step that is still under way, or whose state is somewhere among its drafts'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from vllm.v1.request import RequestStatus

from kvreshard.model.logs import get_logger
from kvreshard.session.commands import Command, Publish, RemoteEngine, RemoteLease, Revoke
from kvreshard.session.handshake_messages import Address
from kvreshard.session.seal import instance_id_of, prompt_key
from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.choices import Choices
from kvreshard.vllm.groups import CacheGroup
from kvreshard.vllm.items import Positions
from kvreshard.vllm.last_pages import LastPages
from kvreshard.vllm.params import GroupParams, RemotePrefill, write_params
from kvreshard.vllm.prompt import digest_prompt
from kvreshard.vllm.requests import MIN_COMPUTED_TOKENS, count_settled, read_prompt
from kvreshard.vllm.slots import Slots

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)

TRUNCATED = "_p_side_truncated"


class Producer:
    """`key`: what the engine seals with. `num_backoff_tokens`: trailing tokens that the decode side must compute (see `requests.count_backoff`)."""

    def __init__(
        self,
        engine: str,
        key: bytes,
        groups: Sequence[CacheGroup],
        sizes: dict[str, int],
        num_backoff_tokens: int,
        lease_s: float,
        num_slots: int,
        adapters: Adapters | None = None,
        positions: Positions = Positions.PLAIN,
    ) -> None:
        self._engine, self._key, self._groups, self._sizes = engine, key, tuple(groups), sizes
        self._num_backoff_tokens, self._lease_s = num_backoff_tokens, lease_s
        self._slots = Slots(num_slots)
        self._adapters, self._positions = adapters or Adapters(), positions
        self._computing: dict[str, Request] = {}
        self._published: set[str] = set()
        self._choices = Choices()
        self.last_pages = LastPages(groups)
        self.address: Address | None = None

    @property
    def is_publishing(self) -> bool:
        """Whether blocks are held, or will be, for other engines."""
        return bool(len(self._slots))

    def may_finish(self, num_scheduled: Mapping[str, int]) -> bool:
        """Whether a request that may be published has a token after a step of so many tokens of each, and so may be over."""
        return any(
            name in self._computing
            and self._computing[name].num_computed_tokens + num_tokens >= self._computing[name].num_prompt_tokens
            for name, num_tokens in num_scheduled.items()
        )

    def arrive(self, request: Request) -> None:
        """Drop the trailing tokens, once: a preempted request arrives in the scheduler again."""
        backoff, params = self._num_backoff_tokens, request.kv_transfer_params
        if (
            not backoff
            or params is None
            or params.get(TRUNCATED)
            or request.num_prompt_tokens <= backoff
            or request.get_skip_reading_prefix_cache()  # the decode side recomputes such a prompt anyway
            or request.prompt_token_ids is None
            or request.prompt_embeds
            is not None  # vLLM ends where they are not as many (0.32.0, `utils/__init__.py:30`)
        ):
            return
        del request.prompt_token_ids[-backoff:]
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1
        params[TRUNCATED] = True

    def schedule(self, request: Request) -> Iterator[Command]:
        """The request has got blocks: write its word, unless it has one."""
        if self._slots.find(request.request_id) is None:
            lease = self._slots.take(request.request_id)
            if lease is None:
                logger.warning("no lease slot is free: request %s will not be published", request.request_id)
            else:
                if self._num_backoff_tokens < MIN_COMPUTED_TOKENS:
                    self.last_pages.expect(request.request_id, request.num_prompt_tokens)
                self._computing[request.request_id] = request
                yield lease

    def finish(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[dict[str, Any] | None, Command | None]:
        """(parameters for the router, command for the ranks). The blocks stay if they are published, else they can be freed at once."""
        self._computing.pop(request.request_id, None)
        lease = self._slots.find(request.request_id)
        if lease is None:
            return None, None
        good = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        num_tokens = count_settled(request)
        if not good or self.address is None or num_tokens < 1 or self._has_moved_on(request, num_tokens):
            self.freed(request.request_id)
            return None, Revoke(lease.request)
        prompt = read_prompt(request, self._adapters, self._positions)
        params = self._choices.find(request.request_id, prompt, num_tokens)
        if params is not None:
            self.freed(request.request_id)
            return params, Revoke(lease.request)
        block_ids = self.last_pages.restore(request.request_id, block_ids)
        prefill = self.describe(request, block_ids, RemoteLease(lease.request, lease.slot, lease.word), self.address)
        params = write_params(prefill, self._sizes, self._key)
        self._published.add(request.request_id)
        self._choices.add(request.request_id, prompt, num_tokens, params)
        return params, Publish(lease.request, self._lease_s, prefill.tables())

    def _has_moved_on(self, request: Request, num_tokens: int) -> bool:
        """Whether a state is not that of `num_tokens` tokens in the block where a prefill leaves it, or a ring has none of the first of them.

        Both are written in place. Of the tokens that a request says, the first needs no step of its own; each further one may have been verified with drafts.
        """
        states = [group for group in self._groups if group.is_state]
        in_place = [group for group in self._groups if group.is_state or group.ring_tokens is not None]
        is_beyond = bool(in_place) and num_tokens < request.num_computed_tokens
        return is_beyond or (request.num_output_tokens > 1 and any(group.num_draft_states for group in states))

    def describe(
        self, request: Request, block_ids: Sequence[Sequence[int]], lease: RemoteLease, address: Address
    ) -> RemotePrefill:
        """What the decode side is told of a finished request."""
        num_tokens = count_settled(request)
        pages = [group.pages(block_ids[group.index], num_tokens) for group in self._groups]
        key = prompt_key(self._key, lease.request, lease.word)
        return RemotePrefill(
            RemoteEngine(self._engine, instance_id_of(self._key), address),
            lease,
            num_tokens,
            tuple(
                GroupParams(
                    group.name,
                    first,
                    group.page_tokens,
                    group.is_state,
                    group.window_tokens,
                    group.chunk_tokens,
                    group.ring_tokens,
                    group.first_written(num_tokens) or UNSET,
                )
                for group, (first, _) in zip(self._groups, pages, strict=True)
            ),
            tuple(ids for _, ids in pages),
            digest_prompt(read_prompt(request, self._adapters, self._positions), num_tokens, key),
        )

    def reset(self) -> Iterator[Command]:
        """What is held for readers is theirs no longer: other weights may have come."""
        if self._published:
            logger.warning("kvreshard: the cache was reset; %d prefills are no longer published", len(self._published))
        for request_id in sorted(self._published):
            self._choices.remove(request_id)
            lease = self._slots.find(request_id)
            if lease is not None:
                yield Revoke(lease.request)
        self._published.clear()

    def find_request(self, lease: str) -> str:
        """The request that has the lease of this name."""
        return self._slots.find_request(lease)

    def freed(self, request_id: str) -> None:
        """Every rank has ended the lease, or none has one."""
        self._published.discard(request_id)
        self._choices.remove(request_id)
        self.last_pages.release(request_id)
        self._slots.give(request_id)
