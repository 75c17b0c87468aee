"""Parameters survive the router's JSON, and every wrong field is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.changed import leaves, other

from kvreshard.model.changed import replace
from kvreshard.session.commands import RemoteEngine
from kvreshard.session.handshake_messages import Address
from kvreshard.session.lease import Lease
from kvreshard.session.seal import SealError, check_seal, instance_id_of
from kvreshard.vllm.page_list import write_pages
from kvreshard.vllm.params import (
    KEY,
    MAX_BYTES,
    MAX_PAGES,
    GroupParams,
    ParamsError,
    RemotePrefill,
    read_params,
    write_params,
)
from kvreshard.vllm.prompt import Prompt, digest_prompt

SECRET = bytes(range(32))
PREFILL = RemotePrefill(
    RemoteEngine("engine", instance_id_of(SECRET), Address("10.0.0.1", 5600)),
    Lease("cmpl-1", 7, 2**63 + 12345),
    300,
    (GroupParams("g0", 2, 128, False, 512), GroupParams("g1", 0, None, True), GroupParams("g2", 0, ring_tokens=8)),
    {"g0": write_pages((4, 9)), "g1": write_pages((3,)), "g2": write_pages((5,))},
    digest_prompt(Prompt(range(300)), 300, SECRET),
)
SIZES = {"tp_size": 2, "dcp_size": 1, "pp_size": 1}


def params() -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(write_params(PREFILL, SIZES, SECRET)))
    return written


def test_what_was_written_is_read_and_the_known_fields_are_there() -> None:
    read = read_params(params())
    assert replace(read, code=b"") == PREFILL
    assert read.seal == PREFILL.make_seal(SECRET)
    for name in (
        *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
        *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"),
    ):
        assert name in params()
    assert (params()["do_remote_prefill"], params()["do_remote_decode"]) == (True, False)


def test_an_address_may_be_rewritten_on_the_way() -> None:
    moved = params() | {"remote_host": "prefill-3.example", "remote_port": 6000}
    assert read_params(moved).remote.address == Address("prefill-3.example", 6000)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_ipv6_address_may_have_brackets(host: str) -> None:
    assert read_params(params() | {"remote_host": host}).remote.address == Address("::1", 5600)


# Of a prompt that is shorter than a digest's step, in slot 0, with an empty group: all that a router may leave out.
SPARSE = replace(
    PREFILL,
    lease=Lease("cmpl-1", 0, 5),
    num_tokens=9,
    groups=(GroupParams("g0", 0, 128, False, 512), GroupParams("g1", 0, None, True)),
    pages={"g0": "", "g1": write_pages((0,))},
    prompt=digest_prompt(Prompt(range(9)), 9, SECRET),
)


def re_encoded(value: Any, change: Callable[[Any], Any]) -> Any:
    """A router's copy: `change` gives what becomes of each part, `DROPPED` for nothing."""
    if isinstance(value, dict):
        parts = {key: re_encoded(part, change) for key, part in value.items()}
        return change({key: part for key, part in parts.items() if part is not DROPPED})
    return change([re_encoded(part, change) for part in value] if isinstance(value, list) else value)


DROPPED = object()


def as_double(value: Any) -> Any:
    return float(value) if type(value) is int else value


def as_object(value: Any) -> Any:
    return {} if value == [] else value


def as_null(value: Any) -> Any:
    return None if value == [] else value


def without_nulls(value: Any) -> Any:
    return DROPPED if value is None else value


@pytest.mark.parametrize("change", [as_double, as_object, as_null, without_nulls])
@pytest.mark.parametrize("prefill", [PREFILL, SPARSE])
def test_what_a_router_encodes_anew_is_read(prefill: RemotePrefill, change: Callable[[Any], Any]) -> None:
    written = json.loads(json.dumps(write_params(prefill, SIZES, SECRET)))
    read = read_params(json.loads(json.dumps(re_encoded(written, change))))
    assert replace(read, code=b"") == prefill
    assert read.seal == prefill.make_seal(SECRET)


def test_zeros_and_empty_lists_may_be_left_out() -> None:
    """And empty texts, as Go does with `omitempty`: of objects, not of lists."""
    written = json.loads(json.dumps(write_params(SPARSE, SIZES, SECRET)))

    def pruned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: pruned(part) for key, part in value.items() if part or isinstance(part, dict)}
        return [pruned(part) for part in value] if isinstance(value, list) else value

    assert replace(read_params(pruned(written)), code=b"") == SPARSE
    assert read_params(pruned(written)).is_sealed(SECRET)
    assert "slot" not in pruned(written)[KEY]


def test_a_number_that_lost_bits_is_told() -> None:
    wrong = params() | {"remote_num_tokens": float(2**60)}
    with pytest.raises(ParamsError, match="was made a double on its way"):
        read_params(wrong)
    with pytest.raises(ParamsError, match="Expected `int`, got `float`"):
        read_params(params() | {"remote_port": 5600.5})


def test_words_do_not_lose_bits_in_a_router_written_in_javascript() -> None:
    assert all(not isinstance(v, int) or abs(v) < 2**53 for v in params()[KEY].values())


