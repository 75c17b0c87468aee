"""Is the arithmetic modulo 2^61 - 1 that of Python's integers, at the edges too?"""

import numpy as np
import pytest

from kvreshard.tools.modular import EXACT_BITS, PRIME, limbs, multiply, product, reduce, total, totals

EDGES = [0, 1, 2, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**32, 2**60, PRIME - 2, PRIME - 1]


def numbers(seed: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, PRIME, 500, dtype=np.uint64)
    return np.concatenate([np.array(EDGES, dtype=np.uint64), drawn])


def test_products_are_those_of_integers() -> None:
    a = numbers(0)
    found = multiply(a[:, None], a[None])
    assert found.tolist() == [[x * y % PRIME for y in a.tolist()] for x in a.tolist()]
    assert product([a, a, a]).tolist() == [x**3 % PRIME for x in a.tolist()]


def test_sums_and_remainders_are_those_of_integers() -> None:
    a = numbers(1)
    assert total(a) == sum(a.tolist()) % PRIME
    assert totals(np.stack([a, a])) == [total(a)] * 2
    whole = [0, PRIME - 1, PRIME, PRIME + 1, 2**62, 2**64 - 1]
    assert reduce(np.array(whole, dtype=np.uint64)).tolist() == [x % PRIME for x in whole]


@pytest.mark.parametrize("bits", [12, 13, 15, 21, 45])
def test_limbs_put_together_are_the_number(bits: int) -> None:
    a = numbers(2)
    found = limbs(a, bits)
    assert found.max() < 2**bits < 2**EXACT_BITS
    together = [sum(int(limb) << (bits * i) for i, limb in enumerate(row)) for row in found.tolist()]
    assert together == a.tolist()
