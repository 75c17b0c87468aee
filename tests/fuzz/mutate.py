"""How does a good message become a bad one? Bytes are changed, or values within the message, where it can be decoded at all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

HOSTILE: tuple[Any, ...] = (
    *(0, 1, -1, 2, 255, 2**16, 2**31, 2**32, 2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(
        None,
        True,
        False,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "a\nb",
        "\u202e",
        "x" * 300,
        b"",
        b"\xff",
        [],
        {},
        [[]],
        [1] * 300,
    ),
)
BYTES = (0x00, 0x01, 0x7F, 0x80, 0x90, 0xA0, 0xC0, 0xC1, 0xC6, 0xCF, 0xD3, 0xD9, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF)
MAX_BYTES = 20_000


def mutate(rng: random.Random, corpus: Sequence[bytes]) -> bytes:
    """One new input from the corpus."""
    data = rng.choice(corpus)
    if rng.random() < 0.5:
        changed = change_value(rng, data)
        if changed is not None:
            return changed
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(_EDITS)(rng, data, corpus)
    return data[:MAX_BYTES]


def change_value(rng: random.Random, data: bytes) -> bytes | None:
    """One or two values of a msgpack or JSON message replaced, removed or doubled; None if it is neither."""
    is_json = data[:1] in (b"{", b"[")
    try:
        tree: Any = json.loads(data) if is_json else msgspec.msgpack.decode(data)
    except (ValueError, RecursionError, msgspec.DecodeError):
        return None
    root = [tree]
    for _ in range(rng.choice((1, 1, 2))):
        _replace_somewhere(rng, root)
    try:
        return json.dumps(root[0]).encode() if is_json else msgspec.msgpack.encode(root[0])
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _replace_somewhere(rng: random.Random, root: list[Any]) -> None:
    """Walk down at random and change what is found there."""
    holder: Any = root
    key: Any = 0
    while isinstance(holder[key], dict | list) and holder[key] and (holder is root or rng.random() < 0.85):
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    how = rng.random()
    if how < 0.1 and holder is not root:
        del holder[key]
    elif how < 0.2 and isinstance(holder, list):
        holder.extend([holder[key]] * rng.choice((1, 2, 20)))
    elif how < 0.5 and isinstance(holder[key], int):
        holder[key] += rng.choice((-2, -1, 1, 2, holder[key], 8 * holder[key]))
    elif how < 0.6 and isinstance(holder, dict):
        holder[rng.choice(("x", "a\nb", "form"))] = holder.pop(key)
    else:
        holder[key] = rng.choice(HOSTILE)


def _flip(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    if not data:
        return b"\x00"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _set(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + bytes([rng.choice(BYTES)]) + data[at + 1 :]


def _insert(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 2, 4, 8))) + data[at:]


def _cut(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 10_000)) :]


def _splice(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    other = rng.choice(corpus)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _repeat(rng: random.Random, data: bytes, corpus: Sequence[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at : at + rng.choice((1, 3, 30))] * rng.choice((2, 50)) + data[at:]


_EDITS: tuple[Callable[[random.Random, bytes, Sequence[bytes]], bytes], ...] = (
    _flip,
    _flip,
    _set,
    _set,
    _insert,
    _cut,
    _splice,
    _repeat,
)
