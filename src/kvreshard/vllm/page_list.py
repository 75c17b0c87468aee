"""Text form of a block list: the runs of its page ids, packed into bits.

A run is a stretch of ids that rise or fall by one. vLLM hands out ids in runs while an engine is young, rising and falling ones; after some
hours they are close to random (docs/reference/parameters.md). This form is small for both: a page takes one bit, a run as many as its id.

| bytes | what |
|---|---|
| 4 | number of pages, little-endian |
| 1 | `width`: bits of an id |
| ceil(pages / 8) | of each page: whether a run begins there |
| ceil(runs / 8) | of each run: whether it falls |
| `width` times ceil(runs / 8) | of each run's first id: the lowest bit of all, then the second bit of all, and so on |

Bits stand from the lowest of a byte on. All of it is base64; an empty list is an empty text.

The number of pages is checked against the bytes that are there before anything is allocated: no short text makes a long list. Whoever
keeps lists of strangers keeps the text, which is 50 times as small as the list of a whole run.
"""

from __future__ import annotations

import binascii
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MAX_ID_BITS = 40
_HEADER = struct.Struct("<IB")


def page_array(ids: Sequence[int]) -> NDArray[np.int64]:
    """A block list of vLLM's as an array, shape (n,); `struct` reads Python's integers in half the time that NumPy takes.

    Raises struct.error for what is no whole number of 64 bits.
    """
    return np.frombuffer(struct.pack(f"{len(ids)}q", *ids), dtype=np.int64)


def write_pages(ids: Sequence[int] | NDArray[np.int64]) -> str:
    """The text of page ids, none of them negative."""
    pages = np.asarray(ids, dtype=np.int64)
    if not pages.size:
        return ""
    steps = np.diff(pages)
    is_near = np.abs(steps) == 1
    begins = np.ones(len(pages), dtype=bool)
    begins[1:] = ~is_near
    begins[2:] |= is_near[:-1] & (steps[1:] != steps[:-1])
    firsts = pages[begins]
    falls = (np.append(steps, 1) == -1)[begins]
    width = max(1, int(firsts.max()).bit_length())
    parts = begins, falls, (firsts & (1 << np.arange(width))[:, None]).astype(bool)
    packed = b"".join(np.packbits(part, axis=-1, bitorder="little").tobytes() for part in parts)
    return binascii.b2a_base64(_HEADER.pack(len(pages), width) + packed, newline=False).decode()


def read_pages(text: str, max_pages: int = 1 << 32) -> NDArray[np.int64]:
    """The page ids of a text, shape (n,). Raises ValueError for what is no such text, and for more than `max_pages`."""
    if not text:
        return np.empty(0, dtype=np.int64)
    raw = binascii.a2b_base64(text, strict_mode=True)
    if len(raw) < _HEADER.size:
        raise ValueError(f"{len(raw)} bytes are no block list; its header alone has {_HEADER.size}")
    num_pages, width = _HEADER.unpack_from(raw)
    if not 1 <= num_pages <= max_pages or not 1 <= width <= MAX_ID_BITS:
        raise ValueError(
            f"{num_pages} pages with ids of {width} bits; it must be 1 to {max_pages} pages, and 1 to {MAX_ID_BITS} bits"
        )
    size, num_bytes = -(-num_pages // 8), len(raw) - _HEADER.size
    if num_bytes < size:
        raise ValueError(f"{num_pages} pages in {num_bytes} bytes; they need {size} or more")
    body = np.frombuffer(raw, dtype=np.uint8, offset=_HEADER.size)
    begins = np.unpackbits(body[:size], count=num_pages, bitorder="little")
    (places,) = begins.nonzero()
    expected = size + (1 + width) * -(-len(places) // 8)
    if num_bytes != expected or not begins[0]:
        raise ValueError(
            f"{num_pages} pages in {len(places)} runs have {num_bytes} bytes, not {expected}, or the first page begins no run"
        )
    bits = np.unpackbits(body[size:].reshape(1 + width, -1), axis=1, count=len(places), bitorder="little")
    firsts = np.einsum("b,br->r", 1 << np.arange(width), bits[1:])
    lengths = np.diff(places, append=num_pages)
    pages = np.arange(num_pages) - np.repeat(places, lengths)
    pages *= np.repeat(1 - 2 * bits[0].astype(np.int64), lengths)
    pages += np.repeat(firsts, lengths)
    if pages.min() < 0:
        raise ValueError("a run falls below page 0")
    return pages
