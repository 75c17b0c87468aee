"""`kv_transfer_params`: what travels from the prefill engine through a router to the decode engine.

It has the fields of vLLM's NixlConnector, so that routers work unchanged, and one more, `kvreshard`: the instance id of the prefill
engine, the lease, the block lists (`page_list`), what each of them means (first logical page, tokens per page, window), and digests of the
prompt. It travels as JSON: 64-bit words are hexadecimal. `remote_block_ids` has the first block of each list, for routers that look
whether there is one; nothing is read from it.

`write_params` writes at most `MAX_BYTES` bytes of JSON and `MAX_PAGES` pages.

The prefill engine seals everything that decides what is read (`session.seal`): engine, instance id, request, lease, block lists, groups,
tokens and prompt digests. The ranks check the seal with the source's key before they read, so a client that changes or mixes parameters
reads nothing. Host and port are not sealed, since a router may rewrite them.

Routers decode and encode the parameters. `read_params` accepts what stays unambiguous: a whole number as a double, an empty list as an
empty object, a zero, an empty text, an empty list or a null left out, a null for an empty list. The seal then decides. It trusts nothing
else: a missing, wrong or oversized field raises ParamsError with its name, and the decode engine computes the prompt.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec

from kvreshard.model import KvReshardError
from kvreshard.model.tables import PageTable
from kvreshard.model.text import Name, plain
from kvreshard.session.commands import RemoteEngine
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease
from kvreshard.session.seal import SEAL_BYTES, Seal, make_seal, prompt_key
from kvreshard.session.statement import Statement
from kvreshard.vllm.leases import lease_name
from kvreshard.vllm.page_list import read_pages
from kvreshard.vllm.prompt import PromptDigest

VERSION = 1
KEY = "kvreshard"
MAX_GROUPS = 256
# Of all groups together: 16 groups of a million tokens in pages of 16. With ids at random, six such groups have 1.4 MB.
MAX_PAGES = 1 << 20
MAX_BYTES = 1 << 21
MAX_SIZE = 1 << 40
# Names and addresses only: ZeroMQ would read more into a text with ';' or '/'.
_HOST = re.compile(r"(\[[A-Za-z0-9_.:%-]{1,255}\]|[A-Za-z0-9_.:%-]{1,255})\Z")
# Above it, a number that was a double on its way may have been another.
MAX_EXACT = 1 << 53

_PageList = Annotated[str, msgspec.Meta(max_length=MAX_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]


class ParamsError(KvReshardError):
    """The parameters of a request cannot be used, or not be written; the message names the field."""


class GroupParams(msgspec.Struct, frozen=True):
    """What one block list means. `page_tokens` None: one page per request. `is_state`: it belongs to one position.

    `window_tokens`, `chunk_tokens`: how far its layers look back; `ring_tokens`: capacity of a ring; as in `groups.CacheGroup`.
    `first_token`: the first token that its pages hold, where that is not the first of the first page.
    """

    name: Name
    first_page: _Count = 0
    page_tokens: _Size | None = None
    is_state: bool = False
    window_tokens: _Count | None = None
    chunk_tokens: _Count | None = None
    ring_tokens: _Size | None = None
    first_token: _Count | msgspec.UnsetType = msgspec.UNSET

    @property
    def first_held(self) -> int:
        """The first token that its pages hold."""
        return max(self.first_page * (self.page_tokens or 0), self.first_token or 0)


class ReshardParams(msgspec.Struct, frozen=True):
    """The field `kvreshard`. `pages`: as in `RemotePrefill`."""

    version: int
    instance_id: Name
    word: Annotated[str, msgspec.Meta(max_length=32)]
    groups: Annotated[tuple[GroupParams, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    pages: Annotated[dict[Name, _PageList], msgspec.Meta(max_length=MAX_GROUPS)]
    prompt: PromptDigest
    seal: Annotated[str, msgspec.Meta(min_length=2 * SEAL_BYTES, max_length=2 * SEAL_BYTES)]
    slot: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0


class _ListenerParams(msgspec.Struct, frozen=True):
    """Where the prefill engine listens: the fields that a request with a `transfer_id` needs."""

    remote_host: str
    remote_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]

    def __post_init__(self) -> None:
        if not _HOST.match(self.remote_host):
            raise ValueError(f"remote_host is {plain(self.remote_host, 80)!r}; it must be a name or an address")

    @property
    def address(self) -> Address:
        return Address(self.remote_host, self.remote_port)


class _Params(_ListenerParams, frozen=True):
    """The fields that a load needs."""

    remote_engine_id: Name
    remote_request_id: Name
    remote_num_tokens: _Size
    kvreshard: ReshardParams


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A finished prefill: engine, lease, pages, and the prompt it was made of.

    `pages`: the block list of each group, by the group's name, as `page_list.write_pages` gives it: a list stays as short as what has
    travelled. `code`: the source's seal over it, once it has travelled. `made_of`: the block tables of `pages`, where they are at hand.
    `statement`: what its source's listener has said, where it is not finished (`read_statement`).
    """

    remote: RemoteEngine
    lease: Lease
    num_tokens: int
    groups: tuple[GroupParams, ...]
    pages: Mapping[str, str]
    prompt: PromptDigest
    code: bytes = b""
    made_of: Mapping[str, PageTable] | None = field(default=None, compare=False, repr=False)
    statement: Statement | None = field(default=None, compare=False, repr=False)

    @property
    def source(self) -> tuple[RemoteEngine, Lease]:
        """Engine and lease: what is released."""
        return self.remote, self.lease

    def is_of(self, other: RemotePrefill) -> bool:
        """Whether it has the same tokens under the same lease."""
        return (self.source, self.num_tokens) == (other.source, other.num_tokens)

    @property
    def has_state(self) -> bool:
        return any(group.is_state for group in self.groups)

    def tables(self) -> dict[str, PageTable]:
        """The source's block tables. Raises BindError."""
        if self.made_of is not None:
            return dict(self.made_of)
        return {
            group.name: PageTable(read_pages(self.pages[group.name]), self.num_tokens, group.first_page)
            for group in self.groups
        }

    @property
    def seal(self) -> Seal:
        """The seal that was read."""
        return Seal(self._details(), self.code)

    def make_seal(self, key: bytes, tables: Mapping[str, PageTable] | None = None) -> Seal:
        """The seal under a source's key. `tables`: its own, where they are there already. Raises BindError."""
        return make_seal(
            key, self.remote.name, self.lease, self.tables() if tables is None else tables, self._details()
        )

    def is_sealed(self, key: bytes) -> bool:
        """Whether it was sealed with this key. Raises BindError."""
        return hmac.compare_digest(self.code, self.make_seal(key).code)

    def prompt_key(self, key: bytes) -> bytes | None:
        """The key of the digests in `prompt`, from the source's `key`; None if the seal is not that key's. Raises BindError."""
        return prompt_key(key, self.lease.request, self.lease.word) if self.is_sealed(key) else None

    def _details(self) -> bytes:
        """What is sealed beside lease and tables, as bytes. Python's own JSON: a number from a stranger may have any size."""
        return self.details if self.statement is None else self.statement.sealed_details

    @property
    def details(self) -> bytes:
        """What a source says of it beside lease and pages."""
        return json.dumps(msgspec.to_builtins((self.num_tokens, self.groups, self.prompt))).encode()


