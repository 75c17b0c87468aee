"""Exactly the common prefix of two prompts is found, and never a token more."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreshard.session.seal import prompt_key
from kvreshard.vllm.items import Item, digest_with_key, with_key
from kvreshard.vllm.prompt import (
    MARK_DIGITS,
    MAX_MARKS,
    MIN_STEP_TOKENS,
    Prompt,
    PromptDigest,
    count_matching,
    digest_prompt,
)


def marks_of(digest: PromptDigest) -> list[str]:
    return [digest.marks[i : i + MARK_DIGITS] for i in range(0, len(digest.marks), MARK_DIGITS)]


TOKENS = list(range(100, 400))
SECRET = bytes(range(32))


def matching(theirs: Prompt, num_tokens: int, mine: Prompt) -> int:
    """Through JSON, as the digests travel."""
    travelled = json.loads(json.dumps(msgspec.to_builtins(digest_prompt(theirs, num_tokens, SECRET))))
    return count_matching(msgspec.convert(travelled, PromptDigest), mine, SECRET)


@pytest.mark.parametrize("num_tokens", [1, 2, 15, 16, 17, 31, 32, 33, 299, 300])
def test_equal_prompts_match_to_the_last_token(num_tokens: int) -> None:
    assert matching(Prompt(TOKENS), num_tokens, Prompt(TOKENS[:num_tokens])) == num_tokens
    assert matching(Prompt(TOKENS), num_tokens, Prompt(TOKENS)) == num_tokens


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 100, 299])
def test_a_shorter_prompt_matches_to_the_last_mark(num_tokens: int) -> None:
    found = matching(Prompt(TOKENS), 300, Prompt(TOKENS[:num_tokens]))
    assert found == num_tokens // MIN_STEP_TOKENS * MIN_STEP_TOKENS


@given(
    tokens=st.lists(st.integers(0, 3), max_size=120), others=st.lists(st.integers(0, 3), max_size=120), data=st.data()
)
def test_never_more_than_the_common_prefix_and_less_than_a_step_fewer(
    tokens: list[int], others: list[int], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(tokens)))
    mine = [*tokens[:cut], *others]
    num_tokens = data.draw(st.integers(0, len(tokens)))
    common = next(
        (i for i, (a, b) in enumerate(zip(tokens, mine, strict=False)) if a != b), min(len(tokens), len(mine))
    )
    found = matching(Prompt(tokens), num_tokens, Prompt(mine))
    assert min(common, num_tokens) - MIN_STEP_TOKENS < found <= min(common, num_tokens)


def test_adapters_and_embeddings_are_part_of_the_text() -> None:
    assert matching(Prompt(TOKENS, adapter="a"), 300, Prompt(TOKENS, adapter="b")) == 0
    assert matching(Prompt(TOKENS, embeds="a"), 300, Prompt(TOKENS, embeds="b")) == 0
    assert matching(Prompt(TOKENS, adapter="a", embeds="b"), 300, Prompt(TOKENS, adapter="a", embeds="b")) == 300
    assert matching(Prompt(TOKENS, adapter="a"), 300, Prompt(TOKENS, embeds="a")) == 0


def test_items_and_salts_travel_beside_the_text() -> None:
    image = Item(40, 100, "cat")
    assert matching(Prompt(TOKENS, (image,), salt="s"), 300, Prompt(TOKENS)) == 300
    digest = digest_prompt(
        Prompt(TOKENS, (image, Item(290, 20, "cut"), Item(300, 5, "said later")), salt="s"), 300, SECRET
    )
    assert digest.items == with_key((image, Item(290, 20, "cut")), SECRET)
    assert digest.salt == digest_with_key("s", SECRET)


def test_nothing_that_travels_can_be_looked_up_or_compared_without_the_key() -> None:
    prompt = Prompt(TOKENS, (Item(40, 100, "cat", "grid"), Item(150, 10, "bare")), salt="s")
    first, second = (digest_prompt(prompt, 300, key) for key in (SECRET, bytes(32)))
    said = [
        {
            digest.whole,
            *marks_of(digest),
            digest.salt,
            *(text for item in digest.items for text in (item.name, item.grid)),
        }
        - {""}
        for digest in (first, second)
    ]
    assert len(said[0]) == 1 + len(marks_of(first)) + 1 + 3
    assert not said[0] & said[1]
    assert not said[0] & {"cat", "bare", "grid", "s"}
    assert [item.grid == "" for item in first.items] == [False, True]  # that nothing is known of a grid is said


def test_a_long_prompt_has_a_bounded_number_of_marks() -> None:
    digest = digest_prompt(Prompt(range(131072)), 131072, SECRET)
    assert len(marks_of(digest)) == MAX_MARKS
    assert digest.step % MIN_STEP_TOKENS == 0
    assert count_matching(digest, Prompt(range(131071)), SECRET) >= 131072 - digest.step


@pytest.mark.parametrize(
    "digest",
    [
        PromptDigest(10, 0, "", ""),
        PromptDigest(-1, 16, "", ""),
        PromptDigest(300, -16, "", "x" * 16 * 5),
        PromptDigest(5, 16, "0" * 16, "0" * 16 * 1000),
        PromptDigest(10**12, 16, "0" * 16, "0" * 16 * 3),
    ],
)
def test_digests_that_make_no_sense_match_nothing(digest: PromptDigest) -> None:
    assert count_matching(digest, Prompt(TOKENS), SECRET) == 0


def test_without_the_key_no_guess_is_confirmed() -> None:
    """Whoever reads the digests knows the code and the text, and has every key but the right one."""
    digest, prompt = digest_prompt(Prompt(TOKENS), 300, SECRET), Prompt(TOKENS)
    assert count_matching(digest, prompt, SECRET) == 300
    for wrong in (b"", bytes(32), SECRET[::-1], prompt_key(bytes(32), "r", 1)):
        assert count_matching(digest, prompt, wrong) == 0
        others = digest_prompt(prompt, 300, wrong)
        assert not set(marks_of(digest)) & set(marks_of(others))
        assert digest.whole != others.whole


def test_equal_prompts_of_two_requests_have_nothing_in_common() -> None:
    digests = [
        digest_prompt(Prompt(TOKENS), 300, prompt_key(SECRET, request, word))
        for request, word in (("r", 1), ("s", 1), ("r", 2))
    ]
    assert len({mark for digest in digests for mark in (*marks_of(digest), digest.whole)}) == 3 * (18 + 1)
