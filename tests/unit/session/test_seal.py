"""Does a seal say whose it is and what it is about, and can nobody make one without the key?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreshard.model.tables import PageTable
from kvreshard.session.lease import Lease
from kvreshard.session.seal import Seal, SealError, check_seal, instance_id_of, make_seal, new_key, prompt_key

KEY = bytes(range(32))
TABLES = {"g0": PageTable([4, 9], 21, 1), "g1": PageTable([3], 21)}
GOOD = (KEY, ("p", "life"), Lease("r", 5, 0xABC), TABLES, b"facts")


def table(pages: list[int], num_tokens: int = 21, first_page: int = 1) -> dict[str, PageTable]:
    return {**TABLES, "g0": PageTable(pages, num_tokens, first_page)}


def test_what_was_sealed_is_taken() -> None:
    key, source, lease, tables, details = GOOD
    seal = make_seal(*GOOD)
    check_seal(key, source, lease, tables, seal)
    check_seal(key, source, lease, dict(reversed(tables.items())), Seal(details, bytes(seal.code)))


@pytest.mark.parametrize(
    "changed",
    [
        (bytes(32), *GOOD[1:]),
        (KEY, ("q", "life"), *GOOD[2:]),
        (KEY, ("p", "lif"), *GOOD[2:]),
        (KEY, ("pl", "ife"), *GOOD[2:]),
        (*GOOD[:2], Lease("s", 5, 0xABC), *GOOD[3:]),
        (*GOOD[:2], Lease("r", 6, 0xABC), *GOOD[3:]),
        (*GOOD[:2], Lease("r", 5, 0xABD), *GOOD[3:]),
        (*GOOD[:3], table([9, 4]), b"facts"),
        (*GOOD[:3], table([4]), b"facts"),
        (*GOOD[:3], table([4, 9, 3]), b"facts"),
        (*GOOD[:3], table([4, 10]), b"facts"),
        (*GOOD[:3], table([4, 9], 20), b"facts"),
        (*GOOD[:3], table([4, 9], 21, 0), b"facts"),
        (*GOOD[:3], {"g0": TABLES["g1"], "g1": TABLES["g0"]}, b"facts"),
        (*GOOD[:3], {"g0": TABLES["g0"]}, b"facts"),
        (*GOOD[:3], {**TABLES, "g2": PageTable([], 21)}, b"facts"),
        (*GOOD[:4], b"fact"),
        (*GOOD[:4], b""),
    ],
)
def test_a_seal_over_anything_else_does_not_hold(changed: tuple) -> None:  # type: ignore[type-arg]
    key, source, lease, tables, details = GOOD
    with pytest.raises(SealError, match=r"request 'r' of engine 'p'.*were not sealed by that engine.*Nothing was read"):
        check_seal(key, source, lease, tables, Seal(details, make_seal(*changed).code))
    assert make_seal(*changed).code != make_seal(*GOOD).code


@given(code=st.binary(max_size=40))
def test_a_guess_does_not_hold(code: bytes) -> None:
    key, source, lease, tables, details = GOOD
    with pytest.raises(SealError):
        check_seal(key, source, lease, tables, Seal(details, code))


def test_a_name_of_a_stranger_writes_no_line_of_its_own() -> None:
    with pytest.raises(SealError) as caught:
        check_seal(KEY, ("p\n", "life"), Lease("r\x1b[31m" + "x" * 500, 5, 1), {}, Seal(b"", b""))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_keys_are_new_and_stand_in_nothing_that_follows_from_them() -> None:
    first, second = new_key(), new_key()
    assert len(first) == len(second) == 32
    assert first != second
    assert instance_id_of(first) == instance_id_of(first) != instance_id_of(second)
    derived = {bytes.fromhex(instance_id_of(KEY)), prompt_key(KEY, "r", 1)[:16], make_seal(*GOOD).code, KEY[:16]}
    assert len(derived) == 4


def test_two_requests_have_two_prompt_keys() -> None:
    keys = {prompt_key(KEY, "r", 1), prompt_key(KEY, "s", 1), prompt_key(KEY, "r", 2), prompt_key(bytes(32), "r", 1)}
    assert len(keys) == 4
