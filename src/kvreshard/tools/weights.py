"""Which pseudo-random weight does a coordinate have under a key?

A weight depends on the key, on what it is for (a field, an axis, the words of the packed axis, a state's position) and on
the coordinate, and on nothing else: any process computes the same one.

1. BLAKE2b of role and name under the key gives a 64-bit seed per axis.
2. SplitMix64 of seed and coordinate gives the weights of a whole array of coordinates at once; 56 bits of it are used.

Refused: a key that is empty or longer than BLAKE2b takes (BindError).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvreshard.model.errors import BindError
from kvreshard.model.ownership import Coordinates
from kvreshard.tools.modular import Residues

# 128 words of 32 bits times limbs of 14 bits stay below 2^53: with 56 bits a row of 256 bfloat16 takes 4 limbs instead of
# 5, and a product of 4 columns runs 1.4 times as fast as one of 5.
WEIGHT_BITS = 56
MAX_KEY_BYTES = 64


class Role(Enum):
    """What a weight is for; weights of different roles are unrelated."""

    FIELD = b"field"
    AXIS = b"axis"
    WORD = b"word"
    POSITION = b"position"
    PRESENCE = b"presence"


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of one key."""

    key: bytes

    def __post_init__(self) -> None:
        if not 1 <= len(self.key) <= MAX_KEY_BYTES:
            raise BindError(
                f"digest key of {len(self.key)} bytes; both sides need one key of 1 to {MAX_KEY_BYTES} bytes"
            )

    def along(self, role: Role, name: str, coordinates: Coordinates) -> Residues:
        """The weight of every coordinate, same shape, below 2^56."""
        text = role.value + b"\0" + name.encode()
        seed = hashlib.blake2b(text, digest_size=8, key=self.key, person=b"kvreshard-digest").digest()
        state = np.frombuffer(seed, dtype="<u8").astype(np.uint64)
        mixed = state + (coordinates.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found: Residues = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(64 - WEIGHT_BITS)
        return found

    def single(self, role: Role, name: str = "", coordinate: int = 0) -> int:
        """The weight of one coordinate."""
        return int(self.along(role, name, np.array([coordinate], dtype=np.int64))[0])
