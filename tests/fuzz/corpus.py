"""The inputs that are kept: seeds that are good messages, and every input that once broke something (`crash-...`).

`python -m tests.fuzz.corpus` writes the seeds anew; crashers are put beside them by hand.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from tests.fuzz.targets import PAIRS, TARGETS
from tests.pairs.small import engine

from kvreshard.model import wire
from kvreshard.model.tables import PageTable
from kvreshard.session import handshake_messages
from kvreshard.session.commands import RemoteEngine
from kvreshard.session.engine_metadata import RankMetadata, encode_engine_metadata, make_engine_metadata
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease
from kvreshard.session.notes import Heartbeat, Report, write_note
from kvreshard.session.seal import instance_id_of
from kvreshard.session.statement import Answer, PageList, Statement, encode_reply
from kvreshard.tools.digest_request import DigestRequest, Owned, write_request
from kvreshard.transport.base import MemoryRegion
from kvreshard.transport.regions import RegionTable, encode_metadata
from kvreshard.vllm.items import Item
from kvreshard.vllm.page_list import write_pages
from kvreshard.vllm.params import GroupParams, RemotePrefill, write_params
from kvreshard.vllm.prompt import Prompt, digest_prompt

ROOT = Path(__file__).parent / "corpus"

KEY = bytes(range(32))


def load(name: str) -> dict[str, bytes]:
    """All kept inputs of a target, by file name."""
    return {path.name: path.read_bytes() for path in sorted((ROOT / name).iterdir())}


def seeds() -> dict[str, dict[str, bytes]]:
    """Good messages of every target."""
    layouts = {
        "plain": engine("prefill"),
        "context-parallel": engine("prefill", tp=2, dcp=2),
        "pipeline": engine("prefill", stages=(0, 1), order="HND", null_page=0),
    }
    regions = encode_metadata(
        "memory", "p", RegionTable([MemoryRegion(4096, 8192), MemoryRegion(1 << 20, 64, "cuda:0")]), b"x"
    )
    prefill = RemotePrefill(
        RemoteEngine("engine", instance_id_of(KEY), Address("10.0.0.1", 5600)),
        Lease("cmpl-1", 7, 2**63 + 12345),
        40,
        (GroupParams("g0", 2, 16, False, 512), GroupParams("g1", 0, None, True), GroupParams("g2", 0, ring_tokens=8)),
        {"g0": write_pages((4, 9, 3)), "g1": write_pages((3,)), "g2": write_pages((5,))},
        digest_prompt(Prompt(range(40), (Item(3, 20, "a" * 32, "b" * 32),), salt="c" * 32), 40, KEY),
    )
    within: tuple[tuple[Owned, ...], ...] = (((0, None, None),), ((0, 1, None), (0, 2, None)), ((0, 2, None),))
    asked = DigestRequest(1, "cmpl-1", 2**63 + 12345, 7, KEY, ("layers.0.k", "layers.0.v"), within, ((0, 5), (8, 12)))
    handshake_message = handshake_messages.HandshakeMessage(
        handshake_messages.FORM, handshake_messages.VERSION, "metadata", "d", 1
    )
    told = handshake_messages.HandshakeMessage(
        handshake_messages.FORM, handshake_messages.VERSION, "outcome", "d", 1, "rank 1 reads rank 0", False
    )
    engine_metadata_list = {
        name: make_engine_metadata(
            layout, KEY, {"model": "m"}, [RankMetadata(r.rank, regions, 4096, 512) for r in layout.ranks], 30.0
        )
        for name, layout in layouts.items()
    }
    return {
        "engine_metadata": {
            name: encode_engine_metadata(engine_metadata) for name, engine_metadata in engine_metadata_list.items()
        },
        "layout": {name: wire.encode(layout) for name, layout in layouts.items()},
        "layout_json": {name: wire.encode(layout, "json") for name, layout in layouts.items()},
        "note": {
            "report": write_note(Report(1, "d/1", "r", 2**64 - 1, 3, (0, 3), False)),
            "heartbeat": write_note(Heartbeat(1, "d", (("r", 1), ("s", 2)))),
        },
        "digest_request": {"heads": write_request(asked)},
        "handshake_message": {
            "metadata": msgspec.msgpack.encode((handshake_message, 0, 0)),
            "outcome": msgspec.msgpack.encode((told, 0, 0)),
            "transfers": handshake_messages.transfers_request(
                "d",
                1,
                [
                    handshake_messages.TransferQuestion("x-1", 77, {"full": 2}),
                    handshake_messages.TransferQuestion("x-2"),
                ],
                "me",
            ),
        },
        "statement": {"two": _statement(prefill)},
        "answer": {
            "noted": msgspec.msgpack.encode(
                handshake_messages.HandshakeAnswer(handshake_messages.ANSWER_FORM, 1, "noted")
            )
        },
        "params": {
            "three-groups": json.dumps(write_params(prefill, {"tp_size": 2, "dcp_size": 1, "pp_size": 1}, KEY)).encode()
        },
        "metadata": {"two-regions": regions},
        "route": {
            f"{kind}-{seed}": bytes([number]) + bytes([number, 0, 128, 128] * 2)
            for number, (kind, seed) in enumerate(PAIRS)
        },
    }


def _statement(prefill: RemotePrefill) -> bytes:
    tables = {"g0": PageTable([4, 9, 3], 40, 2)}
    pages = {name: PageList.of(table) for name, table in tables.items()}
    said = Statement("e", "i", "cmpl-1", 7, 77, 40, pages, False, prefill.details).sealed(KEY, tables)
    return encode_reply({0: Answer("found", statement=said), 1: Answer("ended", "aborted")})


def main() -> None:
    for target, messages in seeds().items():
        assert target in TARGETS
        (ROOT / target).mkdir(parents=True, exist_ok=True)
        for name, message in messages.items():
            (ROOT / target / name).write_bytes(message)


if __name__ == "__main__":
    main()
