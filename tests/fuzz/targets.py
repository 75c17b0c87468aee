"""Everything that decodes what a peer sent, each as a function of bytes that says what became of them.

A target returns "accepted" or "refused". Any other exception than the ones that it names is a finding, and so is an input that
takes longer than `MAX_INPUT_S`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
from tests.pairs.random_pairs import Pair, make_pair
from tests.pairs.small import GROUP, engine
from tests.unit.tools.engines import ArrayBytes

from kvreshard.model import BindError, EngineLayout, KvReshardError, LayoutError, LayoutMismatch, WireError, wire
from kvreshard.model.tables import PageTable
from kvreshard.plan import bind
from kvreshard.plan.compile import compile_route
from kvreshard.session.engine_metadata import decode_engine_metadata
from kvreshard.session.handshake_messages import Address, HandshakeError, read_answer, read_message
from kvreshard.session.notes import read_note
from kvreshard.session.rendezvous import Rendezvous
from kvreshard.session.statement import Statement, read_reply
from kvreshard.tools.digest_request import answer_request, read_request
from kvreshard.transport.base import TransportError
from kvreshard.transport.regions import decode_metadata
from kvreshard.vllm.params import ParamsError, read_address, read_params, read_statement

Outcome = Literal["accepted", "refused"]
Target = Callable[[bytes], Outcome]

# On an idle core the slowest honest input takes a few milliseconds.
MAX_INPUT_S = 30
TARGETS: dict[str, Target] = {}


def target(function: Target) -> Target:
    TARGETS[function.__name__] = function
    return function


@target
def engine_metadata(data: bytes) -> Outcome:
    """What a listener answers: the engine metadata, and the layout and the transport's metadata in it."""
    try:
        found = decode_engine_metadata(data)
        found.decode_layout()
        for rank in found.ranks:
            decode_metadata("memory", rank.transport_metadata).table()
    except (WireError, LayoutError, TransportError):
        return "refused"
    return "accepted"


@target
def layout(data: bytes) -> Outcome:
    return _decoded(data, "msgpack")


@target
def layout_json(data: bytes) -> Outcome:
    return _decoded(data, "json")


def _decoded(data: bytes, encoding: wire.Encoding) -> Outcome:
    try:
        found = wire.decode(data, encoding)
    except (WireError, LayoutError):
        return "refused"
    # What was accepted is written and read again unchanged.
    assert wire.decode(wire.encode(found)) == found
    return "accepted"


@target
def note(data: bytes) -> Outcome:
    return "refused" if read_note(data) is None else "accepted"


@target
def digest_request(data: bytes) -> Outcome:
    """A reader's notification, answered from the memory of a small engine; whatever it asks for, nothing else is read."""
    request = read_request(data)
    if request is None:
        return "refused"
    layout, memory = _source()
    try:
        answer_request(request, {GROUP: PageTable([1, 2, 3], 12)}, layout, 0, memory)
    except KvReshardError:
        return "refused"
    return "accepted"


@cache
def _source() -> tuple[EngineLayout, ArrayBytes]:
    layout = engine("prefill")
    (region,) = layout.ranks[0].regions
    return layout, ArrayBytes({region.address: np.ones(region.size_bytes, np.uint8)})


@target
def handshake_message(data: bytes) -> Outcome:
    found = read_message(data)
    assert isinstance(found, str) or found.engine.isprintable()
    if not isinstance(found, str):
        assert _shown().answer(found.transfers or (), is_last=True) is not None
    return "refused" if isinstance(found, str) else "accepted"


@cache
def _shown() -> Rendezvous:
    """A prefill that readers may ask for."""
    shown = Rendezvous(bytes(32))
    shown.register("x-1", "r")
    shown.begin("x-1", "r", Statement("e", "i", "r", 1, 77, 40, {}, False, b""))
    shown.extend("x-1", 77, {"full": [5, 6, 7]})
    return shown


@target
def statement(data: bytes) -> Outcome:
    """What a listener answers to a question for transfers."""
    try:
        for answer in read_reply(data).values():
            if answer.statement is not None:
                read_statement(answer.statement, Address("127.0.0.1", 5))
    except (HandshakeError, ParamsError):
        return "refused"
    return "accepted"


@target
def answer(data: bytes) -> Outcome:
    found = read_answer(data)
    assert found is None or "\n" not in found
    return "refused" if found is None else "accepted"


@target
def params(data: bytes) -> Outcome:
    """A router's JSON object. What is no JSON never gets to the connector: a web server has parsed it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return "refused"
    if not isinstance(value, dict):
        return "refused"
    with contextlib.suppress(ParamsError):
        read_address(value)
    try:
        read_params(value).tables()
    except (ParamsError, BindError):
        return "refused"
    return "accepted"


@target
def metadata(data: bytes) -> Outcome:
    try:
        decode_metadata("memory", data).table()
    except TransportError:
        return "refused"
    return "accepted"


PAIRS = tuple((kind, seed) for kind in ("raw", "kinds") for seed in range(12))
NUMBERS = (0, 1, 2, 3, 7, 16, 255, 2**16, 2**20, 2**31, 2**40, 2**48, 2**53, 2**62, 2**63 - 1, -1, None)


@cache
def _pair(number: int) -> tuple[Pair, bytes, list[tuple[Any, ...]]]:
    found = make_pair(*PAIRS[number % len(PAIRS)])
    message = wire.encode(found.src, "json")
    return found, message, list(_leaves(json.loads(message)))


@target
def route(data: bytes) -> Outcome:
    """A good pair of engines, with numbers of the source's layout changed: it is refused, or its route is proved and binds.

    The first byte picks the pair; each further four are a place (two bytes) and a number or a change of the old one. 128 and 128
    change nothing.
    """
    if not data:
        return "refused"
    found, message, places = _pair(data[0])
    tree = json.loads(message)
    for at in range(1, min(len(data) - 3, 33), 4):
        _change(tree, places[int.from_bytes(data[at : at + 2], "little") % len(places)], data[at + 2], data[at + 3])
    try:
        src = wire.decode(json.dumps(tree).encode(), "json")
    except (WireError, LayoutError):
        return "refused"
    outcomes = [_routed(src, found, rank.rank) for rank in found.dst.ranks]
    return "accepted" if "accepted" in outcomes else "refused"


def _routed(src: EngineLayout, pair: Pair, dst_rank: int) -> Outcome:
    try:
        proved = compile_route(src, pair.dst, dst_rank)
        for copies in bind(proved, pair.request):
            assert (copies.length > 0).all()
    except (LayoutMismatch, BindError):
        return "refused"
    return "accepted"


def _change(tree: Any, path: tuple[Any, ...], how: int, number: int) -> None:
    inner = tree
    for key in path[:-1]:
        inner = inner[key]
    old = inner[path[-1]]
    if how < 128:
        inner[path[-1]] = NUMBERS[number % len(NUMBERS)]
    elif not isinstance(old, int) or isinstance(old, bool):
        return
    elif how < 192:
        inner[path[-1]] = old + number - 128
    else:
        inner[path[-1]] = min(2**63 - 1, old * (number % 16 + 1)) >> (number // 64)


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """The paths of all numbers in a decoded message, but its version."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        if path != ("version",) and not isinstance(value, str):
            yield path
        return
    for key, inner in items:
        yield from _leaves(inner, (*path, key))
