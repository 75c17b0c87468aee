"""The messages of a handshake and between ranks, byte by byte: `peer/*.hex` holds one of each, so that no form changes unnoticed.

A change before the first release is made in the files too (`python -m tests.golden.test_peer` writes them); after it, see docs/wire.md.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.pairs.small import engine

from kvreshard.model.tables import PageTable
from kvreshard.session import handshake_messages
from kvreshard.session.engine_metadata import (
    EngineMetadata,
    RankMetadata,
    decode_engine_metadata,
    encode_engine_metadata,
    make_engine_metadata,
)
from kvreshard.session.handshake_messages import (
    HandshakeAnswer,
    HandshakeMessage,
    TransferQuestion,
    metadata_request,
    outcome_message,
    read_answer,
    read_message,
    transfers_request,
)
from kvreshard.session.notes import VERSION, Heartbeat, Report, heartbeats, read_note, write_note
from kvreshard.session.statement import Answer, PageList, Statement, encode_reply, read_reply
from kvreshard.tools.digest_request import DigestRequest, read_request, write_request

PEER = Path(__file__).parent / "peer"
KEY = bytes(range(32))
REPORT = Report(VERSION, "d/1", "r", 2**64 - 1, 3, (0, 3), False)
HEARTBEAT = Heartbeat(VERSION, "d", (("r", 1), ("s", 2)))
ASKED = DigestRequest(VERSION, "r", 7, 2**64 - 1, KEY, ("layers.0.k",), (((0, 4, None),), ((1, 1, 2),)), ((0, 40),))


def engine_metadata() -> EngineMetadata:
    layout = engine("prefill", tp=2)
    ranks = [RankMetadata(rank.rank, b"meta", 4096, 512, 8192, 16, 12288) for rank in layout.ranks]
    return make_engine_metadata(layout, KEY, {"model": "m"}, ranks, 4.0, early_fields={"layers.0.k": 0})


def statement() -> Statement:
    tables = {"full": PageTable([7, 9], 40, 2)}
    pages = {name: PageList.of(table) for name, table in tables.items()}
    return Statement("prefill", "i", "r", 5, 77, 40, pages, False, b"{}").sealed(KEY, tables)


def messages() -> dict[str, bytes]:
    """What this side writes, by file name."""
    answer = HandshakeAnswer(handshake_messages.ANSWER_FORM, handshake_messages.VERSION, "noted")
    return {
        "answer-v1": msgspec.msgpack.encode(answer),
        "engine-metadata-v1": encode_engine_metadata(engine_metadata()),
        "heartbeat-v1": write_note(next(heartbeats(HEARTBEAT.consumer, HEARTBEAT.leases))),
        "handshake-metadata-v1": metadata_request("decode", 3),
        "handshake-outcome-v1": outcome_message("decode", 3, "reads", False),
        "handshake-transfers-v1": transfers_request(
            "decode", 3, [TransferQuestion("x-1", 77, {"full": 2}), TransferQuestion("x-2")], "me"
        ),
        "statement-v1": encode_reply({0: Answer("found", statement=statement()), 1: Answer("ended", "aborted")}),
        "digest-request-v1": write_request(ASKED),
        "report-v1": write_note(REPORT),
    }


def golden(name: str) -> bytes:
    return bytes.fromhex((PEER / f"{name}-v1.hex").read_text())


def test_nothing_is_missing() -> None:
    assert sorted(path.stem for path in PEER.iterdir()) == sorted(messages())


@pytest.mark.parametrize("name", messages())
def test_a_form_is_written_as_it_was(name: str) -> None:
    assert messages()[name].hex() == golden(name.removesuffix("-v1")).hex()


def test_every_form_is_read() -> None:
    found = decode_engine_metadata(golden("engine-metadata"))
    assert found == engine_metadata()
    assert found.decode_layout() == engine("prefill", tp=2)
    assert read_message(golden("handshake-metadata")) == HandshakeMessage(
        "kvreshard.handshake", 1, "metadata", "decode", 3
    )
    assert read_message(golden("handshake-outcome")) == HandshakeMessage(
        "kvreshard.handshake", 1, "outcome", "decode", 3, "reads", False
    )
    assert read_message(golden("handshake-transfers")) == HandshakeMessage(
        "kvreshard.handshake",
        1,
        "transfers",
        "decode",
        3,
        "me",
        transfers=(TransferQuestion("x-1", 77, {"full": 2}), TransferQuestion("x-2")),
    )
    assert read_reply(golden("statement")) == {0: Answer("found", statement=statement()), 1: Answer("ended", "aborted")}
    statement().check(KEY, ("prefill", "i"), {"full": PageTable([7, 9], 40, 2)})
    assert read_answer(golden("answer")) == "noted"
    assert [read_note(golden(name)) for name in ("report", "heartbeat")] == [REPORT, HEARTBEAT]
    assert read_request(golden("digest-request")) == ASKED


if __name__ == "__main__":
    for name, message in messages().items():
        (PEER / f"{name}.hex").write_text(message.hex() + "\n")
