"""Block lists as text: the same ids come back, as a plain reading of the table says, and no text makes more memory than it pays for."""

from __future__ import annotations

import base64
import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvreshard.vllm.page_list import MAX_ID_BITS, page_array, read_pages, write_pages

RUNS = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(-40, 40)), max_size=30)


def plainly_read(text: str) -> list[int]:
    """The table of `page_list`, bit by bit."""
    if not text:
        return []
    data = base64.b64decode(text)
    num_pages, width, at = int.from_bytes(data[:4], "little"), data[4], 5

    def take(count: int) -> list[bool]:
        nonlocal at
        size = (count + 7) // 8
        taken = int.from_bytes(data[at : at + size], "little")
        at += size
        return [bool(taken >> i & 1) for i in range(count)]

    begins = take(num_pages)
    falls = take(sum(begins))
    planes = [take(sum(begins)) for _ in range(width)]
    firsts = [sum(plane[i] << bit for bit, plane in enumerate(planes)) for i in range(sum(begins))]
    assert at == len(data)
    ids: list[int] = []
    run = -1
    for begin in begins:
        run += begin
        ids.append(firsts[run] if begin else ids[-1] + (-1 if falls[run] else 1))
    return ids


def expanded(runs: list[tuple[int, int]]) -> list[int]:
    return [40 + first + i * (1 if count > 0 else -1) for first, count in runs for i in range(abs(count))]


@given(runs=RUNS)
@example(runs=[])
@example(runs=[(0, 1)])
@example(runs=[((1 << MAX_ID_BITS) - 60, 12)])
def test_ids_are_read_as_they_were_written(runs: list[tuple[int, int]]) -> None:
    ids = expanded(runs)
    text = write_pages(ids)
    assert text.isascii()
    assert read_pages(text, 10**6).tolist() == plainly_read(text) == ids


@given(ids=st.lists(st.integers(0, 6), max_size=60))
def test_ids_that_turn_and_repeat_are_read_as_they_were_written(ids: list[int]) -> None:
    """Neighbours everywhere: runs that meet, turn and share an end."""
    text = write_pages(ids)
    assert read_pages(text).tolist() == plainly_read(text) == ids


@pytest.mark.parametrize(
    ("ids", "most"),
    [
        (range(8192), 8192 * (1 + 1 / 100) + 100),  # one bit a page
        (range(9000, 808, -1), 8192 * (1 + 1 / 100) + 100),
        (random.Random(0).sample(range(1 << 17), 8192), 8192 * 19 + 100),  # two more than an id has
        ([i for i in range(16384) if i % 64 < 32], 8192 * (1 + 16 / 32) + 100),
    ],
    ids=["a rising run", "a falling run", "at random", "runs of 32"],
)
def test_lists_are_small(ids: list[int], most: float) -> None:
    """In bits before base64, which makes 4 bytes of 3."""
    assert len(base64.b64decode(write_pages(ids))) * 8 <= most
    assert len(write_pages(ids)) <= len(base64.b64decode(write_pages(ids))) * 4 / 3 + 4


def made(num_pages: int, width: int, body: bytes) -> str:
    return base64.b64encode(num_pages.to_bytes(4, "little") + bytes([width]) + body).decode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x", "1 more than a multiple of 4"),
        ("xxx", "padding"),
        ("AAAA\n", "Only base64 data"),
        ("é", "ASCII"),
        ("[4, 9]", "Only base64 data"),
        (base64.b64encode(b"abc").decode(), "3 bytes are no block list; its header alone has 5"),
        (made(0, 3, b""), "0 pages with ids of 3 bits"),
        (made(1001, 3, bytes(400)), "1001 pages with ids of 3 bits; it must be 1 to 1000 pages, and 1 to 40 bits"),
        (made((1 << 32) - 1, 3, b"\1"), "4294967295 pages with"),
        (made(8, 0, b"\1\0"), "8 pages with ids of 0 bits"),
        (made(8, 41, b"\1" + bytes(42)), "8 pages with ids of 41 bits"),
        (made(8, 3, b""), "8 pages in 0 bytes; they need 1 or more"),
        (made(1000, 3, b"\1"), "1000 pages in 1 bytes; they need 125 or more"),
        (made(8, 3, b"\1\0\0\0"), "8 pages in 1 runs have 4 bytes, not 5"),
        (made(8, 3, b"\1\0\0\0\0\0"), "8 pages in 1 runs have 6 bytes, not 5"),
        (made(8, 3, b"\2\0\0\0\0"), "or the first page begins no run"),
        (made(8, 3, b"\0"), "8 pages in 0 runs have 1 bytes, not 1, or the first page begins no run"),
        (made(8, 3, b"\1\1\1\1\0"), "a run falls below page 0"),
    ],
)
def test_what_is_no_block_list_is_refused(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_pages(text, 1000)


@given(data=st.binary(max_size=60))
def test_any_bytes_are_read_plainly_or_refused(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    try:
        ids = read_pages(text, 1000).tolist()
    except ValueError:
        return
    assert ids == plainly_read(text)
    assert read_pages(write_pages(ids)).tolist() == ids


@pytest.mark.parametrize("num_pages", [1 << 20, 1 << 31, (1 << 32) - 1])
def test_many_pages_in_few_bytes_take_no_memory(num_pages: int) -> None:
    text = made(num_pages, 40, b"\1" * 1000)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="they need"):
            read_pages(text, num_pages)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@given(ids=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=50))
def test_the_array_of_a_block_list_has_its_ids(ids: list[int]) -> None:
    found = page_array(ids)
    assert found.dtype == np.int64
    assert found.shape == (len(ids),)
    assert found.tolist() == ids


@pytest.mark.parametrize("wrong", [1.5, None, "7", 1 << 63])
def test_what_is_no_page_id_is_not_rounded_to_one(wrong: object) -> None:
    with pytest.raises(struct.error):
        page_array([3, wrong])  # type: ignore[list-item]  # that is the test
