"""Which prefills share a lease?"""

import pytest

from kvreshard.vllm.choices import Choices
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
    choices = Choices()
    choices.add("0_p", PROMPT, 9, {"a": 1})
    assert choices.find(name, prompt, num_tokens) == ({"a": 1} if is_shared else None)


def test_only_the_end_of_the_lease_that_is_shared_ends_the_sharing() -> None:
    choices = Choices()
    choices.add("p", PROMPT, 9, {})
    choices.add("0_p", PROMPT, 9, {"a": 1})
    for name in ("p", "1_p", "2_q"):
        choices.remove(name)
    assert choices.find("2_p", PROMPT, 9) == {"a": 1}
    choices.remove("0_p")
    assert choices.find("2_p", PROMPT, 9) is None
