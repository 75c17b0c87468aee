"""Leases of a prefill engine: slots and names, and which choices of a request share one."""

import pytest

from kvreshard.model.text import is_name
from kvreshard.vllm.leases import Leases
from kvreshard.vllm.prompt import Prompt

PROMPT = Prompt(list(range(10)), ((2, "picture"),), "adapter")


@pytest.mark.parametrize(
    ("name", "prompt", "num_tokens", "is_shared"),
    [
        ("1_p", PROMPT, 9, True),
        ("1_p", Prompt([*range(9), 7], PROMPT.items, PROMPT.adapter), 9, True),
        ("1_p", PROMPT, 8, False),
        ("1_p", Prompt([*range(8), 7], PROMPT.items, PROMPT.adapter), 9, False),
        ("1_p", Prompt(PROMPT.token_ids, (), PROMPT.adapter), 9, False),
        ("1_p", Prompt(PROMPT.token_ids, PROMPT.items), 9, False),
        ("1_q", PROMPT, 9, False),
        ("p", PROMPT, 9, False),
    ],
)
def test_choices_of_one_request_share_what_they_have_computed_alike(
    name: str, prompt: Prompt, num_tokens: int, is_shared: bool
) -> None:
    leases = Leases(4)
    leases.publish("0_p", PROMPT, 9, {"a": 1})
    assert leases.find_shared(name, prompt, num_tokens) == ({"a": 1} if is_shared else None)


def test_only_the_end_of_the_lease_that_is_shared_ends_the_sharing() -> None:
    leases = Leases(4)
    leases.publish("p", PROMPT, 9, {})
    leases.publish("0_p", PROMPT, 9, {"a": 1})
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
    assert (leases.acquire("a"), {first.slot, second.slot}, leases.acquire("c")) == (first, {0, 1}, None)
    assert first.word != second.word
    leases.release("a")
    leases.release("a")
    again = leases.acquire("c")
    assert again is not None
    assert (again.slot, leases.acquire("d")) == (first.slot, None)


@pytest.mark.parametrize("request_id", ["x" * 257, "x" * 100_000, "a\nb", "\x1b[31m", "\ud800"])
def test_the_lease_of_any_request_has_a_name_that_peers_take(request_id: str) -> None:
    leases = Leases(2)
    grant, other = leases.acquire(request_id), leases.acquire(request_id + "y")
    assert grant is not None
    assert other is not None
    assert is_name(grant.request)
    assert grant.request != other.request
    assert (leases.find(request_id), leases.find_request(grant.request)) == (grant, request_id)
    leases.release(request_id)
    assert leases.find_request(grant.request) == grant.request