def write_params(
    prefill: RemotePrefill, sizes: Mapping[str, int], key: bytes, *, is_answer: bool = False
) -> dict[str, Any]:
    """The parameters for the router, sealed with the engine's key. `sizes`: tp_size, dcp_size, pp_size, as routers know them.

    `is_answer`: they go to a prefill engine, with the next turn of the conversation. Raises ParamsError where they are larger than what is
    written and read.
    """
    tables = prefill.tables()
    num_pages = sum(table.pages.size for table in tables.values())
    if num_pages > MAX_PAGES:
        raise ParamsError(f"kv_transfer_params would list {num_pages} pages; at most {MAX_PAGES}")
    ours = ReshardParams(
        VERSION,
        prefill.remote.instance_id,
        f"{prefill.lease.word:016x}",
        prefill.groups,
        dict(prefill.pages),
        prefill.prompt,
        prefill.make_seal(key, tables).code.hex(),
        prefill.lease.slot,
    )
    params = {
        "do_remote_prefill": not is_answer,
        "do_remote_decode": is_answer,
        "remote_block_ids": [table.pages[:1].tolist() for table in tables.values()],
        "remote_engine_id": prefill.remote.engine,
        "remote_request_id": prefill.lease.request,
        "remote_host": prefill.remote.address.host,
        "remote_port": prefill.remote.address.port,
        "remote_num_tokens": prefill.num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        **sizes,
        KEY: msgspec.to_builtins(ours),
    }
    num_bytes = len(json.dumps(params))
    if num_bytes > MAX_BYTES:
        raise ParamsError(f"kv_transfer_params of {num_pages} pages would have {num_bytes} bytes; at most {MAX_BYTES}")
    return params


def transfer_of(params: Mapping[str, Any]) -> str:
    """The `transfer_id` under which a router has sent a request to both engines at once, as a name; empty without.

    Parameters that an engine has made come from a router that waits for the prefill.
    """
    found = params.get("transfer_id")
    return lease_name(found) if isinstance(found, str) and found and KEY not in params else ""


def read_address(params: Mapping[str, Any]) -> Address:
    """Where the prefill engine of a request with a `transfer_id` listens. Raises ParamsError."""
    named = {name: params.get(name) for name in _ListenerParams.__struct_fields__}
    try:
        return msgspec.convert(_restored(named), _ListenerParams).address
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise ParamsError(
            f"kv_transfer_params with a transfer_id need remote_host and remote_port, where the prefill engine listens: {plain(error)}"
        ) from error


