"""The shadow in a rank's process: what NixlConnector posted, beside what the planner would have copied.

The engine's thread only notes and hands over. Meeting a peer, compiling and comparing are done on the shadow's own thread,
one request at a time; what comes faster than that is dropped and counted, since a sample says as much.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvreshard.model import EngineLayout, KvReshardError, wire
from kvreshard.model.logs import get_logger
from kvreshard.plan.copies import CopyList
from kvreshard.plan.route import Route, compile_route
from kvreshard.session.card import EngineCard, RankCard, check_facts, decode_card
from kvreshard.session.handshake import fetch_card, tell_outcome
from kvreshard.session.orders import Load, RemoteEngine
from kvreshard.session.peers import describe_route
from kvreshard.tools.shadow_record import Posted, RecordingAgent
from kvreshard.tools.shadow_report import ShadowReport, compare_load
from kvreshard.vllm.describe import describe_rank
from kvreshard.vllm.engine_facts import read_facts
from kvreshard.vllm.options import Options
from kvreshard.vllm.rank_place import RankPlace, read_place
from kvreshard.vllm.reception import RankPart
from kvreshard.vllm.shadow_scheduler import ShadowLoad, ShadowOrders

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)

MAX_WAITING = 256
CLOSE_S = 0.3


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that NixlConnector is done with. `agents`: name of each of its agents -> (pipeline, tensor) rank."""

    load: ShadowLoad
    posted: list[Posted]
    agents: dict[str, tuple[int, int]]
    is_failed: bool


@dataclass(frozen=True, slots=True)
class _Met:
    src: EngineLayout
    route: Route


