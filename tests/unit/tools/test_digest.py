"""Known answers, keys, positions, refusals, and the message that a wrong transfer ends in."""

import itertools
import re

import numpy as np
import pytest
from tests.unit.tools import slow_digest
from tests.unit.tools.engines import ArrayBytes, Engine, small

from kvreshard.kinds import Attention, Latent, Opaque, Ring, Style
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble, relocate
from kvreshard.model import Axis, EngineLayout, Field
from kvreshard.model.changed import replace
from kvreshard.model.errors import BindError
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import compile_route
from kvreshard.tools.cells import INDICES_PER_WINDOW
from kvreshard.tools.digest import UNITS_AT_ONCE, Digest, compare, digest_transfers, weights
from kvreshard.transport.local import HostMemory, LocalMemory

KEY = b"key"


def latent(page: int = 4, pages: int = 8, channels: int = 6, per_state: int = 1, null_page: int | None = None):
    kind = Latent(channels, "bfloat16", tokens_per_state=per_state)
    return assemble(
        "one",
        [Layer("a", kind)],
        [PagedGroup("g", ("a",), page)],
        Grid(),
        order="NHD",
        num_pages=pages,
        null_page=null_page,
    )


def digest(
    layout: EngineLayout, tables: dict, intervals: dict, memory: LocalMemory, key: bytes = KEY, rank: int = 0
) -> dict[str, Digest]:
    """Per field the digest of what a rank would read from an engine like its own."""
    request = Request(tables, {}, intervals, {})
    found = digest_transfers(compile_route(layout, layout, rank).transfers, "src", request, memory, key)
    return {
        name: sum((one for part, one in found.items() if part.field == name), Digest(0, 0))
        for name in {part.field for part in found}
    }


def memory_of(layout, seed: int = 0):
    region = layout.ranks[0].regions[0]
    content = np.random.default_rng(seed).integers(0, 256, region.size_bytes, dtype=np.uint8)
    return content, ArrayBytes({region.address: content})


def test_a_digest_can_be_worked_out_by_hand() -> None:
    """Two tokens of one channel of one byte: 7 and 9."""
    layout = assemble(
        "one", [Layer("a", Latent(1, "uint8"))], [PagedGroup("g", ("a",), 2)], Grid(), order="NHD", num_pages=1
    )
    reader = ArrayBytes({layout.ranks[0].regions[0].address: np.array([7, 9], dtype=np.uint8)})
    found = digest(layout, {"g": PageTable([0], 2)}, {"g": [(0, 2)]}, reader, KEY)
    weight = slow_digest.weight
    presence = weight(KEY, "presence", 0)
    rows = [weight(KEY, "row\0a.latent", token) for token in (0, 1)]
    expected = weight(KEY, "unit", 0) * (rows[0] * (7 + presence) + rows[1] * (9 + presence))
    assert found == {"a.latent": Digest(expected % 2**64, 2)}
    assert found["a.latent"].value == 7645210251246399676, (
        "the digest itself has changed: engines of two versions no longer agree"
    )


@pytest.mark.parametrize("element_bytes", [1, 2, 3, 4, 5, 6, 8, 16])
def test_elements_of_any_size_follow_the_definition(element_bytes: int) -> None:
    layout = latent(channels=element_bytes * 5)
    field = Field("a.latent", (Axis("token", None), Axis("channel", 5)), element_bytes, "any")
    shard = layout.ranks[0].shards[0]
    token, channel = shard.geometry.axes
    wide = replace(
        channel,
        owned=replace(channel.owned, stop=5),
        digits=(replace(channel.digits[0], extent=5, byte_step=element_bytes),),
    )
    shard = replace(shard, geometry=replace(shard.geometry, axes=(token, wide)))
    layout = replace(layout, fields=(field,), ranks=(layout.ranks[0].with_shards((shard,)),))
    content, reader = memory_of(layout)
    table, intervals = PageTable([5, 2, 7], 11), [(1, 4), (5, 11)]
    found = digest(layout, {"g": table}, {"g": intervals}, reader, KEY)["a.latent"]
    cells = slow_digest.read_cells(layout, "a.latent", {(0, "kv"): content}, table, intervals)
    assert (found.value, found.num_bytes) == slow_digest.digest_of_cells(KEY, field, cells)


