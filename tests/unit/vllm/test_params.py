"""Do parameters survive the router's JSON, and does each wrong field have its line?"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvreshard.model.changed import replace
from kvreshard.session.handshake import Address
from kvreshard.session.orders import RemoteEngine, RemoteLease
from kvreshard.vllm.params import KEY, GroupParams, ParamsError, RemotePrefill, read_params, write_params
from kvreshard.vllm.prompt import Prompt, digest_prompt

PREFILL = RemotePrefill(
    RemoteEngine("engine", "life", Address("10.0.0.1", 5600)),
    RemoteLease("cmpl-1", 7, 2**63 + 12345),
    300,
    (GroupParams("g0", 2, 128, False, 512), GroupParams("g1", 0, None, True), GroupParams("g2", 0, ring_tokens=8)),
    ((4, 9), (3,), (5,)),
    digest_prompt(Prompt(range(300)), 300),
)
SIZES = {"tp_size": 2, "dcp_size": 1, "pp_size": 1}


def params() -> dict[str, Any]:
    written: dict[str, Any] = json.loads(json.dumps(write_params(PREFILL, SIZES)))
    return written


def test_what_was_written_is_read_and_the_known_fields_are_there() -> None:
    assert read_params(params()) == PREFILL
    for name in (
        *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id"),
        *("remote_host", "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "transfer_mode"),
    ):
        assert name in params()
    assert (params()["do_remote_prefill"], params()["do_remote_decode"]) == (True, False)


def test_an_address_may_be_rewritten_on_the_way() -> None:
    moved = params() | {"remote_host": "prefill-3.example", "remote_port": 6000}
    assert read_params(moved).remote.address == Address("prefill-3.example", 6000)


def test_words_do_not_lose_bits_in_a_router_written_in_javascript() -> None:
    assert all(not isinstance(v, int) or abs(v) < 2**53 for v in params()[KEY].values())


def test_what_is_added_to_a_group_is_left_out_where_it_says_nothing() -> None:
    replayed = replace(PREFILL, groups=(replace(PREFILL.groups[0], first_token=300), *PREFILL.groups[1:]))
    read = read_params(json.loads(json.dumps(write_params(replayed, SIZES))))
    assert [group.first_held for group in read.groups] == [300, 0, 0]
    assert [group.first_held for group in PREFILL.groups] == [256, 0, 0]


def test_tables_start_where_the_source_says() -> None:
    tables = PREFILL.tables()
    assert (tables["g0"].pages.tolist(), tables["g0"].first_page, tables["g0"].num_tokens) == ([4, 9], 2, 300)


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
        (without(KEY), f"no field '{KEY}'; the prefill engine does not use ReshardConnector"),
        (without("remote_engine_id"), "remote_engine_id"),
        (without("remote_block_ids"), "remote_block_ids"),
        (put(None, "remote_host"), "remote_host"),
        (put("5600", "remote_port"), "remote_port"),
        (put(0, "remote_port"), "remote_port is 0; it must be from 1 to 65535"),
        (put(0, "remote_num_tokens"), "remote_num_tokens is 0"),
        (put([[1]], "remote_block_ids"), "describe 3 groups and list blocks of 1"),
        (put([["x"], [1]], "remote_block_ids"), "remote_block_ids"),
        (put(2, KEY, "version"), "is of version 2; this side reads 1"),
        (put(7, KEY), "is of version None"),
        (put("xyz", KEY, "word"), "invalid literal"),
        (put("0", KEY, "word"), "word is 0"),
        (put("f" * 17, KEY, "word"), "word is"),
        (put(-1, KEY, "slot"), "slot is -1"),
        (put(-1, KEY, "groups", 0, "first_page"), "group 'g0' has a size that is not positive"),
        (put(0, KEY, "groups", 0, "page_tokens"), "group 'g0' has a size"),
        (put(0, KEY, "groups", 2, "ring_tokens"), "group 'g2' has a size"),
        (put(9, KEY, "groups", 2, "ring_tokens"), "do not fit their seal"),
        (put(None, KEY, "prompt"), "prompt"),
        (without_seal(), "seal"),
        (put([[4], [3], [5]], "remote_block_ids"), "do not fit their seal"),
        (put([[9, 4], [3], [5]], "remote_block_ids"), "do not fit their seal"),
        (put(299, "remote_num_tokens"), "do not fit their seal"),
        (put("cmpl-2", "remote_request_id"), "do not fit their seal"),
        (put(8, KEY, "slot"), "do not fit their seal"),
        (put(3, KEY, "groups", 0, "first_page"), "do not fit their seal"),
        (put(True, KEY, "version"), "is of version True"),
        (put("x" * 5000, KEY, "version"), "xxx... (5000 characters); this side reads"),
        (put("10.0.0.1;10.0.0.2", "remote_host"), "remote_host is '10.0.0.1;10.0.0.2'; it must be a name"),
        (put("a\nb", "remote_host"), "remote_host is 'a?b'"),
        (put("", "remote_host"), "remote_host is ''"),
        (put("a\nb", "remote_engine_id"), "remote_engine_id"),
        (put("cmpl-\ud800", "remote_request_id"), "matching regex"),
        (put("x" * 300, "remote_request_id"), "length <= 256 - at `$.remote_request_id`"),
        (put([[1 << 62], [1]], "remote_block_ids"), "remote_block_ids"),
        (put([[-1], [1]], "remote_block_ids"), "remote_block_ids"),
        (put([[1]] * 300, "remote_block_ids"), "length <= 256 - at `$.remote_block_ids`"),
        (put(1 << 62, KEY, "groups", 0, "first_page"), "or above"),
        (put(10**400, KEY, "slot"), "slot"),
        (put(["0" * 16] * 2000, KEY, "prompt", "marks"), "2000 digests of the prompt; at most 1024"),
    ],
)
def test_each_wrong_field_is_named(change: Callable[[dict[str, Any]], None], told: str) -> None:
    wrong = params()
    change(wrong)
    with pytest.raises(ParamsError) as caught:
        read_params(wrong)
    assert told in str(caught.value)