def names_source(params: Mapping[str, Any]) -> bool:
    """Whether the parameters of a request say that another engine has a part of it: a prefill, or an answer for the next prefill."""
    return bool(params.get("do_remote_prefill") or (params.get("do_remote_decode") and params.get("remote_block_ids")))


def read_params(params: Mapping[str, Any]) -> RemotePrefill:
    """A prefill to load from. Raises ParamsError."""
    if KEY not in params:
        raise ParamsError(
            f"kv_transfer_params{_origin(params)} have no field '{KEY}', and this engine's connector is ReshardConnector: that engine uses another, as "
            'vLLM\'s own NixlConnector, and needs "kv_connector_module_path":"kvreshard.vllm" too, or the router drops fields that it does not '
            "know"
        )
    version = params[KEY].get("version") if isinstance(params[KEY], Mapping) else None
    if type(version) not in (int, float) or version != VERSION:
        raise ParamsError(
            f"kv_transfer_params['{KEY}'] is of version {plain(version, 40)}; this side reads {VERSION}: use one version on "
            "both sides"
        )
    try:
        read = msgspec.convert(_restored(params), _Params)
        word, code = int(read.kvreshard.word, 16), bytes.fromhex(read.kvreshard.seal)
    except (msgspec.ValidationError, ValueError, OverflowError, RecursionError) as error:
        raise ParamsError(f"kv_transfer_params cannot be used: {plain(error)}") from error
    if not 0 < word < 1 << 64:
        raise ParamsError(f"kv_transfer_params: word is {word}; it must be positive, and have 64 bits at most")
    pages = _read_lists(read.kvreshard)
    remote = RemoteEngine(read.remote_engine_id, read.kvreshard.instance_id, read.address)
    lease = Lease(read.remote_request_id, read.kvreshard.slot, word)
    return RemotePrefill(
        remote, lease, read.remote_num_tokens, read.kvreshard.groups, pages, read.kvreshard.prompt, code
    )


def read_statement(statement: Statement, address: Address) -> RemotePrefill:
    """A prefill that is under way, as its source's listener at `address` states it. Raises ParamsError."""
    try:
        num_tokens, groups, prompt = _details_decoder.decode(statement.details)
        tables = statement.tables()
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, KvReshardError, RecursionError) as error:
        raise ParamsError(f"what the listener at {address} says of a prefill cannot be used: {plain(error)}") from error
    names = [group.name for group in groups]
    if len(set(names)) != len(names) or not tables.keys() <= set(names) or num_tokens != statement.num_tokens:
        raise ParamsError(
            f"what the listener at {address} says of a prefill cannot be used: it describes groups {plain(names)} of {num_tokens} tokens and "
            f"lists pages of {plain(sorted(tables))} of {statement.num_tokens}"
        )
    return RemotePrefill(
        RemoteEngine(statement.engine, statement.instance_id, address),
        statement.lease,
        num_tokens,
        groups,
        {},
        prompt,
        statement.code,
        made_of=tables,
        statement=statement,
    )


_details_decoder = msgspec.json.Decoder(
    tuple[int, Annotated[tuple[GroupParams, ...], msgspec.Meta(max_length=MAX_GROUPS)], PromptDigest]
)


def _read_lists(read: ReshardParams) -> dict[str, str]:
    """The block list of each group. Raises ParamsError for what is none, for lists of no group, and for too many pages."""
    names = [group.name for group in read.groups]
    if len(set(names)) != len(names) or not read.pages.keys() <= set(names):
        raise ParamsError(
            f"kv_transfer_params describe groups {plain(names)} and list pages of {plain(sorted(read.pages))}; they must be the same, each once"
        )
    left = MAX_PAGES
    for name, text in read.pages.items():
        try:
            left -= read_pages(text, left).size
        except ValueError as error:
            raise ParamsError(f"kv_transfer_params: pages of group '{name}': {plain(error)}") from error
    return {name: read.pages.get(name, "") for name in names}


def _origin(params: Mapping[str, Any]) -> str:
    """Which engine wrote the parameters, as far as they say it in plain texts."""
    engine, host = params.get("remote_engine_id"), params.get("remote_host")
    if not isinstance(engine, str) or not isinstance(host, str):
        return ""
    return f" of engine {plain(engine, 80)} at {plain(host, 80)}"


def _restored(value: Any) -> Any:
    """The parameters as they were before a router encoded them anew. Raises ParamsError for a number that may have changed."""
    if isinstance(value, Mapping):
        fields = {key: _restored(part) for key, part in value.items() if part is not None}
        return fields or []  # none of our fields is an empty object
    if isinstance(value, list | tuple):
        return [_restored(part) for part in value]
    if isinstance(value, float) and value.is_integer():
        if abs(value) > MAX_EXACT:
            raise ParamsError(
                f"kv_transfer_params cannot be used: {value:g} is a number that was made a double on its way, and may have been another; "
                "use a router that keeps whole numbers"
            )
        return int(value)
    return value
