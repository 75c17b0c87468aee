"""The keyed seal by which a reader sees that a request's block ids and lease are those that its source returned.

1. An engine draws a random key when it starts (`new_key`). Its instance id is a digest of the key (`instance_id_of`), so that only an
   engine with the key can answer under that instance id.
2. Peers get the key with the engine metadata. It is in no log and in no `kv_transfer_params`.
3. The source seals what it publishes (`make_seal`): engine, instance id, request, lease slot and word, block tables, and `details`, whatever
   else its parameters contain.
4. The reader checks the seal before it posts anything (`check_seal`).

Whoever has the key can make seals. An engine without handshake keys gives its metadata, and so the key, to everybody who reaches its port.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvreshard.model.errors import KvReshardError
from kvreshard.model.tables import PageTable
from kvreshard.model.text import plain
from kvreshard.session.lease import Lease

KEY_BYTES = 32
SEAL_BYTES = 16
INSTANCE_ID_BYTES = 16
# BLAKE2 keeps the uses of one key apart.
_FOR_INSTANCE_ID, _FOR_SEAL, _FOR_PROMPT = b"kvr instance id", b"kvr seal", b"kvr prompt"


class SealError(KvReshardError):
    """What a request refers to was not sealed by its source."""


@dataclass(frozen=True, slots=True)
class Seal:
    """`details`: what is sealed beside the lease and the tables. `code`: the keyed digest, `SEAL_BYTES` long."""

    details: bytes
    code: bytes


def new_key() -> bytes:
    """A random key for one start of an engine."""
    return secrets.token_bytes(KEY_BYTES)


def instance_id_of(key: bytes) -> str:
    """The instance id that an engine with this key has: 32 hexadecimal digits. The key does not follow from it."""
    return hashlib.blake2b(key, digest_size=INSTANCE_ID_BYTES, person=_FOR_INSTANCE_ID).hexdigest()


def prompt_key(key: bytes, request: str, word: int) -> bytes:
    """The key of one request's prompt digests: those of two requests cannot be compared without `key`."""
    message = msgspec.msgpack.encode((request, word))
    return hashlib.blake2b(message, key=key, digest_size=KEY_BYTES, person=_FOR_PROMPT).digest()


def make_seal(
    key: bytes, source: tuple[str, str], lease: Lease, tables: Mapping[str, PageTable], details: bytes
) -> Seal:
    """`source`: engine and instance id. `tables`: the source's block table of each group."""
    return Seal(details, _code(key, source, lease, tables, details))


def check_seal(key: bytes, source: tuple[str, str], lease: Lease, tables: Mapping[str, PageTable], seal: Seal) -> None:
    """Raises SealError unless exactly this was sealed with `key`. Compares in constant time."""
    if not hmac.compare_digest(seal.code, _code(key, source, lease, tables, seal.details)):
        raise SealError(
            f"request '{plain(lease.request, 80)}' of engine '{plain(source[0], 80)}': its kv_transfer_params were not sealed by that engine: "
            "lease, block ids, groups, tokens or prompt digests are not those that it returned. Nothing was read; pass "
            "kv_transfer_params on unchanged, each with its own request"
        )


def _code(key: bytes, source: tuple[str, str], lease: Lease, tables: Mapping[str, PageTable], details: bytes) -> bytes:
    """msgpack encodes where each value ends, so that no two statements have the same bytes."""
    listed = [
        (name, table.first_page, table.num_tokens, table.pages.astype("<i8").tobytes())
        for name, table in sorted(tables.items())
    ]
    message = msgspec.msgpack.encode((source, lease, listed, details))
    return hashlib.blake2b(message, key=key, digest_size=SEAL_BYTES, person=_FOR_SEAL).digest()
