"""What do `kv_transfer_params` say on their way from prefill engine to router to decode engine?

The fields of vLLM's NixlConnector, so that routers work unchanged, and one of ours, `kvreshard`: the incarnation of the
prefill engine, the lease, what each block list means (which logical page it starts with, tokens per page, window), and
digests of the prompt. It is JSON on the way: 64-bit words travel in hexadecimal. A seal over what the request refers to
(lease, block lists, tokens) tells parameters that were mixed up or shortened on their way from those that arrived whole; other
block ids would be read without complaint, and another request's text served. It is no secret and no signature.

`read_params` believes nothing: a missing or wrong field gives a ParamsError with its name, and the decode engine computes
the prompt itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvreshard.model import KvReshardError
from kvreshard.model.tables import PageTable
from kvreshard.session.handshake import Address
from kvreshard.session.orders import RemoteEngine, RemoteLease
from kvreshard.vllm.prompt import PromptDigest

VERSION = 1
KEY = "kvreshard"


class ParamsError(KvReshardError):
    """The parameters of a request cannot be used; the message names the field."""


class GroupParams(msgspec.Struct, frozen=True):
    """What one block list means. `page_tokens` None: one page per request. `is_state`: it stands at one position.

    `window_tokens`, `chunk_tokens`: how far its layers look back, as in `groups.CacheGroup`.
    """

    name: str
    first_page: int
    page_tokens: int | None = None
    is_state: bool = False
    window_tokens: int | None = None
    chunk_tokens: int | None = None


class ReshardParams(msgspec.Struct, frozen=True):
    """Our own field."""

    version: int
    incarnation: str
    slot: int
    word: str
    groups: tuple[GroupParams, ...]
    prompt: PromptDigest
    seal: str


class _Params(msgspec.Struct, frozen=True):
    """The fields that loading needs, ours and theirs."""

    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: tuple[tuple[int, ...], ...]
    remote_num_tokens: int
    kvreshard: ReshardParams


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """A finished prefill: who holds it, under which lease, where its pages are, what it was made of."""

    remote: RemoteEngine
    lease: RemoteLease
    num_tokens: int
    groups: tuple[GroupParams, ...]
    pages: tuple[tuple[int, ...], ...]
    prompt: PromptDigest

    @property
    def has_state(self) -> bool:
        return any(group.is_state for group in self.groups)

    def tables(self) -> dict[str, PageTable]:
        """The source's block tables. Raises BindError."""
        return {
            group.name: PageTable(list(pages), self.num_tokens, group.first_page)
            for group, pages in zip(self.groups, self.pages, strict=True)
        }


def write_params(prefill: RemotePrefill, sizes: Mapping[str, int], *, is_prefill: bool = True) -> dict[str, Any]:
    """The parameters to return to the router. `sizes`: tp_size, dcp_size, pp_size, as routers know them."""
    ours = ReshardParams(
        VERSION,
        prefill.remote.incarnation,
        prefill.lease.slot,
        f"{prefill.lease.word:016x}",
        prefill.groups,
        prefill.prompt,
        _seal(prefill),
    )
    return {
        "do_remote_prefill": is_prefill,
        "do_remote_decode": not is_prefill,
        "remote_block_ids": [list(pages) for pages in prefill.pages],
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


def read_params(params: Mapping[str, Any]) -> RemotePrefill:
    """A prefill to load from. Raises ParamsError."""
    if KEY not in params:
        raise ParamsError(
            f"kv_transfer_params have no field '{KEY}'; the prefill engine does not use ReshardConnector, or the router drops "
            "fields that it does not know"
        )
    version = params[KEY].get("version") if isinstance(params[KEY], Mapping) else None
    if version != VERSION:
        raise ParamsError(
            f"kv_transfer_params['{KEY}'] is of version {version}; this side reads {VERSION}: use one version on both sides"
        )
    try:
        read = msgspec.convert(params, _Params)
        word = int(read.kvreshard.word, 16)
    except (msgspec.ValidationError, ValueError) as error:
        raise ParamsError(f"kv_transfer_params cannot be used: {error}") from error
    groups, pages = read.kvreshard.groups, read.remote_block_ids
    if len(groups) != len(pages):
        raise ParamsError(f"kv_transfer_params describe {len(groups)} groups and list blocks of {len(pages)}")
    _check_numbers(read, groups, word)
    remote = RemoteEngine(
        read.remote_engine_id, read.kvreshard.incarnation, Address(read.remote_host, read.remote_port)
    )
    lease = RemoteLease(read.remote_request_id, read.kvreshard.slot, word)
    prefill = RemotePrefill(remote, lease, read.remote_num_tokens, groups, pages, read.kvreshard.prompt)
    if read.kvreshard.seal != _seal(prefill):
        raise ParamsError(
            "kv_transfer_params do not fit their seal: the request id, the number of tokens or the block ids are not those that "
            "the prefill engine returned; pass them on unchanged, each with its own request"
        )
    return prefill


def _seal(prefill: RemotePrefill) -> str:
    """A digest of what the parameters refer to; where the engine is found may be rewritten on the way."""
    referred = (
        (prefill.remote.engine, prefill.remote.incarnation),
        (prefill.lease.request, prefill.lease.slot, prefill.lease.word),
        (prefill.num_tokens, prefill.groups, prefill.pages, prefill.prompt),
    )
    return hashlib.blake2b(msgspec.msgpack.encode(referred), digest_size=8).hexdigest()


def _check_numbers(read: _Params, groups: Sequence[GroupParams], word: int) -> None:
    ranges = {
        "remote_port": (read.remote_port, 1, 65535),
        "remote_num_tokens": (read.remote_num_tokens, 1, 1 << 40),
        "slot": (read.kvreshard.slot, 0, 1 << 32),
        "word": (word, 1, (1 << 64) - 1),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ParamsError(f"kv_transfer_params: {name} is {value}; it must be from {low} to {high}")
    for group in groups:
        sizes = (group.page_tokens, group.window_tokens, group.chunk_tokens)
        if group.first_page < 0 or any(size is not None and size < 0 for size in sizes) or group.page_tokens == 0:
            raise ParamsError(f"kv_transfer_params: group '{group.name}' has a size that is not positive: {group}")
