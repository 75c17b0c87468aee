"""The decode side in vLLM's scheduler: how many tokens can be loaded, and which command goes to the ranks?

1. A request with `do_remote_prefill` arrives: its parameters are read; the ranks meet its source and renew its lease.
2. vLLM asks how many tokens beyond its own prefix hit can be loaded (`count_loadable`): the longest prefix that is the same
   text, that the source still has whole, and that this engine may resume from: the last token is always computed here. Texts are
   compared under the source's key, which the ranks have when they have met it (`meet`). Until then the request waits without blocks.
   If the source cannot be met, a load is ordered that must fail, so that the engine's policy decides. Pictures, audio, video and salts are
   compared under the same key, before vLLM next looks for prefix hits.
3. Blocks are allocated: a load goes out, or a release if nothing is to be loaded.
4. It is aborted before its end: a release, or a cancelled load whose blocks stay until nothing moves any more.

What cannot be loaded is computed here, with the reason in the log. Pictures, audio and video that are not here cannot be computed: what
the prefill has of them is loaded to the last token, or the request is refused (`missing_items`). Never half of it: a state is loaded at exactly the
position that the source stands at, or nothing is. Nothing is loaded from this very engine: its pages are given back, and what its
prefix cache has of them is a hit. Nor is anything loaded by an engine that only prefills: vLLM frees an aborted request's blocks there
while a step that is under way may still write them (0.32.0, `Scheduler.defer_block_free`), and they might be loaded into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvreshard.model.logs import get_logger
from kvreshard.session.commands import Cancel, Command, Failure, Load, Release, Renew, StopRenewing
from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.first_tokens import first_token
from kvreshard.vllm.groups import CacheGroup
from kvreshard.vllm.items import Positions
from kvreshard.vllm.known_sources import KnownSources, Source
from kvreshard.vllm.loadable import LoadableTokens
from kvreshard.vllm.missing_items import MissingItems
from kvreshard.vllm.params import ParamsError, RemotePrefill, read_params
from kvreshard.vllm.partial_loads import PartialLoads
from kvreshard.vllm.source_hosts import SourceHosts
from kvreshard.vllm.transfers import make_transfer, read_block_ids

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = get_logger(__name__)


@dataclass(slots=True)
class _Waiting:
    """A request between its arrival and the end of its load. `key`: its source's, once that is met; `unmet`: why it could not be.
    `num_loadable`: tokens from the start, once known; `refusal`: why they must not be read all the same.
    """

    request: Request
    prefill: RemotePrefill
    key: bytes | None = None
    unmet: Failure | None = None
    num_loadable: int | None = None
    refusal: Failure | None = None
    num_computed: int = 0
    is_loading: bool = False
    is_aborted: bool = False

    @property
    def is_unmet(self) -> bool:
        """Whether the source could not be met and nothing was read. Ranks may differ: one that has met it may have loaded its part."""
        return self.refusal is not None or (self.key is None and self.unmet is not None)


class Consumer:
    """`me`: this engine and its instance id; `own_key`: its key, where it has one. `num_backoff_tokens`, `whole_prompts`, `positions`: see `LoadableTokens`. `note_fallback`: hears why a request is computed
    here although a prefill was offered: 'params', 'itself', 'role', 'spent', 'state', 'window', 'prompt', 'reset', 'host', 'deadlock' or
    'pool'. `may_load`: whether the engine's role is one that loads. `partial_loads`: hears of fewer tokens being loaded than were prefilled.
    `compares`: prompts are compared; otherwise what is as long counts as equal. `placeholders`: token ids that stand for pictures, audio or video.
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
        compares: bool = True,
        own_key: bytes | None = None,
        hosts: SourceHosts | None = None,
        positions: Positions = Positions.PLAIN,
        placeholders: frozenset[int] = frozenset(),
    ) -> None:
        self._me, self._may_load, self._compares = me, may_load, compares
        self._hosts = hosts or SourceHosts()
        self._known = KnownSources(own_key)
        self._groups = tuple(groups)
        self.missing_items = MissingItems(positions, placeholders)
        self._loadable = LoadableTokens(
            groups, num_backoff_tokens, whole_prompts, adapters or Adapters(), positions, self.missing_items
        )
        self._note_fallback, self._partial_loads = note_fallback, partial_loads
        self._largest_page = max((group.page_tokens or 1 for group in groups), default=1)
        self._waiting: dict[str, _Waiting] = {}
        # Of the same requests: those whose load is under way, and those of each source.
        self._loading: set[str] = set()
        self._of_source: dict[Source, set[str]] = {}

    def arrive(self, request: Request, params: Mapping[str, Any]) -> Iterator[Command]:
        """Read the parameters; a request that cannot use them is computed here."""
        try:
            prefill = read_params(params)
        except ParamsError as error:
            self._note_fallback("params")
            self.missing_items.arrive_unknown(request, str(error))
            logger.warning("request %s will be computed here: %s", request.request_id, error)
            return
        key = self._known.key_of(prefill.remote)
        if key is not None:
            self._compare_items(request, prefill, key)
        if (prefill.remote.engine, prefill.remote.instance_id) == self._me:
            self._fall_back(request, "itself", prefill, key)
            logger.info("request %s was prefilled here, and goes on here", request.request_id)
            yield Release(prefill.remote, prefill.lease)
            return
        if not self._hosts.allows(prefill.remote.address.host):
            self._fall_back(request, "host", prefill, key)
            logger.warning(
                "request %s will be computed here: it names %s as its source, which is not among source_hosts; nobody is asked there",
                *(request.request_id, prefill.remote.address),
            )
            return
        if not self._may_load:
            self._fall_back(request, "role", prefill, key)
            logger.warning(
                "request %s will be computed here: a router sent the prefill of engine %s to an engine whose kv_role is kv_producer, which "
                "does not load; send it to a kv_consumer, or make this engine kv_both",
                *(request.request_id, prefill.remote.engine),
            )
            yield Release(prefill.remote, prefill.lease)
            return
        if self._known.is_spent((prefill.remote, prefill.lease)):
            self._fall_back(request, "spent", prefill, key)
            logger.info(
                "request %s will be computed here: this engine has given its prefill back before, after it had been loaded, had failed to "
                "load or was not needed",
                request.request_id,
            )
            return
        if self.missing_items.is_hopeless(request.request_id):
            yield Release(prefill.remote, prefill.lease)
            return
        self._forget(request.request_id)
        self._waiting[request.request_id] = _Waiting(request, prefill, key)
        self._of_source.setdefault((prefill.remote, prefill.lease), set()).add(request.request_id)
        yield Renew(request.request_id, prefill.remote, prefill.lease, asks_key=self._compares and key is None)

    def meet(self, keys: Mapping[str, bytes], unmet: Mapping[str, Failure]) -> Iterator[Command]:
        """The ranks have met the sources of some requests, whose keys these are, and could not meet those of others.

        Ranks may differ, and say so one after the other. A key that is not the source's, of a former request with the same id, opens nothing.
        """
        for request_id, key in keys.items():
            waiting = self._waiting.get(request_id)
            if waiting is None or waiting.key == key:
                continue
            waiting.key = key
            self._known.keep_key(key)
            if waiting.num_loadable is None:
                self._compare_items(waiting.request, waiting.prefill, key)
                if self.missing_items.is_hopeless(request_id):
                    yield from self._release(request_id, waiting)
        for request_id, failure in unmet.items():
            waiting = self._waiting.get(request_id)
            if waiting is not None:
                if waiting.key is None and waiting.unmet is None:
                    self._compare_items(waiting.request, waiting.prefill, None)
                waiting.unmet = failure

    def clean_up(self, params: Mapping[str, Any]) -> Iterator[Command]:
        """Give back the source of a request that never got here, or has ended with an error: vLLM names it once more, to abort it at once."""
        try:
            prefill = read_params(params)
        except ParamsError as error:
            logger.debug("nothing is given back for a request that was turned away: %s", error)
            return
        if not self._known.is_spent((prefill.remote, prefill.lease)):
            yield from self._give_back(prefill)

    def count_loadable(self, request: Request, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond the `num_computed` that this engine has; None while the source is not met."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.is_loading:
            return 0
        waiting.num_computed = num_computed
        if waiting.num_loadable is None:
            if self._compares and waiting.key is None:
                prompt, limit = waiting.prefill.prompt, self._loadable.limit(request)
                if num_computed >= min(waiting.prefill.num_tokens, limit) and not (prompt.items or prompt.salt):
                    return 0
                if waiting.unmet is None:
                    return None
                waiting.refusal = waiting.unmet
            waiting.num_loadable = self._count(request, waiting)
        return max(0, waiting.num_loadable - num_computed)

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> Iterator[Command]:
        """Blocks are there: load `num_external` tokens, or let the source go."""
        waiting = self._waiting.get(request.request_id)
        if waiting is None or waiting.is_loading:
            return
        self._note_what_vllm_takes(request, waiting, num_external)
        if num_external <= 0:
            yield from self._release(request.request_id, waiting)
            return
        waiting.is_loading = True
        self._loading.add(request.request_id)
        prefill = waiting.prefill
        transfer = make_transfer(self._groups, prefill, blocks, waiting.num_computed + num_external)
        yield Load(
            request.request_id,
            prefill.remote,
            prefill.lease,
            transfer,
            prefill.seal,
            gives_back=False,
            refusal=waiting.refusal,
        )

    def reset(self) -> Iterator[Command]:
        """Whatever waits to be loaded is computed here: other weights may have come."""
        for request_id, waiting in list(self._waiting.items()):
            if not waiting.is_loading:
                self._fall_back(waiting.request, "reset", waiting.prefill, waiting.key)
                logger.warning("request %s will be computed here: the cache was reset since it came", request_id)
                yield from self._release(request_id, waiting)

    @property
    def is_loading(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loading)

    @property
    def is_waiting(self) -> bool:
        """Whether requests wait to be loaded, and none is being loaded."""
        return bool(self._waiting) and not self.is_loading

    def give_up_one(self) -> Iterator[Command]:
        """The request that waits longest is computed here (see `deadlock`)."""
        request_id, waiting = next(iter(self._waiting.items()))
        self._fall_back(waiting.request, "deadlock", waiting.prefill, waiting.key)
        logger.warning(
            "request %s will be computed here: nothing is computed or loaded while blocks are held for other engines, which may wait "
            "for one another in a circle; its source %s gets its blocks back. Give these engines more blocks or less to prefill",
            request_id,
            waiting.prefill.remote.engine,
        )
        yield from self._release(request_id, waiting)

    def give_up(self, request_id: str) -> Iterator[Command]:
        """A load that this engine's pool never has room for is computed here (see `admission`)."""
        waiting = self._waiting.get(request_id)
        if waiting is not None and not waiting.is_loading:
            self._fall_back(waiting.request, "pool", waiting.prefill, waiting.key)
            logger.warning(
                "request %s will be computed here: the whole pool is free, and vLLM does not find the blocks to load it, which are more "
                "than to compute it where an engine has drafts; give this engine more blocks",
                request_id,
            )
            yield from self._release(request_id, waiting)

    def abort(self, request_id: str) -> Iterator[Command]:
        """The request has ended, in whatever way."""
        self.missing_items.end(request_id)
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

    def ended(self, request_id: str) -> Iterator[Command]:
        """The load is over on every rank: its source is given back, unless others here still have it."""
        waiting = self._forget(request_id)
        if waiting is not None:
            yield from self._give_back(waiting.prefill, waiting.is_unmet)

    def incomplete_blocks(self, request_id: str, blocks: KVCacheBlocks) -> Iterator[tuple[CacheGroup, int]]:
        """(group, blocks from the start) that the load leaves without some of their tokens: a window begins inside."""
        waiting = self._waiting.get(request_id)
        if waiting is None or not waiting.is_loading:
            return
        for group in self._groups:
            if group.page_tokens is not None:
                first, _ = group.pages(read_block_ids(blocks, group), 0)
                held = first_token(waiting.prefill, group)
                if first * group.page_tokens < held:
                    yield group, -(-held // group.page_tokens)

    def _forget(self, request_id: str) -> _Waiting | None:
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._loading.discard(request_id)
            source = waiting.prefill.remote, waiting.prefill.lease
            self._of_source[source].discard(request_id)
            if not self._of_source[source]:
                del self._of_source[source]
        return waiting

    def _fall_back(self, request: Request, cause: str, prefill: RemotePrefill, key: bytes | None) -> None:
        self._note_fallback(cause)
        self._note_partial(request.request_id, cause, 0, prefill)
        if key is None:
            self._compare_items(request, prefill, None)

    def _compare_items(self, request: Request, prefill: RemotePrefill, key: bytes | None) -> None:
        """What stands behind the token ids, once the source's key is known, or once it is known that it will not be (None)."""
        if not self._compares or not (prefill.prompt.items or prefill.prompt.salt):
            return
        prompt_key = None if key is None else prefill.prompt_key(key)
        if prompt_key is None:
            self.missing_items.arrive_unasked(request, prefill.prompt)
        else:
            self.missing_items.arrive(request, prefill.prompt, prompt_key)

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

    def _release(self, request_id: str, waiting: _Waiting) -> Iterator[Command]:
        self._forget(request_id)
        yield StopRenewing(request_id)
        yield from self._give_back(waiting.prefill, waiting.is_unmet)

    def _give_back(self, prefill: RemotePrefill, is_unmet: bool = False) -> Iterator[Command]:
        """When the last request that has a source is over. Only here is it known which have arrived: ranks hear of them a step later.

        One that no rank could meet is not asked again for this.
        """
        source = prefill.remote, prefill.lease
        if source not in self._of_source and not is_unmet:
            self._known.spend(source)
            yield Release(*source)

    def _count(self, request: Request, waiting: _Waiting) -> int:
        """How many leading tokens of the prompt can be loaded; the reason is logged if it is not all of them."""
        found, name = self._loadable.count(request, waiting.prefill, waiting.key), request.request_id
        if found.fallback:
            self._note_fallback(found.fallback)
        if found.reason:
            logger.warning("request %s will be computed here: %s", name, found.reason)
        if found.partial:
            self._note_partial(name, found.partial, found.num_tokens, waiting.prefill, found.why)
        return found.num_tokens