def test_what_is_added_to_a_group_is_left_out_where_it_says_nothing() -> None:
    assert "first_token" not in params()[KEY]["groups"][0]
    replayed = replace(PREFILL, groups=(replace(PREFILL.groups[0], first_token=300), *PREFILL.groups[1:]))
    read = read_params(json.loads(json.dumps(write_params(replayed, SIZES, SECRET))))
    assert [group.first_held for group in read.groups] == [300, 0, 0]
    assert [group.first_held for group in PREFILL.groups] == [256, 0, 0]


def test_a_router_sees_the_first_block_of_each_group() -> None:
    """Some look whether there is any (docs/reference/parameters.md)."""
    assert params()["remote_block_ids"] == [[4], [3], [5]]
    assert write_params(SPARSE, SIZES, SECRET)["remote_block_ids"] == [[], [0]]


PAGE_IDS = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(-9, 9)), max_size=9)


@given(lists=st.lists(PAGE_IDS, min_size=1, max_size=5), double=st.booleans())
def test_any_block_lists_are_read_as_they_were_written(lists: list[list[tuple[int, int]]], double: bool) -> None:
    """Runs that rise, fall and stand alone, through JSON, also through a router with one kind of number."""
    ids = [
        [9 + first + i * (1 if count > 0 else -1) for first, count in runs for i in range(abs(count))] for runs in lists
    ]
    prefill = replace(
        PREFILL,
        groups=tuple(GroupParams(f"g{i}", 0, 16) for i in range(len(ids))),
        pages={f"g{i}": write_pages(pages) for i, pages in enumerate(ids)},
    )
    written = json.loads(json.dumps(write_params(prefill, SIZES, SECRET)))
    read = read_params(re_encoded(written, as_double) if double else written)
    assert replace(read, code=b"") == prefill
    assert read.is_sealed(SECRET)
    assert [table.pages.tolist() for table in read.tables().values()] == ids


def test_as_many_pages_as_are_read_are_written_and_no_more() -> None:
    whole = replace(PREFILL, pages=PREFILL.pages | {"g0": ALMOST_ALL, "g1": write_pages((3,)), "g2": ""})
    assert read_params(write_params(whole, SIZES, SECRET)).is_sealed(SECRET)
    with pytest.raises(ParamsError, match=f"would list {MAX_PAGES + 1} pages; at most {MAX_PAGES}"):
        write_params(replace(whole, pages=whole.pages | {"g2": write_pages((3,))}), SIZES, SECRET)


def test_larger_parameters_than_the_largest_are_not_written() -> None:
    scattered = write_pages(range(0, 1 << 20, 2))
    large = replace(PREFILL, pages=PREFILL.pages | {"g0": scattered})
    assert 1_500_000 < len(json.dumps(write_params(large, SIZES, SECRET))) <= MAX_BYTES
    with pytest.raises(ParamsError, match=rf"of 1048576 pages would have 3\d{{6}} bytes; at most {MAX_BYTES}"):
        write_params(replace(large, pages=large.pages | {"g1": scattered, "g2": ""}), SIZES, SECRET)


def test_tables_start_where_the_source_says() -> None:
    tables = PREFILL.tables()
    assert (tables["g0"].pages.tolist(), tables["g0"].first_page, tables["g0"].num_tokens) == ([4, 9], 2, 300)


# With the two pages of g0 it is one page too many.
ALMOST_ALL = write_pages(range(MAX_PAGES - 1))


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda p: p.pop(name)


def without_seal() -> Callable[[dict[str, Any]], None]:
    return lambda p: p[KEY].pop("seal")


