"""The publishing side in vLLM's scheduler: which requests take a lease, and what the router gets for them.

Prefills are published for decode engines:

1. A request with `do_remote_decode` arrives: the last tokens, which the decode side must compute itself, are dropped.
2. It gets blocks for the first time: it takes a lease, and every rank writes the lease word.
3. It finishes: its blocks stay under the lease, with those that the decode side's first token attends to (`last_pages`), and the router
   gets `kv_transfer_params`. If another choice of the same request is published already, its parameters are used and these blocks are freed.
4. Every rank reports that the lease is over: vLLM frees the blocks, the slot is free.
5. vLLM's caches are reset, connector included: all leases are revoked, since they hold the cache of the old weights.

A request that is aborted or finds no free slot is freed at once, and the decode side computes the prompt. The same goes for one whose state
or ring has gone beyond its tokens in a step that is still under way, or whose state lies among those of its drafts, or whose parameters
would be larger than `params.MAX_BYTES`.

With `bidirectional_kv_xfer` a decode engine publishes answers too, prompt and generated tokens, for the prefill of the next turn (docs/design/0064).
They take a lease in step 2 like prefills and are kept for a time of their own. When the engine is short of blocks, the oldest ones are
withdrawn (`withdraw_oldest_answer`).
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from vllm.v1.request import RequestStatus

from kvreshard.model.logs import Repeats, fields, get_logger
from kvreshard.model.tables import PageTable
from kvreshard.session.commands import Acquire, Command, Publish, RemoteEngine, Revoke
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.seal import instance_id_of, prompt_key
from kvreshard.vllm.early_prefills import EarlyPrefills
from kvreshard.vllm.groups import NULL_BLOCK, CacheGroup
from kvreshard.vllm.last_pages import LastPages
from kvreshard.vllm.leases import Leases, is_choice
from kvreshard.vllm.page_list import page_array, write_pages
from kvreshard.vllm.params import GroupParams, ParamsError, RemotePrefill, write_params
from kvreshard.vllm.prompt import digest_prompt
from kvreshard.vllm.requests import MIN_COMPUTED_TOKENS, EngineConfig, count_settled, read_prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)

TRUNCATED = "_p_side_truncated"

# Cause for which a request is not published -> why.
UNPUBLISHED = {
    "answer": (
        "its answer is not published for the next turn, since the next step or a draft has taken its state or ring further; decode engines of "
        "such models publish every answer with --no-async-scheduling and without speculation"
    ),
    "prefill": (
        "its cache is not published, since a step behind its prompt has taken its state or ring further, and the decode engine computes it; "
        "a router asks for a prefill with max_tokens=1"
    ),
    "pages": "its cache is not published, since vLLM has freed pages between those that a reader needs; the next engine computes it",
}


class Producer:
    """The publishing side of one engine, which seals with `key`. `address`: where it listens, once it does.

    `lease_s`, `answer_lease_s`: how long prefills and answers are kept; None: answers are not published.
    """

    def __init__(
        self,
        engine: str,
        key: bytes,
        config: EngineConfig,
        lease_s: float,
        num_slots: int,
        answer_lease_s: float | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self._engine, self._key, self._config, self._lease_s = engine, key, config, lease_s
        self._answer_lease_s = answer_lease_s
        self.leases = Leases(num_slots)
        # Answers that prefill engines may read, in the order in which they were published.
        self.answers: dict[str, None] = {}
        self._logged_causes: set[str] = set()
        self.last_pages = LastPages(config.groups)
        self._holds_last_pages = config.num_backoff_tokens < MIN_COMPUTED_TOKENS
        self.address: Address | None = None
        self.early = EarlyPrefills(config.groups, rendezvous or Rendezvous(key), self._describe_early)
        self._has_logged_size = False
        self.repeats = Repeats(logger)

    def may_finish(self, num_scheduled: Mapping[str, int]) -> bool:
        """Whether a request that may be published can end with this step, which computes `num_scheduled` tokens of each."""
        for name, num_tokens in num_scheduled.items():
            leased = self.leases.find(name)
            request = None if leased is None else leased.computing
            if request is not None and request.num_computed_tokens + num_tokens >= request.num_prompt_tokens:
                return True
        return False

    def begin_instance(self, key: bytes) -> Iterator[Command]:
        """Seal with another key, and take the leases again of what is being computed: the ranks have forgotten them."""
        self._key = key
        yield from map(Acquire, self.leases.unpublished)

    def arrive(self, request: Request) -> None:
        """Drop the trailing tokens, once: a preempted request arrives again. From now on readers may ask for its `transfer_id`."""
        self._drop_last_tokens(request)
        self.early.on_arrival(request)

    def _drop_last_tokens(self, request: Request) -> None:
        backoff, params = self._config.num_backoff_tokens, request.kv_transfer_params
        if (
            not backoff
            or params is None
            or params.get(TRUNCATED)
            or request.num_prompt_tokens <= backoff
            or request.get_skip_reading_prefix_cache()  # the decode side computes such a prompt anyway
            or request.resumable  # more is to follow these tokens (`StreamingInput`)
            or request.prompt_token_ids is None
            or request.prompt_embeds
            is not None  # vLLM ends where their number differs (`length_from_prompt_token_ids_or_embeds`)
        ):
            return
        request.prompt_token_ids = request.prompt_token_ids[:-backoff]  # choices of one request may share the list
        del request._all_token_ids[-backoff:]
        request.num_prompt_tokens -= backoff
        request.max_tokens = 1
        params[TRUNCATED] = True

    def schedule(self, request: Request) -> Iterator[Command]:
        """The request has got blocks: take a lease, unless it has one or nothing of it is to be published."""
        is_prefill = _is_prefill(request)
        # With which of several choices the conversation goes on is not known.
        is_answer = (
            self._answer_lease_s is not None and request.kv_transfer_params and not is_choice(request.request_id)
        )
        if not (is_prefill or is_answer) or self.leases.find(request.request_id) is not None:
            return
        leased = self.leases.acquire(request.request_id)
        if leased is None:
            self.repeats.log(
                logging.WARNING,
                "lease_slots_full",
                "no lease slot is free: request %s is not published, and the decode engine computes it; raise lease_slots",
                request.request_id,
                extra=fields("lease_slots_full", request_id=request.request_id),
            )
            return
        if is_prefill:
            if self._holds_last_pages:
                self.last_pages.expect(request.request_id, request.num_prompt_tokens)
            leased.computing = request
            self.early.schedule(request, leased.lease)
        yield Acquire(leased.lease)

    def preempt(self, request_ids: Iterable[str], num_scheduled: Container[str] = ()) -> Iterator[Command]:
        """Requests have lost their blocks: their leases end before this step overwrites them.

        Each takes another when it gets blocks again. Those in `num_scheduled` have got them in this very step, as after a reset of vLLM's
        caches; the former lease was still there when they did.
        """
        for request_id in request_ids:
            leased = self.leases.find(request_id)
            if leased is not None:
                self.early.preempt(request_id)
                self.last_pages.release(request_id)
                self.leases.release(request_id)
                yield Revoke(leased.lease)
                if request_id in num_scheduled and leased.computing is not None:
                    yield from self.schedule(leased.computing)

    def note_first(self, request_id: str, group: CacheGroup, token: int) -> None:
        """What was loaded of this group begins inside a block. A request that is computed after all may publish less than it has."""
        leased = self.leases.find(request_id)
        if leased is not None:
            leased.first_loaded[group.name] = token

    def finish(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[dict[str, Any] | None, Command | None]:
        """(parameters for the router, command for the ranks). The blocks stay with `Publish`; otherwise they can be freed at once."""
        leased = self.leases.find(request.request_id)
        if leased is None:
            self.early.end(request.request_id, "it has ended before it was computed, or no lease slot was free")
            return None, None
        lease = leased.lease
        is_answer = not _is_prefill(request)
        good = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        num_tokens = count_settled(request) - (self._config.num_draft_tokens if is_answer else 0)
        is_beyond = good and self._is_beyond(request, num_tokens)
        if is_beyond:
            self._log_unpublished(request.request_id, "answer" if is_answer else "prefill")
        if not good or num_tokens < 1 or is_beyond:
            self.freed(request.request_id)
            return None, Revoke(lease)
        prompt = read_prompt(request, self._config)
        params = self.leases.find_shared(request.request_id, prompt, num_tokens)
        if params is not None:
            self.freed(request.request_id)
            return params, Revoke(lease)
        block_ids = self.last_pages.restore(request.request_id, block_ids)
        prefill = self.describe(request, block_ids, num_tokens, lease)
        if prefill is None or (params := self.write(prefill, is_answer=is_answer)) is None:
            self.freed(request.request_id)
            return None, Revoke(lease)
        tables = prefill.tables()
        num_blocks = sum(len(table.pages) for table in tables.values())
        self.leases.publish(request.request_id, prompt, num_tokens, params, num_blocks)
        self.early.complete(request.request_id, prefill)
        lease_s = self._lease_s
        if is_answer and self._answer_lease_s is not None:
            self.answers[request.request_id] = None
            lease_s = self._answer_lease_s
        return params, Publish(lease.request, lease_s, tables)

    def withdraw_oldest_answer(self) -> Iterator[Command]:
        """Give the blocks of the answer back that has been held longest. Who is reading it fails, and computes the prompt."""
        if self.answers:
            request_id = next(iter(self.answers))
            self.repeats.log(
                logging.INFO,
                "answer_withdrawn",
                "request %s: its answer is no longer held for the next turn, since blocks are short",
                request_id,
                extra=fields("answer_withdrawn", request_id=request_id),
            )
            yield from self._withdraw(request_id)

    def _is_beyond(self, request: Request, num_tokens: int) -> bool:
        """Whether a state is not the one after `num_tokens` tokens, or not in its block, or a ring lacks the first of them.

        Both are written in place. The first generated token needs no step of its own; a later one may have been verified with drafts.
        """
        states = [group for group in self._config.groups if group.is_state]
        in_place = states or any(group.ring_tokens is not None for group in self._config.groups)
        has_gone_on = bool(in_place) and num_tokens < request.num_computed_tokens
        return has_gone_on or (request.num_output_tokens > 1 and any(group.num_draft_states for group in states))

    def _log_unpublished(self, request_id: str, cause: str) -> None:
        """Log once per cause why requests like this one are not published."""
        if cause not in self._logged_causes:
            self._logged_causes.add(cause)
            logger.warning(
                "request %s: %s",
                request_id,
                UNPUBLISHED[cause],
                extra=fields("not_published", request_id=request_id, cause=cause),
            )

    def describe(
        self, request: Request, block_ids: Sequence[Sequence[int]], num_tokens: int, lease: Lease
    ) -> RemotePrefill | None:
        """The first `num_tokens` tokens of a finished request, as a reader needs them; None as long as this engine does not listen, or where
        vLLM has freed pages between others, as R-SWA does.
        """
        pages = [group.pages(block_ids[group.index], num_tokens) for group in self._config.groups]
        if any(NULL_BLOCK in ids for _, ids in pages):
            self._log_unpublished(request.request_id, "pages")
            return None
        return self._describe(request, pages, num_tokens, lease)

    def _describe_early(self, request: Request, lease: Lease) -> RemotePrefill | None:
        """A prefill that is being computed, without pages: what readers will find of its whole prompt."""
        num_tokens, none = int(request.num_prompt_tokens), tuple[int, ...]()
        # Of windows what is there in any case when it ends: what the next token attends to, and what is held of the last (`last_pages`).
        last = num_tokens - int(self._holds_last_pages)
        needed = [group.first_needed(last) for group in self._config.groups]
        pages = [
            (token // group.page_tokens if group.page_tokens else 0, none)
            for group, token in zip(self._config.groups, needed, strict=True)
        ]
        return self._describe(request, pages, num_tokens, lease, needed)

    def _describe(
        self,
        request: Request,
        pages: Sequence[tuple[int, tuple[int, ...]]],
        num_tokens: int,
        lease: Lease,
        needed: Sequence[int] | None = None,
    ) -> RemotePrefill | None:
        """`pages`: first page and page ids of each group. `needed`: of each, the first token that is promised, where that is not all of them."""
        if self.address is None:
            return None
        promised = needed or [0] * len(pages)
        tables = {
            group.name: PageTable(page_array(ids), num_tokens, first)
            for group, (first, ids) in zip(self._config.groups, pages, strict=True)
        }
        leased = self.leases.find(request.request_id)
        first_loaded = {} if leased is None else leased.first_loaded
        key = prompt_key(self._key, lease.request, lease.word)
        return RemotePrefill(
            RemoteEngine(self._engine, instance_id_of(self._key), self.address),
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
                    max(
                        group.first_written(num_tokens),
                        first_loaded.get(group.name, 0),
                        token if group.page_tokens else 0,
                    )
                    or UNSET,
                )
                for group, (first, _), token in zip(self._config.groups, pages, promised, strict=True)
            ),
            {name: write_pages(table.pages) for name, table in tables.items() if len(table.pages)},
            digest_prompt(read_prompt(request, self._config), num_tokens, key),
            made_of=tables,
        )

    def write(self, prefill: RemotePrefill, *, is_answer: bool = False) -> dict[str, Any] | None:
        """The parameters for the router; None where they would be too large, which the log says of the first such prefill."""
        try:
            return write_params(prefill, self._config.sizes, self._key, is_answer=is_answer)
        except ParamsError as error:
            level = logging.DEBUG if self._has_logged_size else logging.WARNING
            self._has_logged_size = True
            logger.log(
                level,
                "request %s of %d tokens is not published, and so are others of this size: %s; the decode engine computes such prompts. "
                "Larger pages help (--block-size)",
                *(prefill.lease.request, prefill.num_tokens, error),
                extra=fields("params_too_large", request_id=prefill.lease.request),
            )
            return None

    def reset(self) -> Iterator[Command]:
        """Revoke all leases that may be read: the engine may have got other weights."""
        published = self.leases.published
        if published:
            logger.warning(
                "the cache was reset; %d requests are no longer published",
                len(published),
                extra=fields("cache_reset", count=len(published)),
            )
        for request_id in published:
            yield from self._withdraw(request_id)

    def freed(self, request_id: str) -> None:
        """Every rank has ended the lease, or none has one."""
        self.early.end(request_id, "no rank holds its pages")
        self.last_pages.release(request_id)
        self.answers.pop(request_id, None)
        self.leases.release(request_id)

    def _withdraw(self, request_id: str) -> Iterator[Command]:
        self.leases.withdraw(request_id)
        self.answers.pop(request_id, None)
        leased = self.leases.find(request_id)
        if leased is not None:
            yield Revoke(leased.lease)


def _is_prefill(request: Request) -> bool:
    """Whether a router asked for a prefill, and not for an answer."""
    return bool((request.kv_transfer_params or {}).get("do_remote_decode"))
