"""For random pairs of engines: do digests agree when the bytes do, follow their definition, and differ when anything is wrong?

Pairs are those of `tests.pairs.random_pairs`: all kinds, and layouts that come from no kind. The destination's memory is what
the slow oracle leaves; corruptions are written cell by cell by a reference that shares no code with `tools/`.
"""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pairs.random_pairs import LAYERS, PairLayer, make_pair
from tests.unit.tools import slow_digest
from tests.unit.tools.engines import Arrived, Engine, arrive_pair, small
from tests.unit.tools.slow_digest import Cell

from kvreshard.model.tables import Tokens
from kvreshard.plan import RankTransfer
from kvreshard.tools.digest import Digest, compare, cut_tokens

SEEDS = st.integers(0, 2**31)
KEYS = st.binary(min_size=1, max_size=64)
pairs = given(st.sampled_from(LAYERS), SEEDS, KEYS)

SRC_ENGINES = (Engine(), Engine(3, "HND", 7), Engine(4, "BHLNC", 16), Engine(2, "HND", 32, "tiles", 1, 2))
DST_ENGINES = (
    Engine(2, "HND", 24),
    Engine(8, "NHD", 5, "slots"),
    Engine(4, "NHD", 8, "separate", 2),
    Engine(1, "HND", 16, "planes-kt"),
)


@pairs
def test_both_sides_of_every_transfer_agree(layer: PairLayer, seed: int, key: bytes) -> None:
    arrived = arrive_pair(make_pair(layer, seed))
    verdict = compare(arrived.digests("src", key), arrived.digests("dst", key))
    assert not verdict.differences, str(verdict)
    assert verdict.num_bytes == sum(digest.num_bytes for digest in arrived.digests("dst", key).values())


