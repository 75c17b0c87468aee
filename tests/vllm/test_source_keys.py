"""A request waits for its source's key without blocks, and only for the key; a source that is not there fails it by policy."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

pytest.importorskip("vllm")

from tests.vllm.schedulers import KEY, TOKENS, Decode, blocks, full, groups, prefill, request

from kvreshard.session.commands import Failure, Load, Release, Renew, StopRenewing
from kvreshard.session.seal import instance_id_of
from kvreshard.vllm import sources
from kvreshard.vllm.options import read_options
from kvreshard.vllm.prompt import Prompt, digest_prompt
from kvreshard.vllm.scheduler import log_open_sources
from kvreshard.vllm.sources import SourceHosts
from kvreshard.vllm.step_metadata import ReshardMetadata, ReshardWorkerMetadata

pytestmark = pytest.mark.vllm
BLOCKS = [1, 2, 3, 4, 5]
GONE = Failure("handshake", "nobody is there")


def params() -> dict[str, object]:
    return prefill(groups(full(64)), TOKENS, [BLOCKS])


def test_a_request_waits_for_the_key_of_a_source_that_is_new() -> None:
    decode, first = Decode(full(64), has_met=False), params()
    asked = decode.arrive(first, TOKENS)
    assert [(type(order), order.asks_key) for order in decode.watched] == [(Renew, True)]
    assert [decode.side.count_loadable(asked, 0) for _ in range(3)] == [None] * 3
    decode.meet({"another": bytes(32)}, {"another": GONE})
    assert decode.side.count_loadable(asked, 0) is None
    decode.meet({"d-1": KEY})
    assert decode.side.count_loadable(asked, 0) == 299
    load = decode.load(asked, blocks(BLOCKS), 299)
    assert (load.refusal, decode.fallbacks) == (None, [])
    list(decode.side.ended("d-1"))
    asked = decode.arrive(params(), TOKENS)
    assert [(type(order), order.asks_key) for order in decode.watched] == [(Renew, False)]
    assert decode.side.count_loadable(asked, 0) == 299


def test_a_source_that_one_rank_has_met_is_given_back_though_another_could_not_meet_it() -> None:
    """The rank that has met it has loaded its part, and keeps it until it hears."""
    decode = Decode(full(64), has_met=False)
    asked = decode.arrive(params(), TOKENS)
    decode.meet({"d-1": KEY}, {"d-1": GONE})
    assert decode.side.count_loadable(asked, 0) == 299
    load = decode.load(asked, blocks(BLOCKS), 299)
    assert load.refusal is None
    assert [type(order) for order in decode.side.ended("d-1")] == [Release]


def test_another_prompt_is_not_loaded_under_the_right_key() -> None:
    decode = Decode(full(64), has_met=False)
    asked = decode.arrive(params(), [7, *TOKENS[1:]])
    decode.meet({"d-1": KEY})
    assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == (0, ["prompt"])


def test_a_request_that_needs_nothing_does_not_wait() -> None:
    decode = Decode(full(64), has_met=False)
    asked = decode.arrive(params(), TOKENS)
    assert [decode.side.count_loadable(asked, hit) for hit in (256, 298, 299, 300)] == [None, None, 0, 0]
    assert [type(order) for order in decode.side.allocate(asked, blocks(BLOCKS), 0)] == [StopRenewing, Release]


def test_a_source_that_cannot_be_met_fails_the_load_and_nothing_is_read() -> None:
    """The load is ordered, so that vLLM's policy decides, and refused, whatever the ranks find by then."""
    decode = Decode(full(64), has_met=False)
    asked = decode.arrive(params(), [7, *TOKENS[1:]])
    decode.meet({}, {"d-1": GONE})
    assert decode.side.count_loadable(asked, 0) == 299
    decode.meet({"d-1": KEY})  # another rank has met it after all
    assert decode.side.count_loadable(asked, 0) == 299
    load = decode.load(asked, blocks(BLOCKS), 299)
    assert (load.refusal, decode.fallbacks) == (GONE, [])
    assert list(decode.side.ended("d-1")) == []  # whoever could not be met is not asked once more to be told so
    decode.arrive(json.loads(json.dumps(asked.kv_transfer_params)), TOKENS)
    assert [type(order) for order in decode.watched] == [Renew]


