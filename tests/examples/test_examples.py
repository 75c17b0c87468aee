"""Does every example run, alone, and print what its reader is told to expect?"""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

EXPECTED = {
    "route_two_engines.py": [
        "decode ranks (0, 1) read head 0 of 2 from prefill rank 0",
        "81920 bytes per token in all",
        "204800 bytes per token of the last 1024",
    ],
    "bind_a_request.py": ["from prefill rank 1: ", "1048576 bytes of page 9 hold no token and are zeroed"],
    "explain_a_mismatch.py": [
        "another cache dtype: LayoutMismatch: fields 'layers.0.attn.k', 'layers.0.attn.v', 'layers.1.attn.k' and 61 more: encoding is 'bfloat16' in engine 'prefill'",
        "another model: LayoutMismatch: fields 'layers.32.attn.k', 'layers.32.attn.v', 'layers.33.attn.k' and 61 more: in engine 'decode'",
        "nothing that matters: fine",
    ],
    "move_in_memory.py": [
        "moved 622080 bytes in 54 copies",
        "arrived: 622080 bytes",
        "prefill rank 1 was told: [b'request 0']",
    ],
    "check_this_machine.py": ["python: ok", "route p -> d: ok: proved; 4 transfers"],
    "replay_a_record.py": [
        "copies follow from it",
        "not in the plan: every byte arrives",
    ],
    "compare_digests.py": ["as it arrived: equal", "with one bit flipped: wrong, field 'layers.0.attn.latent'"],
}


def test_every_example_is_listed() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name: str) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for line in EXPECTED[name]:
        assert line in done.stdout, done.stdout