@pytest.mark.parametrize(("channels", "byte"), [(2, 0xFF), (16, 0x80), (512, 0x7F)])
def test_extreme_bytes_and_many_windows_wrap_around_alike(channels: int, byte: int) -> None:
    """In rows of one unit and in long ones, over more tokens than are located or read at once."""
    num_tokens = INDICES_PER_WINDOW + 512
    assert num_tokens * channels > UNITS_AT_ONCE
    layout = latent(page=512, pages=num_tokens // 512, channels=channels)
    region = layout.ranks[0].regions[0]
    reader = ArrayBytes({region.address: np.full(region.size_bytes, byte, dtype=np.uint8)})
    table = PageTable(np.arange(num_tokens // 512), num_tokens)
    found = digest(layout, {"g": table}, {"g": [(0, num_tokens)]}, reader)["a.latent"]
    rows = sum(weights(KEY, "row\0a.latent", np.arange(num_tokens)).tolist())
    units = sum(weights(KEY, "unit", np.arange(channels)).tolist())
    unit = int.from_bytes(bytes([byte, byte]), "little", signed=True) + slow_digest.weight(KEY, "presence", 0)
    assert found == Digest(rows * units * unit % 2**64, num_tokens * channels * 2)


def test_intervals_that_meet_inside_an_index_count_it_once() -> None:
    layout = assemble(
        "one", [Layer("a", Opaque(33, 8, "tag"))], [PagedGroup("g", ("a",), 8)], Grid(), order="NHD", num_pages=9
    )
    content, reader = memory_of(layout)
    table, intervals = PageTable([4, 1, 7], 24), [(0, 4), (4, 12), (13, 17)]
    found = digest(layout, {"g": table}, {"g": intervals}, reader, KEY)["a.page"]
    cells = slow_digest.read_cells(layout, "a.page", {(0, "kv"): content}, table, intervals)
    assert len(cells) == 3 * 33
    assert (found.value, found.num_bytes) == slow_digest.digest_of_cells(KEY, layout.fields[0], cells)


def test_attention_and_states_follow_the_definition() -> None:
    arrived = small(Engine(3, "HND", 7), Engine(2, "NHD", 24, "slots"), 10)
    position = arrived.request.dst_tables["state"].num_tokens
    for field, rank in itertools.product(arrived.fields(), (0, 1)):
        cells = arrived.cells(field, rank)
        expected = Digest(*slow_digest.digest_of_cells(KEY, arrived.dst.field_by_name[field], cells, position))
        assert arrived.of_rank("src", field, rank, KEY) == arrived.of_rank("dst", field, rank, KEY) == expected


@pytest.mark.parametrize(
    ("kind", "page", "num_tokens", "interval"),
    [
        (Ring(5, 3, "bfloat16"), 1, 23, (18, 23)),
        (Latent(6, "bfloat16", tokens_per_state=4), 8, 23, (3, 22)),
        (Opaque(33, 8, "tag"), 8, 23, (8, 21)),
        (Attention(2, 3, "fp8_e4m3", 5), 8, 23, (1, 20)),
    ],
)
def test_rings_compressed_tokens_and_opaque_pages(kind, page: int, num_tokens: int, interval: tuple[int, int]) -> None:
    layout = (
        assemble(
            "one", [Layer("a", kind)], [PagedGroup("g", ("a",), page)], Grid(2), order="HND", num_pages=9, style=Style()
        )
        if not isinstance(kind, Opaque)
        else assemble("one", [Layer("a", kind)], [PagedGroup("g", ("a",), page)], Grid(), order="HND", num_pages=9)
    )
    rng = np.random.default_rng(3)
    memory = {
        (r.rank, g.name): rng.integers(0, 256, g.size_bytes, dtype=np.uint8) for r in layout.ranks for g in r.regions
    }
    table = PageTable([4] if isinstance(kind, Ring) else [4, 1, 7], num_tokens)
    for rank, shard in [(r, s) for r in layout.ranks for s in r.shards]:
        slow_digest.write_cells(
            layout, shard.field, memory, table, [interval],
            slow_digest.read_cells(replace(layout, ranks=(rank,)), shard.field, memory, table, [interval]),
        )  # fmt: skip
    for rank in layout.ranks:
        reader = ArrayBytes({region.address: memory[rank.rank, region.name] for region in rank.regions})
        transfers = compile_route(layout, layout, rank.rank).transfers
        found = digest_transfers(transfers, "dst", Request({}, {"g": table}, {"g": [interval]}, {}), reader, KEY)
        for shard in rank.shards:
            field = layout.field_by_name[shard.field]
            cells = slow_digest.read_cells(replace(layout, ranks=(rank,)), shard.field, memory, table, [interval])
            whole = sum((one for part, one in found.items() if part.field == shard.field), Digest(0, 0))
            assert cells
            assert (whole.value, whole.num_bytes) == slow_digest.digest_of_cells(KEY, field, cells)


def test_the_key_decides() -> None:
    arrived = small(Engine(2), Engine(1, "HND"), 0)
    one, two = arrived.digests("src", b"one"), arrived.digests("src", b"two")
    assert one.keys() == two.keys()
    assert all(one[part].value != two[part].value for part in one)
    assert arrived.digests("src", b"one") == one


@pytest.mark.parametrize("byte", [0, 0xFF])
def test_cells_of_zeros_are_not_the_same_as_no_cells(byte: int) -> None:
    layout = latent()
    content, reader = memory_of(layout)
    content[:] = byte
    tables = {"g": PageTable([1, 3], 8)}
    some, more = (digest(layout, tables, {"g": [(0, n)]}, reader, KEY)["a.latent"] for n in (4, 5))
    assert some.value not in (0, more.value)
    shifted = digest(layout, tables, {"g": [(1, 5)]}, reader, KEY)["a.latent"]
    assert shifted.num_bytes == some.num_bytes
    assert shifted.value != some.value


def test_the_bytes_of_a_state_at_another_position_have_another_digest() -> None:
    arrived = small(Engine(), Engine(2, "HND"), 1)
    state = arrived.request.dst_tables["state"]
    later = {**arrived.request.dst_tables, "state": PageTable(state.pages, state.num_tokens + 1)}
    moved = replace(arrived, request=replace(arrived.request, dst_tables=later))
    verdict = compare(arrived.digests("src", KEY), moved.digests("dst", KEY))
    assert verdict.differences
    assert all(difference.part.field.startswith(("layers.2.", "layers.3.")) for difference in verdict.differences)


def test_empty_intervals_have_nothing_to_digest() -> None:
    arrived = small(Engine(), Engine(2), 2)
    nothing = replace(arrived, request=replace(arrived.request, intervals={"attention": [], "state": []}))
    assert nothing.digests("src", KEY) == nothing.digests("dst", KEY) == {}
    assert not compare({}, {}).equal


def test_a_side_needs_its_own_tables_only() -> None:
    arrived = small(Engine(2), Engine(), 3)
    request = arrived.request
    src = replace(arrived, request=Request(request.src_tables, {}, request.intervals, {}))
    dst = replace(arrived, request=Request({}, request.dst_tables, request.intervals, {}))
    assert compare(src.digests("src", KEY), dst.digests("dst", KEY)).equal


def test_only_some_fields() -> None:
    arrived = small(Engine(2), Engine(), 4)
    some = arrived.digests("src", KEY, ["layers.1.v"])
    assert some == {part: d for part, d in arrived.digests("src", KEY).items() if part.field == "layers.1.v"}


def test_memory_that_the_processor_reaches() -> None:
    layout = latent()
    content, reader = memory_of(layout)
    there = relocate(layout, {0: {"kv": content.ctypes.data}})
    tables, intervals = {"g": PageTable([6, 0, 3], 12)}, {"g": [(2, 12)]}
    assert digest(there, tables, intervals, HostMemory()) == digest(layout, tables, intervals, reader)
    assert HostMemory().read(content.ctypes.data, content.ctypes.data + 4).tolist() == content[:4].tolist()


def test_the_message_names_field_ranks_and_tokens() -> None:
    arrived = small(Engine(2), Engine(1, "HND"), 5)
    cells = arrived.cells("layers.1.k")
    wrong = {cell: bytes(2) for cell in cells if cell[0] in (21, 22) and cell[1] == 3}
    assert any(cells[cell] != content for cell, content in wrong.items())
    arrived.corrupt("layers.1.k", wrong)
    verdict = compare(arrived.digests("src", KEY), arrived.digests("dst", KEY))
    told = r"field 'layers\.1\.k' \(.*head \[2, 4\).*\), source rank 1 -> destination rank 0"
    assert re.search(told, str(verdict))
    assert "tokens [3, 45)" in str(verdict)


def test_a_part_that_one_side_lacks_is_a_difference() -> None:
    arrived = small(Engine(), Engine(), 6)
    src = arrived.digests("src", KEY)
    part = min(src)
    verdict = compare(src, {other: digest for other, digest in src.items() if other != part})
    assert [difference.part for difference in verdict.differences] == [part]
    assert "the destination no digest" in str(verdict)
    assert "equal on both sides" in str(compare(src, src))


REFUSED = {
    "no token intervals": ({"g": PageTable([1], 4)}, {}),
    "no block table": ({}, {"g": [(0, 4)]}),
    r"names page 8, but its pool 'pages' has pages \[0, 8\)": ({"g": PageTable([8], 4)}, {"g": [(0, 4)]}),
    r"names page -1": ({"g": PageTable([-1], 4)}, {"g": [(0, 4)]}),
    "has the null page 0": ({"g": PageTable([0], 4)}, {"g": [(0, 4)]}),
    r"tokens up to 5 .* holds 4": ({"g": PageTable([1, 2], 4)}, {"g": [(0, 5)]}),
    r"logical pages \[0, 2\) are needed, but the block table has 1 from 0": ({"g": PageTable([1], 8)}, {"g": [(0, 8)]}),
    r"logical pages \[0, 1\) are needed, but the block table has 1 from 1": (
        {"g": PageTable([1], 8, 1)},
        {"g": [(0, 4)]},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_tables_that_do_not_fit_are_refused(message: str) -> None:
    layout = latent(null_page=0)
    tables, intervals = REFUSED[message]
    with pytest.raises(BindError, match=message):
        digest(layout, tables, intervals, memory_of(layout)[1], KEY)


def test_null_pages_outside_the_tokens_are_let_be() -> None:
    layout = latent(null_page=0)
    assert digest(layout, {"g": PageTable([0, 3], 8)}, {"g": [(4, 8)]}, memory_of(layout)[1], KEY)


def test_overwritten_tokens_of_a_ring_and_states_of_two_pages_are_refused() -> None:
    ring = assemble(
        "one", [Layer("a", Ring(5, 3, "bfloat16"))], [PagedGroup("g", ("a",), 1)], Grid(), order="NHD", num_pages=2
    )
    with pytest.raises(BindError, match="index 17 of 23 was overwritten in a ring of 5"):
        digest(ring, {"g": PageTable([1], 23)}, {"g": [(17, 23)]}, memory_of(ring)[1], KEY)
    arrived = small(Engine(), Engine(), 8)
    tables = {**arrived.request.dst_tables, "state": PageTable([1, 2], 45)}
    with pytest.raises(BindError, match="2 pages for a state"):
        digest(arrived.dst, tables, arrived.request.intervals, arrived.memory_of("dst")[0])


def test_a_key_of_a_wrong_size_is_refused() -> None:
    layout = latent()
    tables, intervals = {"g": PageTable([1], 4)}, {"g": [(0, 4)]}
    reader = memory_of(layout)[1]
    for key in (b"", b"x" * 65):
        with pytest.raises(BindError, match=f"digest key of {len(key)} bytes"):
            digest(layout, tables, intervals, reader, key)


def test_weights_follow_their_definition() -> None:
    numbers = [0, 1, 2, 17, 1 << 20, 1 << 40]
    for key, role in itertools.product((b"k", b"another key" * 5), ("unit", "row\0a")):
        expected = [slow_digest.weight(key, role, number) for number in numbers]
        assert [weight % 2**64 for weight in weights(key, role, np.array(numbers)).tolist()] == expected


def test_weights_of_keys_roles_and_numbers_are_unrelated() -> None:
    found = np.concatenate(
        [weights(key, role, np.arange(1000)) for key in (b"a", b"b") for role in ("unit", "row\0a", "row\0b")]
    ).view(np.uint64)
    assert len(np.unique(found)) == len(found)
    ones = [int(((found >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    assert all(abs(count - len(found) / 2) < 6 * len(found) ** 0.5 / 2 for count in ones)


def test_a_field_with_a_typo_is_not_found_equal() -> None:
    layout, table = latent(), PageTable([1], num_tokens=3)
    request = Request({"g": table}, {"g": table}, {"g": [(0, 3)]}, {})
    transfers = compile_route(layout, layout, 0).transfers
    sides = (digest_transfers(transfers, side, request, HostMemory(), KEY, fields=["typo"]) for side in ("src", "dst"))
    verdict = compare(*sides)
    assert (verdict.equal, "nothing was compared" in str(verdict)) == (False, True)