def test_a_request_that_has_ended_hears_of_no_key() -> None:
    decode = Decode(full(64), has_met=False)
    decode.arrive(params(), TOKENS)
    assert [type(order) for order in decode.side.abort("d-1")] == [StopRenewing, Release]
    decode.meet({"d-1": KEY}, {"d-1": GONE})
    assert not decode.side.waiting


def test_a_key_of_a_former_request_with_the_same_id_is_not_kept_for_others() -> None:
    """It would make the seals of all later requests of that source fail."""
    decode = Decode(full(64), has_met=False)
    asked = decode.arrive(params(), TOKENS)
    decode.meet({"d-1": bytes(32)})
    decode.meet({"d-1": KEY})
    assert decode.side.count_loadable(asked, 0) == 299
    decode.arrive(params(), TOKENS)
    assert [order.asks_key for order in decode.watched if isinstance(order, Renew)] == [False]


def test_few_keys_are_kept_and_a_request_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_KEYS", 2)
    decode, asked = Decode(full(64)), []
    for number in range(5):
        key = bytes([number]) * 32
        named = dict(params(), remote_engine_id=f"p{number}")
        named["kvreshard"] = dict(named["kvreshard"], instance_id=instance_id_of(key))
        asked.append(request(f"d-{number}", TOKENS, kv_transfer_params=named))
        list(decode.side.arrive(asked[-1], named))
        decode.meet({f"d-{number}": key})
    assert len(decode.side.known._keys) == 2
    assert all(decode.side.count_loadable(one, 0) is not None for one in asked)


def test_what_ranks_say_of_keys_is_added_up_and_not_shown() -> None:
    said = ReshardWorkerMetadata(keys={"a": KEY}).aggregate(ReshardWorkerMetadata(keys={"b": KEY}, unmet={"c": GONE}))
    assert (said.keys, said.unmet, said.is_empty) == ({"a": KEY, "b": KEY}, {"c": GONE}, False)
    assert ReshardWorkerMetadata().is_empty
    shown = repr(said) + repr(ReshardMetadata(engine_metadata=KEY)) + repr(Load)
    assert repr(KEY)[2:20] not in shown


def test_what_travels_confirms_no_guess() -> None:
    """Two requests of one text: no mark of one is one of the other, and none is what the text gives without a key."""
    plain = digest_prompt(Prompt(TOKENS), 300, b"")
    told = [params()["kvreshard"]["prompt"] for _ in range(2)] + [msgspec.to_builtins(plain)]
    first, second, without_key = (
        set(re.findall(r"[0-9a-f]{16}", prompt["marks"] + prompt["whole"])) for prompt in told
    )
    assert len(first) == len(second) == len(without_key) == 19
    assert not first & (second | without_key)


def test_a_host_that_is_not_listed_is_not_contacted(caplog: pytest.LogCaptureFixture) -> None:
    """No order goes to the ranks; the request is computed here, and the log line is one line."""
    for host, is_asked in (("10.0.0.1", True), ("10.0.0.1.evil.example", False), ("11.0.0.1", False)):
        decode = Decode(full(64), has_met=False, hosts=SourceHosts(["10.0.0.0/8"]))
        asked = decode.arrive(dict(params(), remote_host=host), TOKENS)
        assert bool(decode.watched) is is_asked
        assert (decode.side.count_loadable(asked, 0), decode.fallbacks) == ((None, []) if is_asked else (0, ["host"]))
    assert "names 11.0.0.1:5 as its source, which is not among source_hosts" in caplog.text


def test_a_request_whose_id_has_lines_writes_one(caplog: pytest.LogCaptureFixture) -> None:
    decode = Decode(full(64))
    one = request("cmpl\nERROR forged\x1b[31m", TOKENS, kv_transfer_params={"do_remote_prefill": True})
    assert list(decode.side.arrive(one, one.kv_transfer_params)) == []
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert "cmpl\\nERROR forged\\x1b[31m" in record.getMessage()


@pytest.mark.parametrize(
    ("extra", "level"),
    [
        ({}, "WARNING"),
        ({"curve_secret_key_file": "a"}, "INFO"),
        ({"source_hosts": ["10.0.0.0/8"]}, None),
    ],
)
def test_that_any_host_may_be_named_is_said_once(
    extra: dict[str, object], level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvreshard")
    log_open_sources(read_options(extra))
    assert [record.levelname for record in caplog.records] == ([] if level is None else [level])