def put(value: Any, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(inner: Any) -> None:
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without(KEY), f"no field '{KEY}', and this engine's connector is ReshardConnector"),
        (without("remote_engine_id"), "remote_engine_id"),
        (lambda p: p[KEY].pop("pages"), "missing required field `pages`"),
        (put(None, "remote_host"), "remote_host"),
        (put("5600", "remote_port"), "remote_port"),
        (put(0, "remote_port"), ">= 1 - at `$.remote_port`"),
        (put(0, "remote_num_tokens"), ">= 1 - at `$.remote_num_tokens`"),
        (put("", KEY, "pages", "g3"), "describe groups ['g0', 'g1', 'g2'] and list pages of ['g0', 'g1', 'g2', 'g3']"),
        (put("g0", KEY, "groups", 2, "name"), "describe groups ['g0', 'g1', 'g0'] and list pages of"),
        (put([4, 9], KEY, "pages", "g0"), "Expected `str`, got `array` - at `$.kvreshard.pages[...]`"),
        (put([], KEY, "pages"), "Expected `object`, got `array` - at `$.kvreshard.pages`"),
        (put("4, 9", KEY, "pages", "g0"), "pages of group 'g0'"),
        (put("é", KEY, "pages", "g0"), "pages of group 'g0'"),
        (put(2, KEY, "version"), "is of version 2; this side reads 1"),
        (put(7, KEY), "is of version None"),
        (put("xyz", KEY, "word"), "invalid literal"),
        (put("0", KEY, "word"), "word is 0"),
        (put("f" * 17, KEY, "word"), "word is"),
        (put(-1, KEY, "slot"), ">= 0 - at `$.kvreshard.slot`"),
        (put(-1, KEY, "groups", 0, "first_page"), ">= 0 - at `$.kvreshard.groups[0].first_page`"),
        (put(0, KEY, "groups", 0, "page_tokens"), ">= 1 - at `$.kvreshard.groups[0].page_tokens`"),
        (put(0, KEY, "groups", 2, "ring_tokens"), ">= 1 - at `$.kvreshard.groups[2].ring_tokens`"),
        (put(None, KEY, "prompt"), "prompt"),
        (without_seal(), "seal"),
        (put(None, KEY, "seal"), "missing required field `seal`"),
        (put(7, KEY, "seal"), "Expected `str`, got `int` - at `$.kvreshard.seal`"),
        (put(["00"] * 16, KEY, "seal"), "Expected `str`, got `array` - at `$.kvreshard.seal`"),
        (put("", KEY, "seal"), "length >= 32 - at `$.kvreshard.seal`"),
        (put("5662bd8651feb842", KEY, "seal"), "length >= 32 - at `$.kvreshard.seal`"),
        (put("0" * 33, KEY, "seal"), "length <= 32 - at `$.kvreshard.seal`"),
        (put("0" * 5_000_000, KEY, "seal"), "length <= 32 - at `$.kvreshard.seal`"),
        (put("x" * 32, KEY, "seal"), "non-hexadecimal number found"),
        (put("\u0660" * 32, KEY, "seal"), "non-hexadecimal number found"),
        (put(True, KEY, "version"), "is of version True"),
        (put("x" * 5000, KEY, "version"), "xxx... (5000 characters); this side reads"),
        (put("10.0.0.1;10.0.0.2", "remote_host"), "remote_host is '10.0.0.1;10.0.0.2'; it must be a name"),
        (put("a\nb", "remote_host"), "remote_host is 'a?b'"),
        (put("", "remote_host"), "remote_host is ''"),
        (put("a\nb", "remote_engine_id"), "remote_engine_id"),
        (put("cmpl-\ud800", "remote_request_id"), "matching regex"),
        (put("x" * 300, "remote_request_id"), "length <= 256 - at `$.remote_request_id`"),
        (put({f"g{i}": "" for i in range(300)}, KEY, "pages"), "length <= 256 - at `$.kvreshard.pages`"),
        (put("A" * (MAX_BYTES + 4), KEY, "pages", "g0"), f"length <= {MAX_BYTES} - at `$.kvreshard.pages[...]`"),
        (put(ALMOST_ALL, KEY, "pages", "g1"), f"pages of group 'g1': {MAX_PAGES - 1} pages"),
        (put(1 << 62, KEY, "groups", 0, "first_page"), "<= 1099511627776 - at `$.kvreshard.groups[0].first_page`"),
        (put(10**400, KEY, "slot"), "slot"),
        (put("0" * 16 * 257, KEY, "prompt", "marks"), "length <= 4096 - at `$.kvreshard.prompt.marks`"),
        (put("0" * 17, KEY, "prompt", "marks"), "matching regex"),
        (put(0, KEY, "prompt", "step"), ">= 1 - at `$.kvreshard.prompt.step`"),
        (put(10**50, KEY, "prompt", "step"), "prompt.step"),
        (put("0" * 17, KEY, "prompt", "whole"), "length <= 16 - at `$.kvreshard.prompt.whole`"),
    ],
)
def test_each_wrong_field_is_named(change: Callable[[dict[str, Any]], None], told: str) -> None:
    wrong = params()
    change(wrong)
    with pytest.raises(ParamsError) as caught:
        read_params(wrong)
    assert told in str(caught.value)


# Where the engine is found may be rewritten; what is for routers only is not read here.
NOT_SEALED = {
    *("remote_host", "remote_port", "do_remote_prefill", "do_remote_decode"),
    *("tp_size", "dcp_size", "pp_size", "transfer_mode", "remote_blocks_expiry_time", "remote_block_ids"),
}
ADDRESS = {"remote_host", "remote_port"}


@pytest.mark.parametrize("path", [path for path, _ in leaves(params()) if path[0] not in NOT_SEALED], ids=str)
def test_a_change_of_any_field_breaks_the_seal(path: tuple[Any, ...]) -> None:
    """Each alone, to another value of its type: it is refused when it is read, or the seal does not hold."""
    wrong = params()
    put(other(dict(leaves(wrong))[path]), *path)(wrong)
    try:
        read = read_params(json.loads(json.dumps(wrong)))
    except ParamsError:
        return
    with pytest.raises(SealError):
        check_seal(SECRET, read.remote.name, read.lease, read.tables(), read.seal)


def test_what_is_not_sealed_decides_nothing_that_is_read() -> None:
    """Without all of it but the address the same prefill is read."""
    bare = {name: value for name, value in params().items() if name not in NOT_SEALED - ADDRESS}
    assert read_params(bare) == read_params(params())