@settings(max_examples=max(1, settings.default.max_examples // 4))
@pairs
def test_what_a_rank_gets_is_what_the_definition_says_of_its_cells(layer: PairLayer, seed: int, key: bytes) -> None:
    """However many ranks it comes from, and whoever else has a replica of it: each cell counts once."""
    arrived = arrive_pair(make_pair(layer, seed))
    for field, rank in product(arrived.fields(), arrived.dst.ranks):
        position = arrived.request.dst_tables[arrived.group_of("dst", field)].num_tokens
        cells = arrived.cells(field, rank.rank)
        expected = Digest(*slow_digest.digest_of_cells(key, arrived.dst.field_by_name[field], cells, position))
        assert arrived.of_rank("src", field, rank.rank, key) == expected, field
        assert arrived.of_rank("dst", field, rank.rank, key) == expected, field


@pairs
def test_digests_of_token_ranges_add_up(layer: PairLayer, seed: int, key: bytes) -> None:
    arrived = arrive_pair(make_pair(layer, seed))

    def cut(transfer: RankTransfer) -> list[tuple[Tokens, ...]]:
        intervals = tuple(arrived.request.intervals[transfer.dst_group.name])
        if not intervals or transfer.is_state:
            return [intervals] if intervals else []
        return list(cut_tokens(intervals, -(-5 // transfer.tokens_per_index) * transfer.tokens_per_index))

    whole, parts = defaultdict[object, Digest](lambda: Digest(0, 0)), defaultdict[object, Digest](lambda: Digest(0, 0))
    for found, digests in ((whole, arrived.digests("src", key)), (parts, arrived.parts("dst", key, cut))):
        for part, digest in digests.items():
            found[part.field, part.src_rank, part.dst_rank, part.box] += digest
    assert {part: digest for part, digest in whole.items() if digest.num_bytes} == {
        part: digest for part, digest in parts.items() if digest.num_bytes
    }


@pairs
def test_one_flipped_bit_is_found_wherever_it_is(layer: PairLayer, seed: int, key: bytes) -> None:
    arrived = arrive_pair(make_pair(layer, seed))
    rng = np.random.default_rng(seed)
    fields = [field for field in arrived.fields() if arrived.cells(field)]
    if not fields:
        return
    before = arrived.digests("src", key)
    field = str(rng.choice(fields))
    cells = arrived.cells(field)
    cell = list(cells)[int(rng.integers(len(cells)))]
    content = bytearray(cells[cell])
    content[int(rng.integers(len(content)))] ^= 1 << int(rng.integers(8))
    arrived.corrupt(field, {cell: bytes(content)})
    verdict = compare(before, arrived.digests("dst", key))
    assert {difference.part.field for difference in verdict.differences} == {field}


def moved(cells: dict[Cell, bytes], axis: int, one: int, two: int) -> dict[Cell, bytes]:
    """The cells with coordinates `one` and `two` of an axis exchanged, as far as both are there."""
    exchange = {one: two, two: one}
    found = {}
    for cell in cells:
        other = (*cell[:axis], exchange.get(cell[axis], cell[axis]), *cell[axis + 1 :])
        found[cell] = cells.get(other, cells[cell])
    return found


def swap_fields(arrived: Arrived, one: str, two: str) -> set[str]:
    first, second = arrived.cells(one), arrived.cells(two)
    arrived.corrupt(one, second)
    arrived.corrupt(two, first)
    return {one, two}


def swap_heads(arrived: Arrived) -> set[str]:
    arrived.corrupt("layers.1.k", moved(arrived.cells("layers.1.k"), 1, 0, 3))
    return {"layers.1.k"}


def swap_tokens(arrived: Arrived) -> set[str]:
    for name in ("layers.0.k", "layers.0.v"):
        arrived.corrupt(name, moved(arrived.cells(name), 0, 20, 21))
    return {"layers.0.k", "layers.0.v"}


def swap_channels(arrived: Arrived) -> set[str]:
    arrived.corrupt("layers.0.v", moved(arrived.cells("layers.0.v"), 2, 4, 5))
    return {"layers.0.v"}


def swap_pages(arrived: Arrived) -> set[str]:
    size = arrived.dst.group_by_name["attention"].tokens_per_page or 0
    cells = arrived.cells("layers.1.v")
    for inside in range(size):
        cells = (
            moved(cells, 0, size + inside, 2 * size + inside)
            if size * 3 <= 45
            else moved(cells, 0, 5 + inside, 25 + inside)
        )
    arrived.corrupt("layers.1.v", cells)
    return {"layers.1.v"}


def swap_k_and_v(arrived: Arrived) -> set[str]:
    return swap_fields(arrived, "layers.0.k", "layers.0.v")


def swap_layers(arrived: Arrived) -> set[str]:
    return swap_fields(arrived, "layers.0.k", "layers.1.k") | swap_fields(arrived, "layers.0.v", "layers.1.v")


def swap_states(arrived: Arrived) -> set[str]:
    return swap_fields(arrived, "layers.2.ssm", "layers.3.ssm")


def swap_state_heads(arrived: Arrived) -> set[str]:
    arrived.corrupt("layers.2.ssm", moved(arrived.cells("layers.2.ssm"), 0, 1, 2))
    return {"layers.2.ssm"}


def swap_groups_of_a_state(arrived: Arrived) -> set[str]:
    return swap_fields(arrived, "layers.2.conv.B", "layers.2.conv.C")


def zero_a_page(arrived: Arrived) -> set[str]:
    cells = arrived.cells("layers.1.k")
    arrived.corrupt("layers.1.k", {cell: bytes(len(cells[cell])) for cell in cells if 16 <= cell[0] < 32})
    return {"layers.1.k"}


def leave_a_page_of_another_request(arrived: Arrived) -> set[str]:
    rng = np.random.default_rng(99)
    for name in ("layers.0.k", "layers.0.v"):
        cells = arrived.cells(name)
        arrived.corrupt(name, {cell: rng.bytes(2) for cell in cells if 16 <= cell[0] < 24})
    return {"layers.0.k", "layers.0.v"}


def add_and_subtract(arrived: Arrived) -> set[str]:
    """Differences that cancel in a plain sum: +1 in one cell, -1 in its neighbour."""
    cells = arrived.cells("layers.0.k")
    first, second = [cell for cell in cells if cell[0] == 10 and cell[1] == 1][:2]
    value = [int.from_bytes(cells[cell], "little") for cell in (first, second)]
    changed = [(value[0] + 1) % 65536, (value[1] - 1) % 65536]
    arrived.corrupt("layers.0.k", dict(zip((first, second), (v.to_bytes(2, "little") for v in changed), strict=True)))
    return {"layers.0.k"}


def flip_all_signs(arrived: Arrived) -> set[str]:
    """Only top bits differ, in an even number of cells: what sums modulo a power of two are blind to."""
    cells = arrived.cells("layers.1.v")
    arrived.corrupt("layers.1.v", {cell: bytes([old[0], old[1] ^ 0x80]) for cell, old in cells.items()})
    return {"layers.1.v"}


WRONGS = (
    swap_heads, swap_tokens, swap_channels, swap_pages, swap_k_and_v, swap_layers, swap_states, swap_state_heads,
    swap_groups_of_a_state, zero_a_page, leave_a_page_of_another_request, add_and_subtract, flip_all_signs,
)  # fmt: skip


@pytest.mark.parametrize("wrong", WRONGS, ids=lambda wrong: wrong.__name__)
@pytest.mark.parametrize("number", range(4))
def test_wrong_bytes_of_right_length_are_found_and_their_fields_named(wrong, number: int, run_seed: int) -> None:
    arrived = small(SRC_ENGINES[number], DST_ENGINES[(number + run_seed) % 4], run_seed)
    key = b"key of this request" + str(run_seed).encode()
    before = arrived.digests("src", key)
    assert compare(before, arrived.digests("dst", key)).equal
    fields = wrong(arrived)
    verdict = compare(before, arrived.digests("dst", key))
    assert {difference.part.field for difference in verdict.differences} == fields
    sums = [sum(arrived.digests(side, key).values(), Digest(0, 0)) for side in ("src", "dst")]
    assert sums[0] != sums[1], "the digest of all fields together must differ too"
