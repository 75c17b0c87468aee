"""How are whole arrays multiplied modulo the prime 2^61 - 1, and how do they enter an exact float64 product?

1. `multiply`: numbers below the prime are cut into 31 and 30 bits, so that each partial product and their sum fit 64 bits;
   2^61 = 1 folds what lies above.
2. `limbs`: a number as float64 limbs of few bits. A matrix product over them is exact, in any order of summation, as long
   as no sum reaches 2^53: that is what lets the linear algebra library do the work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Residues = NDArray[np.uint64]
Float64s = NDArray[np.float64]

PRIME = (1 << 61) - 1
EXACT_BITS = 53
"""float64 holds every integer below 2^53."""

_PRIME = np.uint64(PRIME)
_LOW_30, _LOW_31 = np.uint64((1 << 30) - 1), np.uint64((1 << 31) - 1)
_30, _31, _61, _ONE = np.uint64(30), np.uint64(31), np.uint64(61), np.uint64(1)


def reduce(values: Residues) -> Residues:
    """Any 64-bit numbers modulo the prime."""
    folded = (values & _PRIME) + (values >> _61)
    return np.where(folded >= _PRIME, folded - _PRIME, folded)


def multiply(a: Residues, b: Residues) -> Residues:
    """Products modulo the prime, broadcast. Post-condition: equal to Python's `a * b % PRIME` for a, b below the prime."""
    a_high, a_low, b_high, b_low = a >> _31, a & _LOW_31, b >> _31, b & _LOW_31
    middle = a_high * b_low + a_low * b_high
    # a_high * b_high * 2^62 = 2 * that; middle * 2^31 has its upper part wrapped around. The sum stays below 2^64.
    total = ((a_high * b_high) << _ONE) + (middle >> _30) + ((middle & _LOW_30) << _31) + a_low * b_low
    return reduce(total)


def product(factors: Sequence[Residues]) -> Residues:
    """The product of all factors, broadcast against one another."""
    result = factors[0]
    for factor in factors[1:]:
        result = multiply(result, factor)
    return result


def totals(values: Residues) -> list[int]:
    """The sum along the last of two axes, modulo the prime. Halves are summed apart: 2^32 of them would overflow."""
    low, high = values & np.uint64(0xFFFFFFFF), values >> np.uint64(32)
    sums = zip(low.sum(axis=1, dtype=np.uint64).tolist(), high.sum(axis=1, dtype=np.uint64).tolist(), strict=True)
    return [(lower + (upper << 32)) % PRIME for lower, upper in sums]


def total(values: Residues) -> int:
    """The sum of all values, modulo the prime."""
    return totals(values.reshape(1, -1))[0]


def limbs(values: Residues, bits: int) -> Float64s:
    """Each value as limbs of `bits` bits, lowest first: shape (num_values, num_limbs)."""
    flat = values.reshape(-1)
    count = max(1, -(-int(flat.max()).bit_length() // bits)) if flat.size else 1
    shifts = np.arange(count, dtype=np.uint64) * np.uint64(bits)
    return ((flat[:, None] >> shifts) & np.uint64((1 << bits) - 1)).astype(np.float64)
