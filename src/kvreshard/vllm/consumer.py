"""The loading side in vLLM's scheduler: how many tokens can be loaded, and the commands for the ranks.

1. A request that names a source arrives: its parameters are read. The ranks make a handshake with its source and renew its lease.
2. vLLM asks how many tokens beyond its own prefix hit can be loaded (`count_loadable`, see `loadable`). Prompts are compared under the
   source's key, which the ranks report after the handshake (`meet`). Until then the request waits without blocks. If the handshake fails, a
   load is commanded that must fail, so that the engine's policy decides. Multimodal items and salts are compared under the same key, before
   vLLM next looks for prefix hits.
3. Blocks are allocated: a load is commanded, or a release if nothing is to be loaded.
4. The request is aborted: a release, or a cancelled load, whose blocks stay until its reads have settled.

What cannot be loaded is computed here, with the reason in the log. Multimodal items that are not here cannot be computed: all that the
prefill has of them is loaded, or the request is refused (`missing_items`).

Nothing is loaded from this very engine: its lease is released, and what its prefix cache has of the prompt is a hit.

Most sources are prefills, and this the decode engine. With `bidirectional_kv_xfer` a prefill engine loads answers too: of a request with
`do_remote_decode` that names one, what the decode engine has of the conversation (docs/design/0064). Such an engine has all that it
needs to compute the prompt. An answer whose source cannot be met or has given it up (the ranks read the lease word first), or of which
fewer than `min_answer_tokens` are missing here, is not loaded.

An engine that only prefills loads nothing without that option: vLLM frees the blocks of an aborted request there while a step under way may
still write them (0.32.0 and 0.33.0, `Scheduler.defer_block_free`). With it, loads wait for such steps (`scheduler.DelayedLoads`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvreshard.model.logs import get_logger
from kvreshard.session.commands import Cancel, Command, Failure, Load, Release, RemoteEngine, Renew, StopRenewing
from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.following import Following
from kvreshard.vllm.groups import CacheGroup, count_replayed
from kvreshard.vllm.loadable import LoadableTokens, first_missing, first_token, make_transfer
from kvreshard.vllm.missing_items import MissingItems
from kvreshard.vllm.outcomes import REASONS, OutcomeLog
from kvreshard.vllm.params import ParamsError, RemotePrefill, names_source, read_address, read_params, transfer_of
from kvreshard.vllm.requests import EngineConfig
from kvreshard.vllm.sources import KnownSources, Source, SourceHosts
from kvreshard.vllm.waiting import Waiting, WaitingRequests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = get_logger(__name__)


class Consumer:
    """The loading side of one engine.

    `own_key`: of its own prefills. `hosts`: which sources are allowed. `min_answer_tokens`: how many tokens are worth loading of an answer;
    None: answers are not loaded. `is_shadow`: prompts are not compared, those of equal length count as equal; partial loads are not logged,
    and prefills that are under way not followed.
    """

    def __init__(
        self,
        engine: str,
        own_key: bytes,
        config: EngineConfig,
        log: OutcomeLog,
        *,
        hosts: SourceHosts | None = None,
        min_answer_tokens: int | None = None,
        is_shadow: bool = False,
        following: Following | None = None,
    ) -> None:
        self._config, self._log = config, log
        self._put_off = set[Source]()  # of loads that ended while others used them: ranks renew until a release
        self.following = following or Following(engine, None, wait_s=0.0)
        self._min_answer_tokens = min_answer_tokens
        self._hosts, self._is_shadow = hosts or SourceHosts(), is_shadow
        self.known = KnownSources(engine, own_key)
        self.missing_items = MissingItems(config.positions, config.placeholders, count_replayed(config.groups))
        self.loadable = LoadableTokens(config, self.missing_items)
        self._largest_page = max((group.page_tokens or 1 for group in config.groups), default=1)
        self.waiting = WaitingRequests(config.groups, self.following)

    def arrive(self, request: Request, params: Mapping[str, Any]) -> Iterator[Command]:
        """Read the parameters; a request that cannot use them is computed here."""
        is_answer, transfer = bool(params.get("do_remote_decode")), transfer_of(params)
        try:
            if transfer and not is_answer:
                self._follow(request, transfer, read_address(params))
                return
            prefill = read_params(params)
        except ParamsError as error:
            self._lose(request, "params", str(error), is_known=is_answer)
            return
        yield from self._arrive(request, prefill, is_answer=is_answer)

    def on_answers(self) -> Iterator[Command]:
        """What the listeners of sources have said of prefills that are under way. What a load is to know of its own, its ranks hear."""
        for request, found in self.following.take():
            waiting = self.waiting.get(request.request_id)
            if waiting is not None and waiting.is_loading:
                continue
            if not names_source(request.kv_transfer_params or {}):  # vLLM has begun to compute it
                self.following.end(request.request_id)
                if isinstance(found, RemotePrefill):
                    yield Release(*found.source)
            elif waiting is not None and isinstance(found, RemotePrefill) and found.is_of(waiting.prefill):
                waiting.prefill = found  # it has ended: now all its pages are known
            elif isinstance(found, RemotePrefill):
                yield from self._arrive(request, found, is_answer=False)
            elif waiting is not None:
                yield from self.give_up(request.request_id, found.cause, found.text)
            else:
                self._lose(request, found.cause, found.text, found.address)
                self.following.end(request.request_id)

    def _follow(self, request: Request, transfer: str, address: Address) -> None:
        """Ask a prefill engine's listener for a prefill that may be under way."""
        if not self._config.may_load:
            self._lose(request, "role", "", address)
        elif self._is_shadow:
            self._lose(request, "shadow", "", address)
        elif not self._hosts.allows(address.host):
            self._lose(request, "host", "", address)
        else:
            self.following.begin(request, transfer, address)

    def _lose(
        self, request: Request, cause: str, text: str, address: Address | None = None, *, is_known: bool = False
    ) -> None:
        """A request of whose prefill nothing is known is computed here. `is_known`: this engine has all of its items."""
        remote = None if address is None else RemoteEngine("", "", address)
        reason = REASONS[cause].format(remote=remote, text=text)
        if not is_known:
            self.missing_items.arrive_unknown(request, reason)
        self._log.computed(request.request_id, cause, reason)

    def _arrive(self, request: Request, prefill: RemotePrefill, *, is_answer: bool) -> Iterator[Command]:
        # The ranks report the key of an answer's source once they have seen that its lease is still there.
        key = None if is_answer else self.known.find_key(prefill.remote)
        waiting = Waiting(request, prefill, is_answer, key)
        if waiting.key is not None:
            self._compare_items(waiting)
        cause = self._find_obstacle(waiting)
        if cause is not None:
            self._fall_back(waiting, cause)
        if cause in ("itself", "role", "answer") or (
            cause is None and self.missing_items.is_hopeless(request.request_id)
        ):
            yield Release(*waiting.prefill.source)
        elif cause is None:
            self.waiting.add(request.request_id, waiting)
            asks_key = waiting.key is None and not (self._is_shadow or is_answer)
            yield Renew(request.request_id, prefill.remote, prefill.lease, asks_key=asks_key, checks_lease=is_answer)

    def _find_obstacle(self, waiting: Waiting) -> str | None:
        """The cause for which a request that arrives cannot be loaded."""
        remote = waiting.prefill.remote
        if self.known.is_own(remote):
            return "itself"
        if not self._hosts.allows(remote.address.host):
            return "host"
        if waiting.is_answer and self._min_answer_tokens is None:
            return "answer"
        if not (waiting.is_answer or self._config.may_load):
            return "role"
        return "spent" if self.known.is_released(waiting.prefill.source) else None

    def meet(self, keys: Mapping[str, bytes], unmet: Mapping[str, Failure]) -> Iterator[Command]:
        """Results of handshakes, by request: the source's key, or why there is none.

        Ranks may differ, and report one after the other. A key that belongs to another source, of a former request with the same id, fails
        to verify the seal, and so unlocks nothing.
        """
        for request_id, key in keys.items():
            waiting = self.waiting.get(request_id)
            if waiting is None or waiting.key == key:
                continue
            waiting.key = key
            self.known.add_key(key)
            if waiting.num_loadable is None:
                self._compare_items(waiting)
                if self.missing_items.is_hopeless(request_id):
                    yield from self._release(request_id, waiting)
        for request_id, failure in unmet.items():
            waiting = self.waiting.get(request_id)
            if waiting is not None:
                if waiting.key is None and waiting.unmet is None:
                    self._compare_items(waiting)
                waiting.unmet = failure

    def clean_up(self, params: Mapping[str, Any]) -> Iterator[Command]:
        """Release the source of a request that never got here, or has ended with an error. vLLM adds such a request to abort it at once."""
        try:
            prefill = read_params(params)
        except ParamsError as error:
            logger.debug("no lease is released for a request that was rejected: %s", error)
            return
        if self._hosts.allows(prefill.remote.address.host) and not self.known.is_released(prefill.source):
            yield from self._release_source(prefill.source)

    def count_loadable(self, request: Request, num_computed: int) -> int | None:
        """Tokens that can be loaded beyond the `num_computed` that this engine has; None before the handshake."""
        waiting = self.waiting.get(request.request_id)
        if request.get_skip_reading_prefix_cache() and self._is_unknown(request.request_id, waiting):
            self.missing_items.arrive_unknown(request, "it must not read its prefix cache, and vLLM computes all of it")
            return 0  # nor does vLLM wait
        if request.request_id in self.following:
            return None
        if waiting is None or waiting.is_loading:
            return 0
        waiting.num_computed = num_computed
        if waiting.num_loadable is None:
            if waiting.is_answer and waiting.unmet is not None:
                self._fall_back(waiting, "ended" if waiting.unmet.kind == "stale lease" else "unmet")
                waiting.num_loadable = 0
                return 0
            if waiting.key is None and not self._is_shadow:
                prompt, limit = waiting.prefill.prompt, self.loadable.limit(request)
                if num_computed >= min(waiting.prefill.num_tokens, limit) and not (prompt.items or prompt.salt):
                    return 0
                if waiting.unmet is None:
                    return None
                waiting.refusal = waiting.unmet
            waiting.num_loadable = self._count_tokens(waiting)
        num_missing = waiting.num_missing
        if num_missing and not self.waiting.may_begin(waiting):
            return None
        is_worthless = waiting.is_answer and num_missing < (self._min_answer_tokens or 0)
        return 0 if is_worthless else num_missing

    def _is_unknown(self, request_id: str, waiting: Waiting | None) -> bool:
        """Whether the items of its prefill cannot be compared yet. Of an answer this engine has all of them."""
        if waiting is None:
            return request_id in self.following
        return waiting.key is None and not (waiting.is_answer or self._is_shadow)

    def allocate(self, request: Request, blocks: KVCacheBlocks, num_external: int) -> Iterator[Command]:
        """Blocks are there: load `num_external` tokens, or release the source."""
        waiting = self.waiting.get(request.request_id)
        if waiting is None or waiting.is_loading:
            return
        self._note_unused(waiting, num_external)
        if num_external <= 0:
            yield from self._release(request.request_id, waiting)
            return
        self.waiting.begin_load(request.request_id, sum(map(len, blocks.blocks)))
        prefill = waiting.prefill
        transfer = make_transfer(self._config.groups, prefill, blocks, waiting.num_computed + num_external)
        yield Load(
            request.request_id,
            prefill.remote,
            prefill.lease,
            transfer,
            prefill.seal,
            gives_back=False,
            refusal=waiting.refusal,
            trace_headers=request.trace_headers,
            transfer_id=transfer_of(request.kv_transfer_params or {}) if waiting.is_early else "",
        )

    @property
    def num_waiting(self) -> int:
        """Requests that wait until their load can begin."""
        return len(self.waiting) - self.waiting.num_loading + len(self.following.unknown)

    def reset(self) -> Iterator[Command]:
        """The caches were reset: what waits is computed here, since the engine may have got other weights."""
        for request_id in self.waiting:
            yield from self.give_up(request_id, "reset")
        for request, address in self.following.unknown:
            self._lose(request, "reset", "", address)
            self.following.end(request.request_id)

    def give_up_longest(self) -> Iterator[Command]:
        """Compute the request that waits longest here, since engines may wait for one another (`admission`)."""
        longest = self.waiting.find_longest()
        return iter(()) if longest is None else self.give_up(longest, "deadlock")

    def give_up_early(self) -> Iterator[Command]:
        """Of the loads whose prefills are under way, end that of the request that has arrived last: others need its blocks."""
        youngest = self.waiting.find_youngest_early()
        return iter(()) if youngest is None else iter([Cancel(youngest, is_aborted=False)])

    def give_up(self, request_id: str, cause: str, text: str = "") -> Iterator[Command]:
        """Compute a request here that waits for its load, and release its source. `text`: what is known of the cause."""
        waiting = self.waiting.get(request_id)
        if waiting is not None and not waiting.is_loading:
            self._fall_back(waiting, cause, text)
            yield from self._release(request_id, waiting)

    def abort(self, request_id: str) -> Iterator[Command]:
        """The request has ended, in whatever way."""
        self.missing_items.end(request_id)
        self.following.end(request_id)
        waiting = self.waiting.get(request_id)
        if waiting is None:
            return
        waiting.is_aborted = True
        if waiting.is_loading:
            yield Cancel(request_id)
        else:
            yield from self._release(request_id, waiting)

    def fail(self, request_id: str) -> bool:
        """A load has failed. Returns whether its request goes on, which it does unless it was aborted."""
        waiting = self.waiting.get(request_id)
        if waiting is None or waiting.is_aborted:
            return False
        self._note_partial(waiting, "failure", 0, is_logged=False)
        return True

    def ended(self, request_id: str) -> Iterator[Command]:
        """The load is over on every rank: release its source, unless other requests here still use it."""
        waiting = self.waiting.forget(request_id)
        self.following.end(request_id)
        if waiting is not None:
            yield from self._release_source(waiting.prefill.source, waiting.is_unmet)

    def find_source(self, request_id: str) -> tuple[RemoteEngine | None, bool]:
        """From where a request that has arrived is loaded, and whether it has ended meanwhile."""
        waiting = self.waiting.get(request_id)
        return (None, True) if waiting is None else (waiting.prefill.remote, waiting.is_aborted)

    def first_loaded(self, request_id: str, blocks: KVCacheBlocks) -> Iterator[tuple[CacheGroup, int]]:
        """(group, first token) where the load leaves earlier tokens of the group's blocks out: its source no longer has them."""
        waiting = self.waiting.get(request_id)
        if waiting is None or not waiting.is_loading:
            return
        for group in self._config.groups:
            if group.page_tokens is not None:
                held = first_token(waiting.prefill, group)
                if first_missing(group, blocks, held) < held:
                    yield group, held

    def _fall_back(self, waiting: Waiting, cause: str, text: str = "") -> None:
        """Count and log that the request is computed here."""
        self._note_partial(waiting, cause, 0, is_logged=False)
        if waiting.key is None:
            self._compare_items(waiting)
        text, remote = text or ("" if waiting.unmet is None else waiting.unmet.text), waiting.prefill.remote
        self._log.computed(waiting.request.request_id, cause, REASONS[cause].format(remote=remote, text=text), remote)

    def _compare_items(self, waiting: Waiting) -> None:
        """Compare multimodal items and salt: under the source's key, or, where there will be none, as unknown."""
        prompt, key = waiting.prefill.prompt, waiting.key
        if self._is_shadow or waiting.is_answer or not (prompt.items or prompt.salt):
            return
        prompt_key = None if key is None else waiting.prefill.prompt_key(key)
        if prompt_key is None:
            self.missing_items.arrive_unasked(waiting.request, prompt)
        else:
            self.missing_items.arrive(waiting.request, prompt, prompt_key)

    def _note_partial(
        self, waiting: Waiting, cause: str, num_loaded: int, why: str = "", *, is_logged: bool = True
    ) -> None:
        is_logged = is_logged and not self._is_shadow
        num_tokens = num_loaded, waiting.prefill.num_tokens
        self._log.partial(waiting.request.request_id, cause, num_tokens, why, is_logged=is_logged)

    def _note_unused(self, waiting: Waiting, num_external: int) -> None:
        """vLLM loads nothing where logprobs of the prompt are requested, and whole blocks only of a window that it replays.

        Where it loads nothing because a prefix hit ends inside a block, it has reported only where that block begins. What is missing of an
        answer may not be worth a load.
        """
        num_loaded, num_loadable = waiting.num_computed + num_external, waiting.num_loadable or 0
        if num_loaded >= num_loadable:
            return
        if waiting.request.get_skip_reading_prefix_cache():
            self._note_partial(waiting, "logprobs", num_loaded)
        elif num_external > 0 or (num_loadable - num_loaded > self._largest_page and not waiting.is_answer):
            self._note_partial(waiting, "vllm", num_loaded)

    def _release(self, request_id: str, waiting: Waiting) -> Iterator[Command]:
        self.following.end(request_id)
        self.waiting.forget(request_id)
        yield StopRenewing(request_id)
        yield from self._release_source(waiting.prefill.source, waiting.is_unmet)

    def _release_source(self, source: Source, is_unmet: bool = False) -> Iterator[Command]:
        """Release the lease when no request here uses it any more. Only the scheduler knows: ranks learn of requests a step later.

        A source whose handshake failed on every rank is not contacted again for this, unless another request has loaded from it.
        """
        if self.waiting.has_source(source):
            if not is_unmet:
                self._put_off.add(source)
        elif not is_unmet or source in self._put_off:
            self._put_off.discard(source)
            self.known.add_released(source)
            yield Release(*source)

    def _count_tokens(self, waiting: Waiting) -> int:
        """How many leading tokens of the prompt can be loaded; the reason is logged if it is not all of them."""
        found = self.loadable.count(waiting.request, waiting.prefill, waiting.key, is_answer=waiting.is_answer)
        if found.fallback:
            remote = waiting.prefill.remote
            self._log.computed(waiting.request.request_id, found.fallback, found.reason, remote)
        if found.partial:
            self._note_partial(waiting, found.partial, found.num_tokens, found.why, is_logged=not found.reason)
        return found.num_tokens
