"""Are weights the same in every process, and others under another key?"""

import subprocess
import sys

import numpy as np
import pytest
from tests.unit.tools import slow_digest

from kvreshard.model.errors import BindError
from kvreshard.tools.weights import WEIGHT_BITS, Role, Weights

PROGRAM = """
from kvreshard.tools.weights import Role, Weights
import numpy as np
print(Weights(b"key").along(Role.AXIS, "head", np.arange(4)).tolist())
"""


def test_weights_follow_their_definition() -> None:
    coordinates = np.array([0, 1, 2, 17, 1 << 20, 1 << 40], dtype=np.int64)
    for key in (b"k", b"another key" * 5):
        for role in Role:
            found = Weights(key).along(role, "head", coordinates).tolist()
            assert found == [slow_digest.weight(key, role.value.decode(), "head", c) for c in coordinates.tolist()]


def test_weights_are_written_down() -> None:
    """A change of these numbers is a change of the digest: engines of two versions would no longer agree."""
    assert Weights(b"key").along(Role.AXIS, "head", np.arange(3)).tolist() == [
        30164999885016594,
        12357911564191226,
        1357845736882389,
    ]


def test_another_process_has_the_same_weights() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(Weights(b"key").along(Role.AXIS, "head", np.arange(4)).tolist())


def test_weights_of_keys_roles_names_and_coordinates_are_unrelated() -> None:
    coordinates = np.arange(1000, dtype=np.int64)
    found = np.concatenate(
        [
            Weights(key).along(role, name, coordinates)
            for key in (b"a", b"b")
            for role in (Role.AXIS, Role.WORD)
            for name in ("head", "channel")
        ]
    )
    assert len(np.unique(found)) == len(found)
    assert int(found.max()) < 2**WEIGHT_BITS
    ones = [int(((found >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(WEIGHT_BITS)]
    assert all(abs(count - len(found) / 2) < 6 * len(found) ** 0.5 / 2 for count in ones)


@pytest.mark.parametrize("key", [b"", b"x" * 65])
def test_a_key_of_a_wrong_size_is_refused(key: bytes) -> None:
    with pytest.raises(BindError, match=f"digest key of {len(key)} bytes"):
        Weights(key)
