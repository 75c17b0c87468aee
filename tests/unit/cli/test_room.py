"""Is the memory that may be taken what the kernel says, and less within a limited control group?"""

from pathlib import Path

import pytest

from kvreshard.cli.scale import available_bytes

GIB = 1 << 30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(
        "MemTotal:       33554432 kB\nMemFree:         1048576 kB\nMemAvailable:    8388608 kB\nHugePages_Total: 0\n"
    )
    return path


def limit(group: Path, most: str, current_bytes: int, inactive_bytes: int) -> Path:
    group.mkdir()
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{current_bytes}\n")
    (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_bytes}\nactive_file 7\n")
    return group


@pytest.mark.parametrize(
    ("most", "current_bytes", "inactive_bytes", "expected"),
    [
        ("max", 0, 0, 8 * GIB),
        (str(4 * GIB), GIB, 0, 3 * GIB),
        (str(4 * GIB), 3 * GIB, GIB, 2 * GIB),
        (str(64 * GIB), GIB, 0, 8 * GIB),
        (str(GIB), 2 * GIB, 0, 0),
    ],
)
def test_the_lesser_of_machine_and_group(
    tmp_path: Path, meminfo: Path, most: str, current_bytes: int, inactive_bytes: int, expected: int
) -> None:
    assert available_bytes(meminfo, limit(tmp_path / "group", most, current_bytes, inactive_bytes)) == expected


def test_one_of_them_or_nobody_tells(tmp_path: Path, meminfo: Path) -> None:
    assert available_bytes(meminfo, tmp_path / "none") == 8 * GIB
    group = limit(tmp_path / "group", str(4 * GIB), GIB, 0)
    (group / "memory.stat").unlink()
    assert available_bytes(tmp_path / "none", group) == 3 * GIB
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


def test_this_machine() -> None:
    found = available_bytes()
    assert found is None or found > 0
