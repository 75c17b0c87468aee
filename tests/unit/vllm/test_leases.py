"""Leases of a prefill engine: slots and names, and which choices of a request share one."""

from dataclasses import replace

import pytest

from kvreshard.model.text import is_name
from kvreshard.vllm.leases import Leases
from kvreshard.vllm.prompt import Prompt

PROMPT = Prompt(list(range(10)), ((2, "picture"),), "adapter", "embeds", "salt")


@pytest.mark.parametrize(
    ("name", "prompt", "num_tokens", "is_shared"),
    [
        ("1_p", PROMPT, 9, True),
        ("1_p", replace(PROMPT, token_ids=[*range(9), 7]), 9, True),
        ("1_p", PROMPT, 8, False),
        ("1_p", replace(PROMPT, token_ids=[*range(8), 7]), 9, False),
        ("1_p", replace(PROMPT, items=()), 9, False),
        ("1_p", replace(PROMPT, adapter=""), 9, False),
        ("1_p", replace(PROMPT, embeds=""), 9, False),
        ("1_p", replace(PROMPT, salt="of another tenant"), 9, False),
        ("1_q", PROMPT, 9, False),
        ("p", PROMPT, 9, False),
    ],
)
def test_choices_of_one_request_share_what_they_have_computed_alike(
    name: str, prompt: Prompt, num_tokens: int, is_shared: bool
) -> None:
    leases = Leases(4)
    leases.acquire("0_p")
    leases.publish("0_p", PROMPT, 9, {"a": 1}, 2)
    assert leases.find_shared(name, prompt, num_tokens) == ({"a": 1} if is_shared else None)


def test_only_the_end_of_the_lease_that_is_shared_ends_the_sharing() -> None:
    leases = Leases(4)
    for name, params in (("p", {}), ("0_p", {"a": 1})):
        leases.acquire(name)
        leases.publish(name, PROMPT, 9, params, 2)
    for name in ("p", "1_p", "2_q"):
        leases.withdraw(name)
    assert leases.find_shared("2_p", PROMPT, 9) == {"a": 1}
    leases.withdraw("0_p")
    assert leases.find_shared("2_p", PROMPT, 9) is None


def test_slots_are_given_once_and_again_after_they_were_given_back() -> None:
    leases = Leases(2)
    first, second = leases.acquire("a"), leases.acquire("b")
    assert first is not None
    assert second is not None
    assert (leases.acquire("a"), {first.lease.slot, second.lease.slot}, leases.acquire("c")) == (first, {0, 1}, None)
    assert first.lease.word != second.lease.word
    leases.release("a")
    leases.release("a")
    again = leases.acquire("c")
    assert again is not None
    assert (again.lease.slot, leases.acquire("d")) == (first.lease.slot, None)


@pytest.mark.parametrize("request_id", ["x" * 257, "x" * 100_000, "a\nb", "\x1b[31m", "\ud800"])
def test_the_lease_of_any_request_has_a_name_that_peers_take(request_id: str) -> None:
    leases = Leases(2)
    leased, other = leases.acquire(request_id), leases.acquire(request_id + "y")
    assert leased is not None
    assert other is not None
    name = leased.lease.request
    assert is_name(name)
    assert name != other.lease.request
    assert leases.find(request_id) == leased


def test_blocks_are_held_from_the_publication_until_the_release() -> None:
    leases = Leases(2)
    for name, num_blocks in (("a", 3), ("b", 5)):
        leases.acquire(name)
        leases.publish(name, PROMPT, 9, {}, num_blocks)
    leases.withdraw("a")  # a reader may not have noticed yet
    assert (leases.num_blocks, leases.published) == (8, ["b"])
    leases.release("a")
    assert leases.num_blocks == 5
