"""What a source says of a prefill that is not finished: a question by the router's `transfer_id`, and a sealed statement.

1. A reader asks the source's listener for some transfers at once, and says what it knows of each (`handshake_messages.TransferQuestion`).
2. The listener holds the question until there is something new of one of them, for some seconds at most. It answers for each of which it
   has something: `found` with a statement, or `ended` with the reason why nothing will come.
3. A statement names the lease, the pages that the reader does not know, and whether the prefill is complete. Only then it lists the groups
   that are read at the end. Its seal covers all of that, under the source's key.

Ids are no secret. Whoever asks gets pages of the prompt that was prefilled under the id; a reader loads only what its own prompt shares with
it (`vllm.prompt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
import numpy as np

from kvreshard.model.form import SAME_RELEASE
from kvreshard.model.tables import PageTable
from kvreshard.model.text import MAX_NAME, Name, plain
from kvreshard.session.handshake_messages import MAX_GROUPS, MAX_TEXT, MAX_TRANSFERS, HandshakeError, read_answer
from kvreshard.session.lease import Lease
from kvreshard.session.seal import SEAL_BYTES, Seal, SealError, check_seal, make_seal

FORM = "kvreshard.statement"
VERSION = 1
MAX_DETAILS_BYTES = 1 << 20
# Page ids of all groups of a million tokens.
MAX_STATEMENT_BYTES = 32 << 20
_PAGE = np.dtype("<i8")
_Details = Annotated[bytes, msgspec.Meta(max_length=MAX_DETAILS_BYTES)]

State = Literal["unheard", "heard", "found", "ended"]
"""`unheard`: no request with this id has come; `heard`: it has, and is not scheduled, or there are no pages to tell of."""


class PageList(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one group from page `first_page` on, as 64-bit numbers, least significant byte first."""

    first_page: Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
    pages: bytes

    @classmethod
    def of(cls, table: PageTable) -> PageList:
        return cls(table.first_page, table.pages.astype(_PAGE).tobytes())

    def table(self, num_tokens: int) -> PageTable:
        """The block table of a request of so many tokens. Raises ValueError."""
        return PageTable(np.frombuffer(self.pages, _PAGE), num_tokens, self.first_page)


class Statement(msgspec.Struct, frozen=True):
    """Pages of a prefill of `num_tokens` tokens on an engine. `details`: what else that says, for whoever orders a load."""

    engine: Name
    instance_id: Name
    request: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    slot: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    word: Annotated[int, msgspec.Meta(ge=1)]
    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    pages: Annotated[dict[Name, PageList], msgspec.Meta(max_length=MAX_GROUPS)]
    is_complete: bool
    details: _Details
    code: Annotated[bytes, msgspec.Meta(min_length=SEAL_BYTES, max_length=SEAL_BYTES)] = bytes(SEAL_BYTES)

    def tables(self) -> dict[str, PageTable]:
        """The block tables, from the pages on that are listed. Raises ValueError or BindError."""
        return {name: listed.table(self.num_tokens) for name, listed in self.pages.items()}

    def sealed(self, key: bytes, tables: Mapping[str, PageTable]) -> Statement:
        """The same with the seal of its engine. `tables`: those in `pages`."""
        code = make_seal(key, (self.engine, self.instance_id), self.lease, tables, self.sealed_details).code
        return msgspec.structs.replace(self, code=code)

    def check(self, key: bytes, source: tuple[str, str], tables: Mapping[str, PageTable]) -> None:
        """Raises SealError unless the source has sealed exactly this."""
        try:
            check_seal(key, source, self.lease, tables, Seal(self.sealed_details, self.code))
        except SealError as error:
            raise SealError(
                f"what the listener of engine '{plain(source[0], 80)}' says of request '{plain(self.request, 80)}' was not sealed by that engine: "
                "lease, pages or tokens are not those of its prefill. Nothing more was read; is another engine behind that address?"
            ) from error

    @property
    def lease(self) -> Lease:
        return Lease(self.request, self.slot, self.word)

    @property
    def sealed_details(self) -> bytes:
        """What is sealed beside the lease and the tables."""
        return msgspec.msgpack.encode((FORM, self.num_tokens, self.is_complete, self.details))


class Answer(msgspec.Struct, frozen=True):
    """Where a transfer stands. `text`: why it has ended, for people. `left_s`: seconds that its prefill will compute after the step that is
    under way, as its source expects; None if nobody knows.
    """

    state: State
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""
    statement: Statement | None = None
    left_s: float | None = None


class _Reply(msgspec.Struct, frozen=True):
    """Answers by the place of the transfer in the question."""

    form: str
    version: int
    answers: Annotated[dict[int, Answer], msgspec.Meta(max_length=MAX_TRANSFERS)]


_decoder = msgspec.msgpack.Decoder(_Reply)


def encode_reply(answers: Mapping[int, Answer]) -> bytes:
    """The bytes of an answer."""
    return msgspec.msgpack.encode(_Reply(FORM, VERSION, dict(answers)))


def read_reply(reply: bytes) -> Mapping[int, Answer]:
    """The answers of a listener. Raises HandshakeError for anything else."""
    try:
        read = _decoder.decode(reply)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise HandshakeError(f"no answer to a question for transfers: {read_answer(reply) or plain(error)}") from None
    if read.form != FORM or read.version != VERSION:
        raise HandshakeError(
            f"the answer to a question for transfers is '{plain(read.form, 80)}' of version {read.version}; this side reads version "
            f"{VERSION}: {SAME_RELEASE}"
        )
    if any((answer.statement is None) == (answer.state == "found") for answer in read.answers.values()):
        raise HandshakeError("an answer to a question for transfers has no statement, or one too many")
    return read.answers