class ShadowWorker:
    """One per rank. `part`: what this rank says of itself, once the caches are known."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, engine: str, options: Options) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._engine, self._options = engine, options
        self.part: RankPart | None = None
        self._place: RankPlace | None = None
        self._worker: Any = None
        self._agent: RecordingAgent | None = None
        self._loads: dict[str, ShadowLoad] = {}
        self._card: EngineCard | None = None
        self._me: EngineLayout | None = None
        self._met: dict[RemoteEngine, _Met | str] = {}
        self._told: Counter[tuple[str, str]] = Counter()
        self._waiting: queue.Queue[_Ended | None] = queue.Queue(MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="kvreshard-shadow", daemon=True)
        self._thread.start()

    def watch(self, worker: Any) -> None:
        """Look over the shoulder of NixlConnector's worker (vLLM 0.32.0, `nixl/pull_worker.py`, `_read_blocks`)."""
        self._worker, agent = worker, RecordingAgent(worker.nixl_wrapper)
        worker.nixl_wrapper = self._agent = agent
        read_blocks = worker._read_blocks

        def noted(*args: Any, **kwargs: Any) -> Any:
            agent.current = kwargs.get("request_id")
            try:
                return read_blocks(*args, **kwargs)
            finally:
                agent.current = None

        worker._read_blocks = noted

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the caches. Raises LayoutError."""
        self._place = read_place(self._vllm_config)
        if self._place.is_replica:
            return
        part = describe_rank(
            engine=self._engine,
            vllm_config=self._vllm_config,
            kv_cache_config=self._kv_cache_config,
            kv_caches=kv_caches,
            place=self._place,
        )
        # No agent of ours: a peer's shadow only looks at the layout.
        self.part = RankPart(wire.encode(part), RankCard(self._place.rank, b"", 0, 0), read_facts(self._vllm_config))

    def remember(self, orders: ShadowOrders) -> None:
        """This step's loads."""
        if orders.card is not None:
            self._card = decode_card(orders.card)
            self._me = self._card.decode_layout()
        self._loads.update((load.request, load) for load in orders.loads)

    def ended(self, received: set[str], failed: set[str]) -> None:
        """NixlConnector is done with these requests: hand them to the thread."""
        for request in received | failed:
            load = self._loads.pop(request, None)
            posted = self._agent.take(request) if self._agent is not None else []
            if load is None:
                continue
            agents = {}
            if load.load is not None:
                found = self._worker._remote_agents.get(load.load.remote.engine) or {}
                agents = {name: rank for rank, name in found.items()}
            try:
                self._waiting.put_nowait(_Ended(load, posted, agents, request in failed))
            except queue.Full:
                self._told["dropped", ""] += 1

    def close(self) -> None:
        """End the thread, which may be asking an engine that does not answer: it is not waited for longer than `CLOSE_S`."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (ended := self._waiting.get()) is not None:
            try:
                self._note(self._judge(ended))
            except Exception:  # a comparison that fails must not end the others
                logger.exception("kvreshard shadow: request %s could not be compared", ended.load.request)

    def _judge(self, ended: _Ended) -> ShadowReport:
        """What is found, unless the load itself cannot suffice."""
        found = self._compare(ended)
        if ended.load.lost and not ended.is_failed and found.verdict in ("same", "more", "refused here"):
            return msgspec.structs.replace(found, verdict="missing", reason=ended.load.lost)
        return found

    def _compare(self, ended: _Ended) -> ShadowReport:
        load, me, place = ended.load, self._me, self._place
        facts: dict[str, Any] = {
            "request": load.request,
            "peer": load.load.remote.engine if load.load is not None else "",
            "rank": place.rank if place is not None else 0,
            "num_tokens": load.num_tokens,
            "their_tokens": load.their_tokens,
            "rearranges": bool(getattr(self._worker, "enable_permute_local_kv", False)),
        }
        if load.load is None and not load.why_not:  # all that there was to load is the last token
            return ShadowReport(verdict="more" if ended.posted and not ended.is_failed else "refused there", **facts)
        if load.load is None or me is None or place is None:
            return ShadowReport(verdict="refused here", reason=load.why_not, **facts)
        met = self._meet(load.load, me, place)
        if isinstance(met, str):
            return ShadowReport(verdict="refused here", reason=met, **facts)
        places = {rank.rank: dict(rank.place) for rank in met.src.ranks}
        num_tp = 1 + max(place["tp"] for place in places.values())
        ranks = {(one["pp"], one.get("pcp", 0) * num_tp + one["tp"]): rank for rank, one in places.items()}
        try:
            theirs: list[CopyList] = [
                posted.copies(ranks[ended.agents[posted.remote.agent]], place.rank)
                for posted in ([] if ended.is_failed else ended.posted)
            ]
        except (ValueError, KeyError) as error:
            return ShadowReport(verdict="unknown", reason=f"{type(error).__name__}: {error}", **facts)
        return compare_load(load.load, met.route, met.src, me, theirs, facts)

    def _meet(self, load: Load, me: EngineLayout, place: RankPlace) -> _Met | str:
        """The route from that engine, or why there is none; asked once per life of the engine."""
        remote = load.remote
        if remote not in self._met:
            try:
                self._met[remote] = met = self._ask(remote, me, place)
                sentence = describe_route(met.route)
                logger.info("kvreshard shadow: engine %s at %s: %s", remote.engine, remote.address, sentence)
            except KvReshardError as error:
                self._met[remote] = str(error)
                logger.warning("kvreshard shadow: engine %s at %s: %s", remote.engine, remote.address, error)
        return self._met[remote]

    def _ask(self, remote: RemoteEngine, me: EngineLayout, place: RankPlace) -> _Met:
        timeout_s = self._options.handshake_timeout_s
        card = fetch_card(remote.address, self._engine, place.rank, timeout_s, self._options.keys)
        if self._card is not None:
            check_facts(self._card, card, self._options.allow_mismatch)
        src = card.decode_layout()
        route = compile_route(src, me, place.rank)
        sentence = f"shadow: {describe_route(route)}"
        tell_outcome(remote.address, self._engine, place.rank, sentence, True, timeout_s, self._options.keys)
        return _Met(src, route)

    def _note(self, report: ShadowReport) -> None:
        """To the file, if one is named, and to the log: the first of each verdict per peer, then each tenfold."""
        if self._options.shadow_report_file:
            with open(self._options.shadow_report_file, "ab") as file:
                file.write(msgspec.json.encode(report) + b"\n")
        self._told[report.verdict, report.peer] += 1
        count = self._told[report.verdict, report.peer]
        if str(count).strip("0") == "1":
            is_fine = report.verdict in ("same", "more")
            times = f", {count} requests like it by now" if count > 1 else ""
            logger.log(logging.INFO if is_fine else logging.WARNING, "kvreshard shadow: %s%s", report.sentence(), times)
