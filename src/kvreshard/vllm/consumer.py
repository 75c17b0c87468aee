"""The decode side in vLLM's scheduler: how many tokens can be loaded, and which order goes to the ranks?

1. A request with `do_remote_prefill` arrives: its parameters are read; the ranks meet its source and renew its lease.
2. vLLM asks how many tokens beyond its own prefix hit can be loaded (`count_loadable`): the longest prefix that is the same
   text, that the source still has whole, and that this engine may resume from: the last token is always computed here.
3. Blocks are allocated: a load goes out, or a release if nothing is to be loaded.
4. It is aborted before its end: a release, or a cancelled load whose blocks stay until nothing moves any more.

What cannot be loaded is computed here, with the reason in the log. Never half of it: a state is loaded at exactly the
position that the source stands at, or nothing is. Nothing is loaded from this very engine: its pages are given back, and what its
prefix cache has of them is a hit. Nor is anything loaded by an engine that only prefills: vLLM frees an aborted request's blocks there
while a step that is under way may still write them (0.32.0, `Scheduler.defer_block_free`), and they might be loaded into.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvreshard.model.tables import PageTable, Tokens
from kvreshard.model.tables import Request as Transfer
from kvreshard.session.orders import Cancel, Load, Order, Release, RemoteEngine, RemoteLease, Unwatch, Watch
from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.groups import NULL_BLOCK, CacheGroup
from kvreshard.vllm.params import ParamsError, RemotePrefill, read_params
from kvreshard.vllm.partial_loads import PartialLoads
from kvreshard.vllm.prompt import count_matching
from kvreshard.vllm.requests import MIN_COMPUTED_TOKENS, read_prompt

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

Source = tuple[RemoteEngine, RemoteLease]
# Further choices of a request come together, retries within minutes.
MAX_SPENT = 10_000


@dataclass(slots=True)
class _Waiting:
    """A request between its arrival and the end of its load. `num_loadable`: tokens from the start, once known."""

    prefill: RemotePrefill
    num_loadable: int | None = None
    num_computed: int = 0
    is_loading: bool = False
    is_aborted: bool = False


class Consumer:
    """`me`: this engine and its incarnation. `num_backoff_tokens`: trailing tokens that it must compute itself. `whole_prompts`: the
    cache of a prefix is only right for one prompt (`requests.needs_whole_prompts`). `note_fallback`: hears why a request is computed
    here although a prefill was offered: 'params', 'itself', 'role', 'spent', 'state', 'window', 'prompt', 'reset', 'standstill' or 'pool'.
    `may_load`: whether the engine's role is one that loads. `partial_loads`: hears of fewer tokens being loaded than were prefilled.
    """

    def __init__(
        self,
        me: tuple[str, str],
        groups: Sequence[CacheGroup],
        num_backoff_tokens: int,
        note_fallback: Callable[[str], None],
        *,
        whole_prompts: bool = False,
        may_load: bool = True,
        adapters: Adapters | None = None,
        partial_loads: PartialLoads | None = None,
    ) -> None:
        self._me, self._may_load = me, may_load
        self._groups = tuple(groups)
        self._adapters = adapters or Adapters()
        self._note_fallback, self._partial_loads = note_fallback, partial_loads
        self._largest_page = max((group.page_tokens or 1 for group in groups), default=1)
        self._has_state = any(group.is_state for group in groups)
        self._num_backoff_tokens, self._whole_prompts = num_backoff_tokens, whole_prompts
        self._waiting: dict[str, _Waiting] = {}
        self._spent: OrderedDict[Source, None] = OrderedDict()

    def arrive(self, request: Request, params: Mapping[str, Any]) -> Iterator[Order]:
        """Read the parameters; a request that cannot use them is computed here."""
        try:
            prefill = read_params(params)
        except ParamsError as error:
            self._note_fallback("params")
            logger.warning("request %s will be computed here: %s", request.request_id, error)
            return
        if (prefill.remote.engine, prefill.remote.incarnation) == self._me:
            self._fall_back(request.request_id, "itself", prefill)
            logger.info("request %s was prefilled here, and goes on here", request.request_id)
            yield Release(prefill.remote, prefill.lease)
            return
        if not self._may_load:
            self._fall_back(request.request_id, "role", prefill)
            logger.warning(
                "request %s will be computed here: a router sent the prefill of engine %s to an engine whose kv_role is kv_producer, which "
                "does not load; send it to a kv_consumer, or make this engine kv_both",
                *(request.request_id, prefill.remote.engine),
            )
            yield Release(prefill.remote, prefill.lease)
            return
        if (prefill.remote, prefill.lease) in self._spent:
            self._fall_back(request.request_id, "spent", prefill)
            logger.info(
                "request %s will be computed here: this engine has given its prefill back before, after it had been loaded, had failed to "
                "load or was not needed",
                request.request_id,
            )
            return
        self._waiting[request.request_id] = _Waiting(prefill)
        yield Watch(request.request_id, prefill.remote, prefill.lease)

    def clean_up(self, params: Mapping[str, Any]) -> Iterator[Order]:
        """Give back the source of a request that never got here, or has ended with an error: vLLM names it once more, to abort it at once."""
        try:
            prefill = read_params(params)
        except ParamsError as error:
            logger.debug("nothing is given back for a request that was turned away: %s", error)
            return
        if (prefill.remote, prefill.lease) not in self._spent:
            yield from self._give_back(prefill)

    def count_loadable(self, request: Request, num_computed: int) -> int:
        """Tokens that can be loaded beyond the `num_computed` that this engine has."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.is_loading:
            return 0
        if waiting.num_loadable is None:
            waiting.num_loadable = self._count(request, waiting.prefill)
        waiting.num_computed = num_computed
        return max(0, waiting.num_loadable - num_computed)

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> Iterator[Order]:
        """Blocks are there: load `num_external` tokens, or let the source go."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.is_loading:
            return
        self._note_what_vllm_takes(request, waiting, num_external)
        if num_external <= 0:
            yield from self._release(request.request_id, waiting)
            return
        waiting.is_loading = True
        prefill = waiting.prefill
        transfer = self._transfer(prefill, blocks, waiting.num_computed + num_external)
        yield Load(request.request_id, prefill.remote, prefill.lease, transfer, gives_back=False)

    def reset(self) -> Iterator[Order]:
        """Whatever waits to be loaded is computed here: other weights may have come."""
        for request_id, waiting in list(self._waiting.items()):
            if not waiting.is_loading:
                self._fall_back(request_id, "reset", waiting.prefill)
                logger.warning("request %s will be computed here: the cache was reset since it came", request_id)
                yield from self._release(request_id, waiting)

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return any(waiting.is_loading for waiting in self._waiting.values())

    @property
    def is_waiting(self) -> bool:
        """Whether requests wait to be loaded, and none is being loaded."""
        return bool(self._waiting) and not self.is_loading

    def give_up_one(self) -> Iterator[Order]:
        """The request that waits longest is computed here (see `standstill`)."""
        request_id, waiting = next(iter(self._waiting.items()))
        self._fall_back(request_id, "standstill", waiting.prefill)
        logger.warning(
            "request %s will be computed here: nothing is computed or loaded while blocks are held for other engines, which may wait "
            "for one another in a circle; its source %s gets its blocks back. Give these engines more blocks or less to prefill",
            request_id,
            waiting.prefill.remote.engine,
        )
        yield from self._release(request_id, waiting)

    def give_up(self, request_id: str) -> Iterator[Order]:
        """A load that this engine's pool never has room for is computed here (see `admission`)."""
        waiting = self._waiting.get(request_id)
        if waiting is not None and not waiting.is_loading:
            self._fall_back(request_id, "pool", waiting.prefill)
            logger.warning(
                "request %s will be computed here: the whole pool is free, and vLLM does not find the blocks to load it, which are more "
                "than to compute it where an engine has drafts; give this engine more blocks",
                request_id,
            )
            yield from self._release(request_id, waiting)

    def abort(self, request_id: str) -> Iterator[Order]:
        """The request has ended, in whatever way."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return
        waiting.is_aborted = True
        if waiting.is_loading:
            yield Cancel(request_id)
        else:
            yield from self._release(request_id, waiting)

    def fail(self, request_id: str) -> bool:
        """A load has failed. Whether its request still wants it: it has not been aborted."""
        waiting = self._waiting.get(request_id)
        if waiting is None or waiting.is_aborted:
            return False
        self._note_partial(request_id, "failure", 0, waiting.prefill)
        return True

    def ended(self, request_id: str) -> Iterator[Order]:
        """The load is over on every rank: its source is given back, unless others here still have it."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            yield from self._give_back(waiting.prefill)

    def incomplete_blocks(self, request_id: str, blocks: KVCacheBlocks) -> Iterator[tuple[CacheGroup, int]]:
        """(group, blocks from the start) that the load leaves without some of their tokens: a window begins inside."""
        waiting = self._waiting.get(request_id)
        if waiting is None or not waiting.is_loading:
            return
        for group in self._groups:
            if group.page_tokens is not None:
                first, _ = group.pages(_ids(blocks, group), 0)
                first_token = _first_token(waiting.prefill, group)
                if first * group.page_tokens < first_token:
                    yield group, -(-first_token // group.page_tokens)

    def _fall_back(self, request_id: str, cause: str, prefill: RemotePrefill) -> None:
        self._note_fallback(cause)
        self._note_partial(request_id, cause, 0, prefill)

    def _note_partial(
        self, request_id: str, cause: str, num_loaded: int, prefill: RemotePrefill, why: str = ""
    ) -> None:
        if self._partial_loads is not None:
            self._partial_loads.note(request_id, cause, max(0, num_loaded), prefill.num_tokens, why)

    def _note_what_vllm_takes(self, request: Request, waiting: _Waiting, num_external: int) -> None:
        """vLLM loads nothing where logprobs of the prompt are asked for, and whole blocks only of a window that it replays.

        Where it loads nothing because of a prefix hit that ends inside of a block, it has said where that block begins only.
        """
        num_loaded, num_loadable = waiting.num_computed + num_external, waiting.num_loadable or 0
        if num_loaded >= num_loadable:
            return
        if request.get_skip_reading_prefix_cache():
            self._note_partial(request.request_id, "logprobs", num_loaded, waiting.prefill)
        elif num_external > 0 or num_loadable - num_loaded > self._largest_page:
            self._note_partial(request.request_id, "vllm", num_loaded, waiting.prefill)

    def _release(self, request_id: str, waiting: _Waiting) -> Iterator[Order]:
        del self._waiting[request_id]
        yield Unwatch(request_id)
        yield from self._give_back(waiting.prefill)

    def _give_back(self, prefill: RemotePrefill) -> Iterator[Order]:
        """When the last request that has a source is over. Only here is it known which have arrived: ranks hear of them a step later."""
        source = prefill.remote, prefill.lease
        if all(source != (other.prefill.remote, other.prefill.lease) for other in self._waiting.values()):
            self._spent[source] = None
            if len(self._spent) > MAX_SPENT:
                self._spent.popitem(last=False)
            yield Release(*source)

    def _count(self, request: Request, prefill: RemotePrefill) -> int:
        """How many leading tokens of the prompt can be loaded; the reason is logged if it is none."""
        name, num_prompt = request.request_id, int(request.num_prompt_tokens)
        mine = read_prompt(request, self._adapters)
        same = count_matching(prefill.prompt, mine)
        limit = num_prompt - max(self._num_backoff_tokens, MIN_COMPUTED_TOKENS)
        count = int(min(same, prefill.num_tokens, limit))
        if self._has_state or prefill.has_state:
            if prefill.num_tokens > limit or same < prefill.num_tokens:
                reason = (
                    f"its source stands at token {prefill.num_tokens}, the prompts agree on {same} tokens, and this engine "
                    f"must resume at token {limit} or before: a state cannot be taken back"
                )
                self._fall_back(name, "state", prefill)
                logger.warning("request %s will be computed here: %s", name, reason)
                return 0
            return prefill.num_tokens
        if self._whole_prompts and not same == prefill.num_tokens == num_prompt:
            self._fall_back(name, "prompt", prefill)
            logger.warning(
                "request %s will be computed here: its prompt of %d tokens is not the source's of %d, and this model's tokens look at "
                "those behind them too",
                name, num_prompt, prefill.num_tokens,
            )  # fmt: skip
            return 0
        missing = self._find_missing(prefill, count)
        if missing:
            self._fall_back(name, "window", prefill)
            logger.warning("request %s will be computed here: of its first %d tokens %s", name, count, missing)
            return 0
        if not same:
            self._note_fallback("prompt")
        adapter = f" with adapter {mine.adapter}" if mine.adapter else ""
        if num_prompt < prefill.num_tokens and num_prompt - same < prefill.prompt.step:  # as far as digests tell
            why = f"the prompt here has {num_prompt} tokens; ask a prefill engine for one token only"
            self._note_partial(name, "length", count, prefill, why)
        elif count < min(prefill.num_tokens, limit):
            why = f"the prompts{adapter} agree on {same} of {num_prompt} tokens"
            self._note_partial(name, "prompt", count, prefill, why)
        return max(0, count)

    def _find_missing(self, prefill: RemotePrefill, num_tokens: int) -> str:
        """What the source no longer has of what this engine needs; empty if nothing."""
        for group in self._groups:
            if group.ring_tokens is not None:
                if _is_entry_gone(prefill, group.ring_tokens, num_tokens):
                    return f"the ring of group {group.name} is not complete any more: its source went on to token {prefill.num_tokens}"
                continue
            needed, first = group.first_needed(num_tokens), _first_token(prefill, group)
            if needed < num_tokens and first > needed:
                return f"group {group.name} needs token {needed}, and its source begins at token {first}"
        mine = {group.reach for group in self._groups}
        for theirs in prefill.groups:
            first = theirs.first_held
            if (theirs.window_tokens, theirs.chunk_tokens) not in mine and first > 0:
                return (
                    f"this engine keeps all where its source keeps a window of {theirs.window_tokens or theirs.chunk_tokens} "
                    f"tokens (group {theirs.name} begins at token {first}); enable the hybrid KV cache manager on both sides"
                )
        return ""

    def _transfer(self, prefill: RemotePrefill, blocks: KVCacheBlocks, num_tokens: int) -> Transfer:
        tables: dict[str, PageTable] = {}
        intervals: dict[str, list[Tokens]] = {}
        new_pages: dict[str, np.ndarray[Any, np.dtype[np.int64]]] = {}
        for group in self._groups:
            ids = _ids(blocks, group)
            first, pages = group.pages(ids, num_tokens)
            held = set(pages)  # without the blocks behind a state that its drafts step into
            fresh = [
                block.block_id
                for block in blocks.blocks[group.index]
                if block.block_hash is None and not block.is_null and block.block_id in held
            ]
            start = max(self._first_missing(group, blocks, first, num_tokens), _first_token(prefill, group))
            tables[group.name] = PageTable(list(pages), num_tokens, first)
            intervals[group.name] = [(start, num_tokens)] if start < num_tokens else []
            new_pages[group.name] = np.array(fresh, dtype=np.int64)
        return Transfer(prefill.tables(), tables, intervals, new_pages)

    @staticmethod
    def _first_missing(group: CacheGroup, blocks: KVCacheBlocks, first: int, num_tokens: int) -> int:
        """The first token that the group does not have here, and has room for: its blocks with a hash are prefix hits."""
        if group.page_tokens is None:
            return 0 if group.ring_tokens is None else max(0, num_tokens - group.ring_tokens)
        held = blocks.blocks[group.index]
        fresh = next((i for i, b in enumerate(held) if b.block_hash is None and not b.is_null), len(held))
        return max(first, fresh) * group.page_tokens


def _is_entry_gone(prefill: RemotePrefill, ring_tokens: int, num_tokens: int) -> bool:
    """Whether the source may have lost tokens of the entry that is not complete after `num_tokens` tokens.

    A ring holds one compressed entry or several whole ones (vLLM 0.32.0, `CircularBufferSpec`), of a size that a scheduler is not told: it
    divides the rings of both sides. A prefill leaves the tokens of one entry at its end, however many the ring has room for.
    """
    rings = [group.ring_tokens for group in prefill.groups if group.ring_tokens is not None]
    if not rings:
        return num_tokens % ring_tokens > 0
    largest = math.gcd(ring_tokens, *rings)
    return any(
        num_tokens % size and num_tokens // size * size < prefill.num_tokens - size
        for size in range(1, largest + 1)
        if largest % size == 0
    )


def _first_token(prefill: RemotePrefill, group: CacheGroup) -> int:
    """The first token that the source still has in every group of layers that look back as far as this one's, or in every ring."""
    if group.ring_tokens is not None:
        return max(0, prefill.num_tokens - _shortest_ring(prefill))
    return max(
        (
            theirs.first_held
            for theirs in prefill.groups
            if theirs.page_tokens is not None and (theirs.window_tokens, theirs.chunk_tokens) == group.reach
        ),
        default=0,
    )


def _shortest_ring(prefill: RemotePrefill) -> int:
    """Tokens that all rings of the source hold; 0 if it says of none."""
    return min((group.ring_tokens for group in prefill.groups if group.ring_tokens is not None), default=0)


def _ids(blocks: KVCacheBlocks, group: CacheGroup) -> list[int]:
    return [NULL_BLOCK if block.is_null else block.block_id for block in blocks.blocks[group.index]]
